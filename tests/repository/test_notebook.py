"""The notebook runs as it stands, and its stored outputs are those of its cells."""

import json
import re

from helpers.checkout import EXAMPLES
from helpers.inputs.notebooks import code_cells, printed
from helpers.models.tiny_models import needs_part
from helpers.processes.warm_processes import run


NOTEBOOK = EXAMPLES / "quickstart.ipynb"


def lines_of(text):
    """The printed lines without the log of `Trainer`. Figures differ from one machine to another."""
    lines = [line for line in text.splitlines() if line and not re.match(r"\{'(loss|train_runtime)'", line)]
    return [re.sub(r"\d[\d,.]*", "N", line) for line in lines]


@needs_part("AutoImageProcessor without torchvision")
def test_the_notebook_runs_and_prints_its_stored_outputs(tmp_path):
    """A cell that fails, a model that does not learn to see, or an output that no run of these cells has made."""
    output = run(["-c", "\n\n".join(code_cells(NOTEBOOK))], cwd=tmp_path)
    assert output.returncode == 0, output.stderr
    assert lines_of(output.stdout) == lines_of(printed(NOTEBOOK))
    assert (tmp_path / "quickstart" / "map.png").stat().st_size > 1000


def test_the_stored_outputs_are_whole_and_small():
    """A notebook with an error, with a cell that was not run, with warnings of somebody's machine, or of megabytes."""
    assert NOTEBOOK.stat().st_size < 150_000
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [each for cell in cells for each in cell["outputs"]]
    assert all(each["output_type"] != "error" and each.get("name") != "stderr" for each in outputs)
    assert sum("image/png" in each.get("data", {}) for each in outputs) == 2
