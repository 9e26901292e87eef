"""Every example runs, as it stands."""

import subprocess
import sys
from pathlib import Path

import pytest


EXAMPLES = Path(__file__).parents[1] / "examples"
EXPECTED = {
    "retrofit_text_model": ["bit-identical to the base: True", "parameters train"],
    "load_and_generate": ["one image: ", "two images: ", "no image: "],
    "import_checkpoint": ["largest difference of a logit: ", "written back, bit for bit: True"],
    "benchmarks/capacity": ["| Llama-3.2-1B"],
    "benchmarks/bench --quick": ["decode attention, 4 beam(s)", "growth of a decode step"],
    "ask_server": ["answer: ", "streamed: "],
    "encode_once_ask_many": ["K/V projections: 2 for 2 blocks and 4 questions", "the same answers from the file: True"],
}


@pytest.mark.parametrize("example", EXPECTED)
def test_example(example):
    """An example that its reader cannot run."""
    name, *options = example.split()
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *options]
    output = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert output.returncode == 0, output.stderr
    for line in EXPECTED[example]:
        assert line in output.stdout
