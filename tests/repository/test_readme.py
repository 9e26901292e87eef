"""The README's commands and its code run as they stand, and its figures have a source."""

import io
import json
import re
import shlex
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import side_by_side
from checkout import ROOT
from known_checkpoints import QWEN, TEXTS, make_siglip, make_text
from PIL import Image
from tiny_models import needs_part

from hf_xattn.commands.main import _parser, main
from hf_xattn.utils.architectures import architecture, causal_model_types, markdown_table
from hf_xattn.utils.transformers_api import NEWEST, is_before


README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
CLIENT = "OpenAI("  # in the block that asks a running server


def after(mark: str, language: str) -> str:
    """The code block behind a mark."""
    found = re.search(rf"<!-- {re.escape(mark)} -->\n```{language}\n(.*?)```", README, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder with what a reader has: the pictures, and the checkpoints under the names that the README gives them."""
    monkeypatch.chdir(tmp_path)
    make_siglip(tmp_path)
    (tmp_path / "pictures").mkdir()
    for name, colour in (("pictures/a.png", "red"), ("pictures/b.png", "blue"), ("photo.png", "green")):
        Image.new("RGB", (60, 40), colour).save(name)
    Path("pictures/metadata.jsonl").write_text(after("metadata.jsonl", "json"))
    return tmp_path


@pytest.mark.parametrize("name", TEXTS)
def test_four_steps_in_the_shell(desk, monkeypatch, capsys, name):
    """Commands that a reader copies and that do not work, with one of the text models that the README names."""
    make_text(desk, name)
    assert name in README
    lines = [shlex.split(line)[1:] for line in after("four steps", "bash").splitlines() if line.startswith("hf-xattn")]
    assert [line[0] for line in lines] == ["retrofit", "train", "chat", "serve"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("what is it ?\n"))
    for line in lines[:3]:
        assert main([name if part == QWEN else part for part in line]) in (0, None), capsys.readouterr().err
    if name != QWEN:
        return
    pytest.importorskip("openai")
    from hf_xattn.serving import serving

    servers, ready = [], threading.Event()

    class Server(serving.Server):
        """Says when it runs, so that this test can ask and stop it."""

        async def startup(self, sockets=None):
            servers.append((self, sockets[0].getsockname()[1]))
            await super().startup(sockets)
            ready.set()

    monkeypatch.setattr(serving, "Server", Server)
    thread = threading.Thread(target=main, args=([*lines[3], "--port", "0"],))
    thread.start()
    try:
        assert ready.wait(60)
        (client,) = [block for block in BLOCKS if CLIENT in block]
        exec(compile(client.replace(":8000", f":{servers[0][1]}"), "README.md", "exec"), {})
    finally:
        servers[0][0].should_exit = True
        thread.join(30)
    assert not thread.is_alive()


@needs_part("AutoImageProcessor without torchvision")
def test_code_blocks(desk):
    """Lines that a reader copies and that do not work."""
    make_text(desk, QWEN)
    assert len(BLOCKS) == README.count("```python") > 3
    namespace: dict = {}
    for block in BLOCKS:
        if CLIENT not in block:
            exec(compile(block, "README.md", "exec"), namespace)


def test_commands_have_these_options():
    """A command of the README, or one of its options, that does not exist."""
    (commands,) = [action.choices for action in _parser()._actions if isinstance(action.choices, dict)]
    found = re.findall(r"^hf-xattn (.*)$|`hf-xattn ([^`]+)`", README, re.MULTILINE)
    lines = [(line or inline).partition("#")[0].split() for line, inline in found]
    assert len(lines) > 12
    for command, *words in lines:
        unknown = {word for word in words if word.startswith("--")} - set(commands[command]._option_string_actions)
        assert not unknown, (command, unknown)


def test_accelerate_reads_what_is_said():
    """An option or a key that accelerate does not know, and passes over."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    section = README.partition("## Training at scale")[2].partition("\n## ")[0]
    options = set(
        re.findall(r"--\w+(?= )", "\n".join(re.findall(r"`([^`]*(?:accelerate launch|machine_rank)[^`]*)`", section)))
    )
    assert len(options) > 5 and options <= set(parser._option_string_actions)
    config: Any = load_config_from_file(str(ROOT / "examples" / "parallel" / "fsdp2.yaml"))
    assert config.fsdp_config["fsdp_version"] == 2
    assert config.fsdp_config.keys() <= {action.dest for action in parser._actions}


@pytest.mark.skipif(is_before(NEWEST), reason="the table is that of the newest transformers")
def test_table_of_decoders():
    """A table of decoders that says something else than the tests found."""
    table = re.search(r"<!-- architectures -->\n(.*?)\n<!-- /architectures -->", README, re.DOTALL)
    assert table is not None and table[1] == markdown_table()
    served = sum(architecture(name).refused is None for name in causal_model_types())
    assert f"| Decoders | {served} of transformers'" in README
    assert f"any of [{served} decoder architectures]" in README


def test_figures_have_a_source():
    """A figure that was measured again in the model card or the benchmarks, and is the old one in the README."""
    card = (ROOT / "model_cards" / "hf-xattn-demo.md").read_text()
    rows = [line for line in README.splitlines() if line.startswith(("| digits right", "| text-only logits"))]
    assert len(rows) == 3 and all(row in card for row in rows)
    over_smollm2 = (ROOT / "model_cards" / "hf-xattn-demo-smollm2.md").read_text()
    said = re.findall(r'"(how many|is there|where)[^"]*" (\d+ %) and (\d+ %)', README)
    assert len(said) == 3 and all(f"| {kind} | {known} | {new} |" in over_smollm2 for kind, known, new in said)


def test_table_of_speed():
    """A table that no run has made, and a sentence that says more than the table."""
    result = json.loads((ROOT / "examples" / "benchmarks" / "side_by_side.json").read_text())
    assert README.partition(side_by_side.BEGIN)[2].partition(side_by_side.END)[0] == side_by_side.markdown(result)
    assert len(result["lines"]) == len(side_by_side.ROWS) + 3 * 4  # whole: 1, 4 and 16 images
    lines = {line.label: line for line in (side_by_side.Line(**each) for each in result["lines"])}
    lost = [line for line in lines.values() if line.ratio < 0.995]
    assert f"**{len(lost)} of {len(lines)}** lines" in README
    first = lines["first token from features, 4 images of 576 tokens, hidden 1024, 16 layers and 4 blocks"].ratio
    pixels = lines["first token from pixels (CLIP ViT-L/14-336), 4 images"].ratio
    assert f"{first:.0f} times sooner ({pixels:.1f} times with" in README
    assert f"cache is {lines['bytes of the cache, 4 images'].ratio:.1f} times smaller" in README
    assert f"up to {1 / lines['decode step behind 1 image'].ratio:.2f} times as long with one image" in README


def test_picture():
    """A picture that is missing or too large for a repository."""
    pictures = re.findall(r"!\[.+?\]\((.+?)\)", README)
    assert pictures == ["model_cards/smollm2-questions.png"]
    assert (ROOT / pictures[0]).stat().st_size < 60_000


def sections_of(text):
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links():
    """A link to a file or a section that is not there."""
    for link in re.findall(r"\]\(([^)]+)\)", README):
        file, _, section = link.partition("#")
        assert (ROOT / file).exists(), link
        assert not section or section in sections_of((ROOT / file).read_text() if file else README), link
