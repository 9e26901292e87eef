"""Every example that trains runs, as it stands."""

import pytest

from helpers.processes.example_runs import TRAINED, examples, run_example


@pytest.mark.parametrize("example", examples(*TRAINED))
def test_an_example_that_trains_runs_as_it_stands(example, tmp_path):
    """An example that its reader cannot run."""
    run_example(example, tmp_path)
