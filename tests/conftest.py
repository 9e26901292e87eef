"""What every test finds: the modules of `tests/helpers` and of the examples, and fixtures.

A fixture imports what it needs where it runs: the core tests also run where the examples are not.
"""

import sys
from pathlib import Path

import pytest
import torch


TESTS = Path(__file__).parent
EXAMPLES = TESTS.parent / "examples"
# Examples that tests run, and whose tables and lists they compare with the guides. Helpers are in `tests/helpers`. Two
# folders have a `train_tower`: a test imports that of the garments.
NAMES = ("benchmarks", "digits", "garments", "photos", "scenes", "training")
sys.path[:0] = [str(folder) for folder in (TESTS, EXAMPLES, *(EXAMPLES / name for name in NAMES))]
pytest.register_assert_rewrite("helpers")  # a failed assert shows its values

# No network, one thread: this is set before a test imports transformers.
from helpers.models import tiny_models  # noqa: E402, F401


@pytest.fixture(autouse=True)
def _no_grad_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _warnings_come_again():
    """transformers' `warning_once` is silent about what an earlier test was warned of."""
    from transformers.utils.logging import warning_once

    warning_once.cache_clear()


@pytest.fixture
def vision(tmp_path):
    """A saved vision tower."""
    from helpers.models.saved_models import make_vision

    return make_vision(tmp_path / "vision")


@pytest.fixture
def registered_decoder():
    """The decoder of `custom_decoder.py` in transformers' Auto classes, as a user's session puts it there."""
    from helpers.models.checkpoints_with_code import registered

    with registered():
        yield


@pytest.fixture
def checkpoints(tmp_path, monkeypatch):
    """A folder with a text-only and a vision checkpoint that bring their code."""
    from helpers.models.checkpoints_with_code import save_text_and_vision

    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    save_text_and_vision(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
    """A saved model with a processor and a chat template."""
    from helpers.models.chat_models import make_chat_model

    return make_chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the checkpoints `text` and `vision`, the picture `picture.png`, and the retrofitted `model`."""
    from helpers.processes.command_runs import save_for_commands

    return save_for_commands(tmp_path_factory.mktemp("commands"))


@pytest.fixture(scope="module")
def served(chat_folder):
    """A running server of the model in `chat_folder`."""
    from helpers.processes.model_server import Served

    served = Served(chat_folder, "seeing")
    yield served
    served.stop()
    assert not served.thread.is_alive()
