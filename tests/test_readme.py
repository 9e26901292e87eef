"""The README's code runs, from top to bottom."""

import os
import re
from pathlib import Path

from hf_xattn import demo
from hf_xattn.architectures import architecture, causal_model_types, markdown_table


README = Path(__file__).parents[1] / "README.md"


def test_code_blocks(tmp_path, monkeypatch):
    """Lines that a reader copies and that do not work."""
    monkeypatch.chdir(tmp_path)
    demo.run("hf-xattn-demo", quick=True)
    namespace: dict = {}
    text = README.read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == text.count("```python") > 3
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    assert os.path.exists("seeing/model.safetensors")


def test_table_of_decoders():
    """A table of decoders that says something else than the tests found."""
    text = README.read_text()
    table = re.search(r"<!-- architectures -->\n(.*?)\n<!-- /architectures -->", text, re.DOTALL)
    assert table is not None and table[1] == markdown_table()
    served = sum(architecture(name).refused is None for name in causal_model_types())
    assert f"| Decoders | {served} of transformers'" in text
