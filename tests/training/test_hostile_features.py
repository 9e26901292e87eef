"""Folders of vision features and videos of strangers and of bad disks: refused with an error of this package."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from helpers.inputs.chat_templates import TEXT_TEMPLATES, make_processor
from helpers.inputs.hostile_inputs import is_ours
from helpers.models.encoded_features import save_features
from hf_xattn import VisionFeatures
from hf_xattn.processing.image_limits import LIMITS
from hf_xattn.processing.image_reading import frames_to_read, read_frames
from hf_xattn.training.vision_features import SHARDS
from hf_xattn.utils.checkpoint_files import sha256_of


def shards(digest, tensors, metadata):
    """Changes of a shard: (name, bytes of the file, or tensors and metadata)."""
    real = tensors[digest]

    def instead(tensor):
        return {**tensors, digest: tensor}, metadata

    yield "NaN", instead(real * torch.nan)
    yield "an infinite value", instead(torch.cat([real[:-1], real[-1:] * 1e30 * 1e30]))
    yield "integers", instead(real.to(torch.int32))
    yield "truth values", instead(real > 0)
    yield "one axis", instead(real.flatten())
    yield "three axes", instead(real[None])
    yield "no tokens", instead(real[:0])
    yield "other width", instead(real[:, :-1])
    yield "other rows", instead(real[:-1])
    yield "another tower", (tensors, {**metadata, "tower": "0" * 64})
    yield "another dtype", instead(real.half())
    yield "another image processor", (tensors, {**metadata, "image_processor": "0" * 64})
    yield "another format", (tensors, {**metadata, "format": "x"})
    yield "no metadata", (tensors, None)
    yield "the picture left out", ({name: each for name, each in tensors.items() if name != digest}, metadata)
    yield "tiles of no picture", ({**tensors, f"{digest}.x": real.clone()}, metadata)


def test_folders_of_features(tmp_path, tmp_path_factory):
    """Features of another shape or of no number that a model learns from, or an error from inside of safetensors or
    torch.
    """
    model, data, features = save_features(tmp_path_factory.mktemp("features"))
    ours, processor = AutoModelForImageTextToText.from_pretrained(model), AutoProcessor.from_pretrained(model)
    pictures = [data / name for name in ("red.png", "again.png")]
    others = sorted(path for path in data.glob("*.png") if sha256_of(path) != sha256_of(pictures[0]))[:1]
    digest = sha256_of(pictures[0])
    tensors, metadata = {}, None
    for path in features.glob(SHARDS):
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            tensors |= {name: file.get_tensor(name) for name in file.keys()}
    file = tmp_path / SHARDS.replace("*", "1")
    save_file(tensors, file, metadata)
    whole = file.read_bytes()

    def read():
        found = VisionFeatures(tmp_path, ours).reader(processor)._look_up([[*pictures[:1], *others]])
        with torch.no_grad():
            ours(torch.ones(1, 4, dtype=torch.long), vision_features=found["vision_features"])

    read()
    cases = [*shards(digest, tensors, metadata)]
    cases += [(f"{size} bytes", whole[:size]) for size in (0, 5, 8, 100, len(whole) // 2, len(whole) - 1)]
    cases += [("no safetensors", b"\x80\x04c__builtin__\nexec\n" + whole), ("more bytes", whole + b"\0" * 8)]
    wrong = {}
    for name, content in cases:
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            save_file({key: tensor.contiguous() for key, tensor in content[0].items()}, file, content[1])
        try:
            read()
        except Exception as error:
            if not is_ours(error):
                wrong[name] = f"{type(error).__name__}: {str(error)[:200]}"
        else:
            wrong[name] = "taken"
    assert not wrong, "\n".join(f"{name}: {why}" for name, why in wrong.items())


def header(frames, rate=25.0, width=320, height=240):
    """What a decoder says of a file, before a frame is decoded."""
    return SimpleNamespace(total_num_frames=frames, fps=rate, width=width, height=height)


@pytest.mark.parametrize(
    ("says", "options", "words"),
    [
        (header(0), {}, "no frames"),
        (header(-1), {}, "no frames"),
        (header(10**6), {}, "at most 4096 frames, got 1000000"),
        (header(2**62), {}, "at most 4096 frames"),
        (header(2**62), {"fps": 1}, "at most 4096 frames"),
        (header(9), {"num_frames": 10}, "`num_frames` is 10, and it has 9"),
        (header(9, rate=0.0), {"fps": 1}, "`fps`"),
        (header(9, rate=None), {"fps": 1}, "`fps`"),
        (header(9), {"fps": -1}, "`fps`"),
        (header(9, width=2**20, height=2**20), {}, "too large"),
        (header(4000, width=7680, height=4320), {}, "too large.*`num_frames`"),
    ],
)
def test_headers_of_videos(says, options, words):
    """Gigabytes of frames, or a list of places as long as a header says."""
    with pytest.raises(ValueError, match=words):
        frames_to_read(says, **{"num_frames": None, "fps": None, **options})


def test_frames_that_are_chosen():
    """A long video of which few frames are asked for, and that is refused; places that are not even."""
    assert frames_to_read(header(10**6), 4, None).tolist() == [0, 250_000, 500_000, 750_000]
    assert frames_to_read(header(50), None, 1.0).tolist() == [0, 25]
    assert frames_to_read(header(3), None, None).tolist() == [0, 1, 2]


def videos(folder):
    still = np.zeros((1, 4, 4, 3), dtype=np.uint8)
    (folder / "text.mp4").write_bytes(b"no video")
    (folder / "empty.mp4").write_bytes(b"")
    (folder / "model.mp4").write_bytes(b"\x80\x04c__builtin__\nexec\n")
    (folder / "frames").mkdir()
    yield "no frames", still[:0]
    yield "no frames in a list", []
    yield "10^6 frames", np.broadcast_to(still, (10**6, 4, 4, 3))
    yield "10^6 frames in a list", [still[0]] * 10**6
    yield "10^6 frames in a tensor", torch.zeros(1, 4, 4, 3).expand(10**6, -1, -1, -1)
    yield "NaN", still * np.nan
    yield "infinite values", torch.full((2, 3, 4, 4), torch.inf)
    yield "objects", np.full((2, 4, 4, 3), None)
    yield "five axes", [still[None]]
    yield "no pixels", still[:, :0]
    yield "seven channels", np.zeros((2, 8, 8, 7), dtype=np.uint8)
    yield "values of no picture", still.astype(np.int64) - 1
    yield "a frame that is none", [still[0], None]
    yield "a frame that is missing", [str(folder / "missing.png")]
    yield "a frame that is broken", [folder / "text.mp4"]
    yield "a folder", str(folder / "frames")
    yield "a file that is missing", str(folder / "missing.mp4")
    yield "a name with a null", "a\0.mp4"
    for name in ("text", "empty", "model"):
        yield f"{name}.mp4", str(folder / f"{name}.mp4")


def test_broken_videos(tmp_path):
    """A video taken for another one, an error that names no argument, or a million pictures for one that was sent."""
    processor, wrong = make_processor(TEXT_TEMPLATES["guard"]), {}
    for name, video in videos(tmp_path):
        try:
            processor(videos=[[video]], text=["a"])
        except ImportError as error:  # a file, without a decoder
            if not (name.endswith(".mp4") and "pip install av" in str(error)):
                wrong[name] = f"ImportError: {error}"
        except Exception as error:
            if not is_ours(error):
                wrong[name] = f"{type(error).__name__}: {str(error)[:200]}"
        else:
            wrong[name] = "taken"
    assert not wrong, "\n".join(f"{name}: {why}" for name, why in wrong.items())


def test_the_limit_of_frames(monkeypatch):
    """A limit that cannot be changed, or that counts frames which are not taken."""
    video = np.zeros((9, 4, 4, 3), dtype=np.uint8)
    monkeypatch.setattr(LIMITS, "max_frames", 5)
    assert len(read_frames(video, num_frames=5)) == 5
    with pytest.raises(ValueError, match="at most 5 frames, got 9. Choose some with `num_frames`"):
        read_frames(video)
    monkeypatch.setattr(LIMITS, "max_frames", 9)
    assert len(read_frames(list(video))) == 9
