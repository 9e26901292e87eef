"""Videos of strangers and of bad disks: which frames are read, and which files are refused."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from helpers.inputs.chat_templates import TEXT_TEMPLATES, make_processor
from helpers.inputs.damaged_checkpoints import is_ours
from hf_xattn.processing.image_limits import LIMITS
from hf_xattn.processing.image_reading import frames_to_read, read_frames


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
        (header(9), {"num_frames": 10}, "`num_frames` of at most 9, the number of its frames, got 10"),
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


def test_broken_videos_are_refused_by_name(tmp_path):
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
    with pytest.raises(ValueError, match="at most 5 frames, got 9. Choose fewer with `num_frames`"):
        read_frames(video)
    monkeypatch.setattr(LIMITS, "max_frames", 9)
    assert len(read_frames(list(video))) == 9
