"""The note on security says what the code does."""

import io
import pickle
import re
from base64 import b64encode

import pytest
import torch
from PIL import Image

from helpers.checkout import ROOT
from hf_xattn.commands.main import _parser
from hf_xattn.importers.blocks import read_state_dict
from hf_xattn.processing.image_limits import LIMITS
from hf_xattn.processing.image_reading import read_image
from hf_xattn.serving.request_limits import ServerLimits
from hf_xattn.serving.web_visitors import MAX_BYTES, MAX_PIXELS


GUIDE = (ROOT / "examples" / "chat_and_serving" / "README.md").read_text()
NOTE = (ROOT / ".github" / "SECURITY.md").read_text()


def test_limits_of_pictures():
    """A limit that the note does not name, or a picture that unpacks to more than the note says."""
    assert f"up to {MAX_BYTES // 2**20} MiB and {MAX_PIXELS // 10**6} megapixels" in NOTE
    (most,) = re.findall(r"more than (\d+) megapixels is refused", NOTE)
    assert int(most) == LIMITS.max_pixels // 10**6
    file = io.BytesIO()
    Image.new("1", (14_000, 10_000)).save(file, "PNG")
    with pytest.raises(ValueError, match=f"14000 x 10000 pixels: expected at most {LIMITS.max_pixels}"):
        read_image(f"data:image/png;base64,{b64encode(file.getvalue()).decode()}")


def test_limits_of_the_server():
    """Another limit in the section on the server than in the server, or a download that nobody has allowed."""
    limits = ServerLimits()
    assert f"at most {limits.max_image_bytes // 2**20} MiB (`--max-image-mib`)" in GUIDE
    assert f"of {limits.max_pixels // 10**6} megapixels in all" in GUIDE
    assert f"{limits.max_seconds:g} seconds for all downloads" in GUIDE
    arguments = _parser().parse_args(["serve", "model"])
    assert not (limits.fetch or limits.private_addresses or arguments.fetch_images or arguments.private_addresses)


@pytest.mark.parametrize("command", ["serve", "web"])
def test_servers_listen_on_this_machine_alone(command):
    """A server that all of the network finds."""
    assert "listen on `localhost` unless `--host` says otherwise" in NOTE
    assert _parser().parse_args([command, "model"]).host == "localhost"


class Runs:
    """Says so if it is unpickled."""

    def __reduce__(self):
        return (pytest.fail, ("code of the file was run",))


def test_the_one_pickled_file_runs_nothing(tmp_path):
    """A state dict that runs code."""
    assert "`torch.load(weights_only=True)`" in NOTE
    torch.save({"lang_encoder.weight": Runs()}, tmp_path / "blocks.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Runs(), protocol=2))
    for name in ("blocks.pt", "plain.pt"):
        with pytest.raises(pickle.UnpicklingError):
            read_state_dict(tmp_path / name)
