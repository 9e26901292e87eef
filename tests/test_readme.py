"""The README's code runs, from top to bottom."""

import os
import re
from pathlib import Path

from hf_xattn import demo


README = Path(__file__).parents[1] / "README.md"


def test_code_blocks(tmp_path, monkeypatch):
    """Lines that a reader copies and that do not work."""
    monkeypatch.chdir(tmp_path)
    demo.run("hf-xattn-demo", quick=True)
    namespace: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    assert os.path.exists("seeing/model.safetensors")
