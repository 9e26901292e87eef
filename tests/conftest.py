"""What every test finds: the modules of `tests/helpers` and of the examples, and fixtures."""

import sys
from pathlib import Path

import pytest
import torch


HELPERS = Path(__file__).parent / "helpers"
EXAMPLES = Path(__file__).parents[1] / "examples"
FOLDERS = [HELPERS, EXAMPLES, EXAMPLES / "benchmarks", EXAMPLES / "digits", EXAMPLES / "garments"]
sys.path[:0] = [str(folder) for folder in FOLDERS]

import tiny_models  # noqa: E402, F401  # no network, one thread: set before a test imports transformers


@pytest.fixture(autouse=True)
def _no_grad_seed():
    torch.manual_seed(0)
