"""The commands of the planned run, scaled down: two processes, tiny models, 400 rows in LLaVA's form."""

import json
import re
import shlex
import subprocess
import sys

import pytest

from helpers.checkout import EXAMPLES, ROOT
from helpers.inputs.data_sources import llava, questions, write_pictures
from helpers.models.known_checkpoints import make_siglip, make_text
from hf_xattn.commands.main import main


GUIDE = (EXAMPLES / "data" / "README.md").read_text()
SMALL = {"google/siglip-so400m-patch14-384": "google/siglip-base-patch16-224", "8": "2", "500": "10"}


@pytest.mark.slow
def test_the_planned_run(tmp_path, monkeypatch):
    """A plan whose commands nobody has ever run."""
    monkeypatch.chdir(tmp_path)
    block = re.search(r"<!-- real run -->\n```bash\n(.*?)```", GUIDE, re.DOTALL)[1]
    retrofit, train, evaluate = ([SMALL.get(word, word) for word in shlex.split(line)] for line in block.splitlines())
    make_siglip(tmp_path)
    make_text(tmp_path, "meta-llama/Llama-3.2-1B-Instruct")
    write_pictures(tmp_path / "llava")
    rows = [llava(*row) for row in questions(400)]
    rows[7]["image"] = "gone.png"
    (tmp_path / "llava" / "llava_v1_5_mix665k.json").write_text(json.dumps(rows))
    (tmp_path / "llava" / "held_out.jsonl").write_text("\n".join(map(json.dumps, rows[-12:])))

    assert main(retrofit[1:]) in (0, None)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *train[1:], "--stream", "--device", "cpu"]
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (
        "1 bad row(s) were left out" in done.stdout and "gone.png" in (tmp_path / "seeing/bad_rows.jsonl").read_text()
    )
    assert main(evaluate[1:]) in (0, None)
    assert "model-index" in (tmp_path / "seeing" / "README.md").read_text()
