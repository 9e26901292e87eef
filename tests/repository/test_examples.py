"""Every example runs, as it stands. Those of `TRAINED` are in a file of their own, for the other process."""

import pytest

from helpers.checkout import EXAMPLES
from helpers.processes.example_runs import TRAINED, examples, run_example
from helpers.processes.warm_processes import run


MISSING = [
    ("checkpoints/lora", "peft", 'pip install "peft>=0.20"'),
    ("checkpoints/quantized_base", "bitsandbytes", "pip install bitsandbytes"),
    ("training/fine_tune_with_trl", "trl", 'pip install "trl>=1.16"'),
    ("evaluation/with_lm_eval", "lm_eval", 'pip install ".[eval]"'),
    ("vllm/serve_and_ask", "vllm", 'pip install ".[vllm]"'),
]
WITHOUT = """
import os, runpy, sys
packages, paths = (words.split(",") for words in sys.argv[1:])
sys.modules.update(dict.fromkeys(packages))
for path in paths:
    sys.argv = [path]
    sys.path.insert(0, os.path.dirname(path))
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        print(str(end.code).replace("\\n", " "))
    else:
        print("it ran")
"""


@pytest.mark.parametrize("example", examples(*TRAINED, others=True))
def test_an_example_runs_as_it_stands(example, tmp_path):
    """An example that its reader cannot run."""
    run_example(example, tmp_path)


def test_what_an_example_needs():
    """A traceback where a package is not installed; a line for pip that the guide does not have."""
    paths = [str(EXAMPLES / f"{example}.py") for example, _, _ in MISSING]
    packages = ",".join(package for _, package, _ in MISSING)
    output = run(["-c", WITHOUT, packages, ",".join(paths)])
    assert output.returncode == 0, output.stderr
    for (example, package, line), said in zip(MISSING, output.stdout.splitlines(), strict=True):
        assert line in said
        if package != "trl":  # an extra of this package
            assert line in (EXAMPLES / example).with_name("README.md").read_text()
