"""Pictures, addresses and files of encoded images that a stranger may bring."""

import base64
import io
import json
import os
import random
import struct

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import CLIPImageProcessor, SiglipImageProcessor

from helpers.inputs.chat_templates import TEXT_TEMPLATES, make_processor
from helpers.inputs.hostile_inputs import is_ours
from helpers.inputs.hostile_memory import png
from helpers.models.tiny_models import make_model, pixels
from hf_xattn import XAttnProcessor
from hf_xattn.processing.image_limits import LIMITS, check_image_processor
from hf_xattn.processing.image_reading import read_image
from hf_xattn.storage.image_files import load_image_cache, save_image_cache


def picture(side=24):
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (side, side, 3), dtype=np.uint8))


def pictures():
    """Broken files, seeded: (name, bytes)."""
    generator = random.Random(3)
    for kind in ("PNG", "JPEG", "GIF", "TIFF", "WEBP", "BMP", "PPM", "TGA", "ICO"):
        buffer = io.BytesIO()
        picture().save(buffer, kind)
        whole = buffer.getvalue()
        for size in (0, 3, 20, len(whole) // 2):
            yield f"{kind} of {size} bytes", whole[:size]
        for _ in range(12):
            data = bytearray(whole)
            for _ in range(3):
                data[generator.randrange(min(len(data), 200))] ^= 1 << generator.randrange(8)
            yield f"{kind} with other bits {generator.random()}", bytes(data)
    yield "a PNG of 10^10 pixels", png(100_000, 100_000)
    yield "a PNG of no pixels", png(0, 5)
    yield "a PNG of 2^31 columns", png(2**31 - 1, 2**31 - 1)
    yield "an EPS file", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n(x) print\n"
    yield "an SVG file", b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>"
    yield (
        "a TIFF of 2^32 columns",
        b"II*\0" + struct.pack("<IHHHIIHHII", 8, 2, 256, 4, 1, 2**32 - 1, 257, 4, 1, 2**32 - 1),
    )


def test_broken_pictures(tmp_path):
    """An error of a decoder, which names no argument, or gigabytes for a few bytes."""
    wrong, refused, read = {}, 0, 0
    for name, content in pictures():
        (tmp_path / "a.png").write_bytes(content)
        data = "data:image/png;base64," + base64.b64encode(content).decode()
        for source in (tmp_path / "a.png", data):
            try:
                image = read_image(source)
            except Exception as error:
                refused += 1
                if not (is_ours(error) and "`images`" in str(error)):
                    wrong[name] = f"{type(error).__name__}: {error}"
            else:
                read += 1
                if image.mode != "RGB" or image.width * image.height > LIMITS.max_pixels:
                    wrong[name] = f"{image.mode} of {image.size}"
    assert not wrong, "\n".join(f"{name}: {why}" for name, why in wrong.items())
    assert refused >= 100 and read, "bits of the values of a picture cannot be told from others"


def test_limits_of_pictures(monkeypatch, tmp_path):
    """A limit that only the largest pictures meet, or that cannot be changed."""
    picture(64).save(tmp_path / "a.png")
    processor = make_processor(TEXT_TEMPLATES["guard"])
    processor(images=picture(64), text="a")
    monkeypatch.setattr(LIMITS, "max_pixels", 100)
    with pytest.raises(ValueError, match="at most 100 pixels"):
        processor(images=picture(64), text="a")
    for source in (tmp_path / "a.png", (tmp_path / "a.png").read_bytes(), picture(64)):
        with pytest.raises(ValueError, match="`images` holds an image of 64 x 64 pixels: expected at most 100"):
            read_image(source)
    with pytest.raises(ValueError, match="no such file"):
        read_image("a\0b")


@pytest.mark.parametrize("as_array", [False, True], ids=["a file", "an array"])
@pytest.mark.parametrize("rgb", [True, False])
def test_a_picture_that_becomes_long(as_array, rgb):
    """One of 20,000 pixels, of which an image processor that sets the shortest edge makes a billion."""
    images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    processor = XAttnProcessor(images, make_processor(TEXT_TEMPLATES["guard"]).tokenizer)
    narrow = Image.new("RGB", (1, 200_000))
    given = np.array(narrow) if as_array and rgb else narrow
    with pytest.raises(ValueError, match="would make 204800000 pixels: expected at most"):
        processor(images=given, text="a", do_convert_rgb=rgb)
    assert processor(images=narrow, text="a", size={"height": 32, "width": 32})["pixel_values"].shape[-1] == 32
    assert processor(images=Image.new("RGB", (1, 200)), text="a")["pixel_values"].shape[-1] == 32


@pytest.mark.parametrize(
    "size",
    [
        {"height": 10**6, "width": 10**6},
        {"height": -1, "width": 4},
        {"height": "x", "width": 4},
        {"height": float("nan"), "width": 4},
    ],
)
def test_image_processors_with_other_sizes(size, tmp_path):
    """A processor from a file that scales every picture up to a terabyte."""
    processor = make_processor(TEXT_TEMPLATES["guard"])
    with pytest.raises(ValueError, match="`size` of the image processor"):
        images = SiglipImageProcessor()
        images.size = size
        XAttnProcessor(images, processor.tokenizer)
    processor.save_pretrained(tmp_path)
    file = next(path for path in tmp_path.glob("*processor_config.json") if "size" in path.read_text())
    content = json.loads(file.read_text())
    (content.get("image_processor") or content)["size"] = size
    file.write_text(json.dumps(content))
    with pytest.raises((ValueError, TypeError)):
        XAttnProcessor.from_pretrained(tmp_path)


def test_sizes_of_published_image_processors():
    """A processor that is refused because its edges are numbers of pixels."""
    from transformers import CLIPImageProcessor, MllamaImageProcessor, Qwen2VLImageProcessor

    for kind in (SiglipImageProcessor, CLIPImageProcessor, MllamaImageProcessor, Qwen2VLImageProcessor):
        check_image_processor(kind())
    with pytest.raises(ValueError, match="max_image_tiles"):
        check_image_processor(MllamaImageProcessor(max_image_tiles=10**9))


def caches(file):
    """Changes of a file of encoded images, seeded: (name, bytes, or a function that changes tensors and metadata)."""
    whole = file.read_bytes()
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    generator = random.Random(4)
    for size in (0, 5, 8, 100, end, len(whole) - 1):
        yield f"of {size} bytes", whole[:size]
    yield "with more bytes", whole + b"\0" * 8
    for place in sorted(generator.sample(range(end), 40)):
        data = bytearray(whole)
        data[place] ^= 1 << generator.randrange(8)
        yield f"flip of byte {place}", bytes(data)

    def facts(**changes):
        return lambda tensors, metadata: metadata.update(
            images=json.dumps({**json.loads(metadata["images"]), **changes})
        )

    for sizes in (
        [16, 17],
        [10**12],
        [-16, 32, 16],
        [0, 32],
        ["16", "16"],
        [16.0, 16.0],
        "xx",
        None,
        [],
        {"a": 1},
        [True, 31],
    ):
        yield f"sizes {sizes}", facts(sizes=sizes)
    good = {"of": "pixel_values", "dtype": "float32", "sizes": [1, 1]}
    for change in (
        {"of": "x"},
        {"of": 3},
        {"dtype": "load"},
        {"dtype": 3},
        {"sizes": [10**12]},
        {"sizes": []},
        {"sizes": "x"},
    ):
        yield f"digests {change}", facts(digests=[{**good, **change}])
    for digests in ([3], "x", 3, [{}], [good, good]):
        yield f"digests {digests}", facts(digests=digests)
    for text in ("", "[]", "3", "{", "[" * 10_000, '{"a": ' + "1" * 5000 + "}"):
        yield f"facts {text[:5]} of {len(text)}", lambda tensors, metadata, text=text: metadata.update(images=text)
    for value in ("", "hf_xattn image cache 2", "x"):
        yield f"format {value}", lambda tensors, metadata, value=value: metadata.update(format=value)
    yield "another model", lambda tensors, metadata: metadata.update(identity="0" * 64)
    for name in ("layers.0.keys", "layers.1.values", "digests.0.values"):
        yield f"without {name}", lambda tensors, metadata, name=name: tensors.pop(name)
        yield (
            f"integers for {name}",
            lambda tensors, metadata, name=name: tensors.update({name: tensors[name].to(torch.int32)}),
        )
        yield (
            f"one axis of {name}",
            lambda tensors, metadata, name=name: tensors.update({name: tensors[name].flatten()}),
        )
        yield f"nothing in {name}", lambda tensors, metadata, name=name: tensors.update({name: tensors[name][:0]})
    yield "a surplus tensor", lambda tensors, metadata: tensors.update(surplus=torch.zeros(4))
    yield (
        "a mask of other rows",
        lambda tensors, metadata: tensors.update({"images.token_mask": torch.ones(3, 32, dtype=torch.bool)}),
    )


def test_files_of_encoded_images(tmp_path):
    """Encoded images of another model, or changed ones, that are taken, or an error from inside of torch."""
    model, file, other = make_model(), tmp_path / "images.safetensors", tmp_path / "other.safetensors"
    save_image_cache(model.encode_images(pixel_values=pixels(2, 2)), file, model)
    expected = load_image_cache(file, model).cross_attention_cache
    wrong, count = {}, 0
    for name, change in caches(file):
        count += 1
        if isinstance(change, bytes):
            other.write_bytes(change)
        else:
            with safe_open(file, "pt") as opened:
                tensors, metadata = {n: opened.get_tensor(n) for n in opened.keys()}, dict(opened.metadata())
            change(tensors, metadata)
            save_file({n: tensor.contiguous() for n, tensor in tensors.items()}, other, metadata)
        try:
            got = load_image_cache(other, model).cross_attention_cache
        except Exception as error:
            if not is_ours(error):
                wrong[name] = f"{type(error).__name__}: {error}"
            continue
        same = name.startswith("flip") and all(
            torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values) for a, b in zip(got.layers, expected.layers)
        )
        if not same:
            wrong[name] = "taken"
    assert not wrong, "\n".join(f"{name}: {why}" for name, why in wrong.items())
    assert count >= 80 and not os.path.exists(tmp_path / "run")
