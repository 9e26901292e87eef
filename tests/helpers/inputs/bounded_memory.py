"""Run as a program: refuses checkpoints, image caches and pictures that ask for terabytes, with little memory and in
little time.
"""

import io
import os
import resource
import struct
import tempfile
import zlib
from pathlib import Path


os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from helpers.inputs.damaged_checkpoints import WEIGHTS, edit_json, fresh, setting
from helpers.models.tiny_models import make_model, make_text
from hf_xattn import XAttnForConditionalGeneration, retrofit
from hf_xattn.processing.image_reading import read_image


MORE = 600 * 2**20  # bytes that the whole program may take beyond what it has taken for a small model
ADDRESSES = 6 * 2**30  # bytes: nothing larger can be asked for
CPU_SECONDS = 120


def png(width, height, data=b""):
    """A file whose header says one thing and whose data are another."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(data, 9)) + chunk(b"IEND", b"")


def refused(what, run):
    try:
        run()
    except (ValueError, TypeError):
        return
    raise SystemExit(f"{what} was taken")


def of_size(*path, value):
    return edit_json("config.json", setting(value, *path))


def wide_embedding(folder):
    """A configuration of 2^20 wide layers, and a file that holds one row of this width."""
    for part in ("text_config", "cross_attention_config"):
        edit_json(
            "config.json", lambda content, part=part: content[part].update(hidden_size=2**20, intermediate_size=2**20)
        )(folder)
    tensors = load_file(folder / WEIGHTS)
    save_file({**tensors, "surplus": torch.zeros(2**20)}, folder / WEIGHTS, {"format": "pt"})


def main():
    with tempfile.TemporaryDirectory() as work:
        source, text = Path(work) / "source", Path(work) / "text"
        make_model().save_pretrained(source)
        make_text().save_pretrained(text)
        XAttnForConditionalGeneration.from_pretrained(source)
        retrofit(text)
        Image.new("RGBA", (64, 64)).convert("RGB")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESSES, used + ADDRESSES))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        changes = {
            "10^9 layers": of_size("text_config", "num_hidden_layers", value=10**9),
            "2000 layers": of_size("text_config", "num_hidden_layers", value=2000),
            "10^9 layers of a tower": of_size("vision_config", "num_hidden_layers", value=10**9),
            "an added vocabulary of 10^12": of_size("additional_vocab_size", value=10**12),
            "an added vocabulary of 10^8": of_size("additional_vocab_size", value=10**8),
            "a vocabulary of 10^8": of_size("text_config", "vocab_size", value=10**8),
            "images of 60000 pixels": of_size("vision_config", "image_size", value=60000),
            "an inner width of 10^6": of_size("text_config", "intermediate_size", value=10**6),
            "all widths": wide_embedding,
        }
        for what, change in changes.items():
            folder = fresh(source, Path(work) / "copy")
            change(folder)
            refused(what, lambda folder=folder: XAttnForConditionalGeneration.from_pretrained(folder))
        for what, path, value in (
            ("10^9 layers of a base", "num_hidden_layers", 10**9),
            ("a vocabulary of 10^8 of a base", "vocab_size", 10**8),
            ("an inner width of 10^6 of a base", "intermediate_size", 10**6),
        ):
            folder = fresh(text, Path(work) / "copy")
            of_size(path, value=value)(folder)
            refused(what, lambda folder=folder: retrofit(folder))
        pictures = Path(work) / "picture.png"
        for what, content in {
            "100000 x 100000": png(100_000, 100_000),
            "12000 x 12000": png(12_000, 12_000),
            "zeros that unpack to a gigabyte": png(16, 16, b"\0" * 2**28),
            "a BMP of 2^31 pixels": b"BM"
            + struct.pack("<IHHIIiiHHIIiiII", 100, 0, 0, 54, 40, 2**16, 2**15, 1, 24, 0, 0, 1, 1, 0, 0),
        }.items():
            pictures.write_bytes(content)
            if "unpack" in what:
                read_image(pictures)  # the data behind the picture's own are not unpacked
            else:
                refused(what, lambda: read_image(pictures))
        refused("a text of 100 MB", lambda: read_image("data:image/png;base64," + "A" * 10**8))
        whole = io.BytesIO()
        Image.new("RGBA", (4000, 4000), (1, 2, 3, 4)).save(whole, "PNG", compress_level=1)
        pictures.write_bytes(whole.getvalue())
        assert read_image(pictures).size == (4000, 4000), "16 million pixels are read, 11 bytes each"
        more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        print(f"{more / 2**20:.0f} MiB more than a small model takes")
        if more > MORE:
            raise SystemExit(f"{more} bytes more")


if __name__ == "__main__":
    main()
