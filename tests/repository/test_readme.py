"""The commands and the code of the README and of the guides run as they stand, and their figures have a source."""

import io
import json
import re
import shlex
import shutil
import sys
import threading
from typing import Any

import against_llava
import budget
import designs_table
import photos_table
import pytest
import side_by_side
from packaging.version import Version

from helpers.checkout import ROOT
from helpers.inputs.notebooks import page_of
from helpers.inputs.reader_files import after, fill
from helpers.models.known_checkpoints import QWEN, TEXTS, make_text
from helpers.models.tiny_models import needs_part
from hf_xattn.commands.main import _parser, main
from hf_xattn.parts.towers import markdown_table as table_of_towers
from hf_xattn.parts.towers import vision_model_types, why_no_tower
from hf_xattn.utils.architectures import ARCHITECTURES, architecture, causal_model_types, markdown_table
from hf_xattn.utils.towers import UNTESTED
from hf_xattn.utils.transformers_api import NEWEST, OLDEST, PACKAGES, PRIVATE, REPAIRED, is_before
from hf_xattn.vllm_plugin import plugin


README = (ROOT / "README.md").read_text()
GUIDES = {path.parent.name: path.read_text() for path in sorted((ROOT / "examples").glob("*/README.md"))}
PAGES = {"README.md": README, **{f"examples/{name}/README.md": text for name, text in GUIDES.items()}}
PAGES["examples/quickstart.ipynb"] = page_of(ROOT / "examples" / "quickstart.ipynb")
RUN = [name for name, text in PAGES.items() if "```python" in text]
CLIENT = "OpenAI("  # in the block that asks a running server


def commands_of(text: str) -> list[list[str]]:
    lines = [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("hf-xattn")]
    assert lines
    return lines


@pytest.fixture
def desk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a reader who has followed the README: with `fresh` and `seeing`."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        fill(folder)
        make_text(folder, QWEN)
        for line in commands_of(after("four steps", "bash", README))[:2]:
            assert main(line) in (0, None)
    return folder


@pytest.mark.parametrize("name", [pytest.param(each, marks=() if each == QWEN else pytest.mark.slow) for each in TEXTS])
def test_four_steps_in_the_shell(desk, monkeypatch, capsys, name):
    """Commands that a reader copies and that do not work, with one of the text models that the README names."""
    make_text(desk, name)
    assert name in README
    lines = commands_of(after("four steps", "bash", README))
    assert [line[0] for line in lines] == ["retrofit", "train", "chat", "serve"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("what is it ?\n"))
    for line in lines[:3]:
        assert main([name if part == QWEN else part for part in line]) in (0, None), capsys.readouterr().err
    if name == QWEN:
        pytest.importorskip("openai")
        (client,) = [block for text in GUIDES.values() for block in python_of(text) if CLIENT in block]
        asked_while_served(lines[3], client, monkeypatch)


def asked_while_served(line: list[str], client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the client of the guide against the server of the README."""
    from hf_xattn.serving import serving

    servers, ready = [], threading.Event()

    class Server(serving.Server):
        """Says when it runs, so that this test can ask and stop it."""

        async def startup(self, sockets=None):
            servers.append((self, sockets[0].getsockname()[1]))
            await super().startup(sockets)
            ready.set()

    monkeypatch.setattr(serving, "Server", Server)
    thread = threading.Thread(target=main, args=([*line, "--port", "0"],))
    thread.start()
    try:
        assert ready.wait(60)
        exec(compile(client.replace(":8000", f":{servers[0][1]}"), "guide", "exec"), {})
    finally:
        servers[0][0].should_exit = True
        thread.join(30)
    assert not thread.is_alive()


def python_of(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@needs_part("AutoImageProcessor without torchvision")
@pytest.mark.parametrize("name", RUN)
def test_the_code_of_a_page_runs(name, trained, tmp_path, monkeypatch):
    """Lines that a reader copies and that do not work, one after another in a folder with `fresh` and `seeing`."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    blocks = python_of(PAGES[name])
    assert len(blocks) == PAGES[name].count("```python")
    namespace: dict = {}
    for block in blocks:
        if is_before("5.24.0"):  # as the guide to caches says
            block = block.replace("turn.cache", "turn.past_key_values")
        if CLIENT not in block:
            exec(compile(block, name, "exec"), namespace)


@pytest.mark.parametrize("name", PAGES)
def test_commands_have_these_options(name):
    """A command, or one of its options, that does not exist."""
    (commands,) = [action.choices for action in _parser()._actions if isinstance(action.choices, dict)]
    found = re.findall(r"^hf-xattn (.*)$|`hf-xattn ([^`]+)`", PAGES[name], re.MULTILINE)
    for line, inline in found:
        command, *words = (line or inline).partition("#")[0].split()
        if command.startswith("--"):
            assert command in _parser()._option_string_actions
            continue
        unknown = {word for word in words if word.startswith("--")} - set(commands[command]._option_string_actions)
        assert not unknown, (command, unknown)
    assert found or name.endswith(("space/README.md", "caches/README.md", "benchmarks/README.md")), name


def test_accelerate_reads_what_is_said():
    """An option or a key that accelerate does not know, and passes over."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    said = re.findall(r"accelerate launch[^`\n]*|`[^`]*machine_rank[^`]*`", GUIDES["parallel"] + GUIDES["training"])
    options = set(re.findall(r"--\w+(?= )", "\n".join(each.partition("hf_xattn")[0] for each in said)))
    assert len(options) > 5 and options <= set(parser._option_string_actions)
    config: Any = load_config_from_file(str(ROOT / "examples" / "parallel" / "fsdp2.yaml"))
    assert config.fsdp_config["fsdp_version"] == 2
    assert config.fsdp_config.keys() <= {action.dest for action in parser._actions}


@pytest.mark.skipif(is_before(NEWEST), reason="the table is that of the newest transformers")
def test_table_of_decoders():
    """A table of decoders that says something else than the tests found."""
    table = re.search(r"<!-- architectures -->\n(.*?)\n<!-- /architectures -->", GUIDES["decoders"], re.DOTALL)
    assert table is not None and table[1] == markdown_table()
    served = sum(architecture(name).refused is None for name in causal_model_types())
    assert f"| Decoders | {served} of transformers'" in README
    assert f"any of [{served} decoder architectures]" in README


@pytest.mark.skipif(is_before(NEWEST), reason="the table is that of the newest transformers")
def test_table_of_towers():
    """A table of vision towers that says something else than the tests found."""
    table = re.search(r"<!-- towers -->\n(.*?)\n<!-- /towers -->", GUIDES["blocks"], re.DOTALL)
    assert table is not None and table[1] == table_of_towers()
    works = sum(why_no_tower(name) is None and name not in UNTESTED for name in vision_model_types())
    assert f"| Vision towers | {works} of transformers' vision models" in README


def rows_of(mark: str) -> dict[str, str]:
    """The rows of a table of the README, by their first cell."""
    table = re.search(rf"<!-- {mark} -->\n.*?\|---\|\n(.*?)<!-- /{mark} -->", README, re.DOTALL)
    assert table is not None
    cells = [line.strip("| ").split(" | ", 1) for line in table[1].splitlines()]
    return dict(cells)


def test_versions_of_the_readme_are_the_tested_ones():
    """A version that nobody has tested, or one that the metadata does not allow."""
    rows, project = rows_of("versions"), (ROOT / "pyproject.toml").read_text()
    assert list(rows) == list(PACKAGES)
    assert rows["transformers"].startswith(f"{OLDEST} to {NEWEST} | ")
    assert rows["vllm"].startswith(f"{plugin.NEWEST} | ")
    for name, row in rows.items():
        oldest = re.search(rf'"{name}>=([\d.]+)', project)
        assert oldest is not None and Version(oldest[1]) <= Version(re.findall(r"[\d.]+", row)[0]), name
        assert not re.search(rf'"{name}>=[\d.]+,', project) or name == "torch", f"{name} has an upper limit"
    jobs = (ROOT / ".github" / "workflows" / "versions.yml").read_text()
    core = rows["transformers"].rpartition("the core tests with ")[2]
    assert re.findall(r"transformers==([\d.]+)\.\*", jobs)[::-1] == re.findall(r"[\d.]+\d", core)


# What a table of the README calls the entries of `REPAIRED`, and what of `PRIVATE` is asked for by version.
OLDER = {
    "_resolve_parallel_plans": "tensor parallelism",
    "_mark_chat_inputs": "`sanitize_control_tokens`",
    "prefill_chunk_size": "text after cached text with `prefill_chunk_size`",
    "ExportedModel": "transformers' exporters",
    "cache of FP8": "caches in FP8",
    "parts of ranks": "checkpoints that several ranks wrote together",
    "special tokens of a GGUF file": "the tokenizer of a GGUF file",
    "modules_to_save": "adapters with `modules_to_save`",
    "activate_past_recording": "text after a full sliding window that records its past",
    "AutoImageProcessor without torchvision": "`AutoImageProcessor` without torchvision",
}


def test_what_an_older_transformers_lacks():
    """An error that comes as a surprise, because the README does not tell of it; or a wrong version."""
    rows = rows_of("older")
    since = {name: version for name, (_, version) in PRIVATE.items() if version != OLDEST} | REPAIRED
    assert since.pop("cache") == "5.24.0"  # a name: both work
    assert OLDER.keys() == since.keys()
    for name, words in OLDER.items():
        assert words in rows[since[name].removesuffix(".0")], name
    for name, entry in ARCHITECTURES.items():
        if entry.since != OLDEST:
            assert f"`{name}`" in rows[entry.since.removesuffix(".0")], name
        assert entry.static_since == OLDEST or f"a static cache of {name.title()}" in rows["5.21"]


def test_figures_have_a_source():
    """A figure that was measured again in a model card, and is the old one in the README."""
    card = (ROOT / "model_cards" / "hf-xattn-demo.md").read_text()
    rows = [line for line in README.splitlines() if line.startswith(("| digits right", "| text-only logits"))]
    assert len(rows) == 3 and all(row in card for row in rows)
    scenes = (ROOT / "model_cards" / "hf-xattn-scenes-smollm2.md").read_text()
    by_seed = re.findall(r"(\d+\.\d) % \(", re.findall(r"\| all of 1,800 \| .*", scenes)[0])
    shares = [f"{float(each):.0f}" for each in by_seed]
    assert f"(model_cards/hf-xattn-scenes-smollm2.md) reached {shares.pop()} % of a sealed test" in README  # the mean
    assert f"{', '.join(shares[:2])} and {shares[2]} % get a right answer" in GUIDES["scenes"]
    (count, caption) = re.findall(r'reached (\d+ %) for "how many\?", (\d+ %) for whole captions', README)[0]
    table = GUIDES["garments"]
    for kind, share in (("how many", count), ("caption", caption)):
        assert re.search(rf"\| {kind} \| \d+ / {share} \|", table), kind


def test_table_of_photographs():
    """A table that no run has made, or figures of the README that are not in it."""
    runs = json.loads((ROOT / "examples" / "photos" / "results.json").read_text())
    assert photos_table.table(runs) in GUIDES["photos"]
    shares = {
        kind: f"{ways['own'][0] / ways['own'][1]:.0%}".replace("%", " %")
        for kind, ways in runs["an hour, number first"].items()
    }
    rows = {
        "what is on this side?": "trained photographs: at side",
        "on which side is it?": "trained photographs: side",
        "how many things are there?": "trained photographs: how many",
        "what is it?, about photographs that the training used": "trained photographs: name",
        "what is it?, about other photographs of the same things": "another photograph: name",
    }
    for question, kind in rows.items():
        assert f"| {question} | {shares[kind]} |" in README
    assert f"so are {shares['all']} of all 426" in README


def test_table_of_budgets():
    """Numbers of parameters, and bytes, of other sizes of blocks than the defaults have."""
    for name in budget.SHAPES:
        assert budget.row(name) in GUIDES["training"], name


def test_table_of_designs():
    """A comparison with peers that no run has made."""
    runs = json.loads((ROOT / "examples" / "photos" / "designs.json").read_text())
    assert designs_table.table(runs) in GUIDES["photos"]


def test_table_of_speed():
    """A table that no run has made, and a sentence that says more than the table."""
    result = json.loads((ROOT / "examples" / "benchmarks" / "side_by_side.json").read_text())
    whole = side_by_side.markdown(result)
    assert GUIDES["benchmarks"].partition(side_by_side.BEGIN)[2].partition(side_by_side.END)[0] == whole
    assert len(result["lines"]) == len(side_by_side.ROWS) + 3 * 4  # whole: 1, 4 and 16 images
    shown = README.partition(side_by_side.BEGIN)[2].partition(side_by_side.END)[0].splitlines()
    assert len(shown) == 10 and all(line in whole.splitlines() for line in shown)
    ratio = {line["label"]: side_by_side.Line(**line).ratio for line in result["lines"]}
    pixels = [ratio[f"first token from pixels (CLIP ViT-L/14-336), {n} image{'s' * (n > 1)}"] for n in (1, 4, 16)]
    assert f"comes {min(pixels):.2f} to {max(pixels):.2f} times sooner" in README
    beside = [1 / value for label, value in ratio.items() if label.endswith("beside the text model without blocks")]
    assert f"`generate` takes {min(beside):.2f} to {max(beside):.2f} times as long" in README


def test_figures_beside_image_tokens():
    """A table that no run has made, and a sentence that is kinder than the table."""
    made = [ROOT / "examples" / "benchmarks" / f"against_llava_{hidden}.json" for hidden in (1024, 2048)]
    figures = [figure for file in made for figure in json.loads(file.read_text())["figures"].items()]
    for name, figure in figures:
        assert against_llava.markdown_line(name, figure) in GUIDES["benchmarks"].splitlines(), name

    def said(end: str, *peers: str, inverse: bool = False) -> str:
        found = [figure[peer] / figure["ours"] for name, figure in figures if name.endswith(end) for peer in peers]
        found = [1 / ratio for ratio in found] if inverse else found
        return f"{min(found):.2f} to {max(found):.2f}"

    assert f"comes {said('first token', 'InternVL')} times sooner" in README
    assert f"{said('with the tower', 'InternVL')} times sooner from pixels" in README
    assert f"takes {said('1 image(s): decode step, static caches', *against_llava.TOKENS, inverse=True)}" in README


def test_figures_of_the_engine():
    """A table whose figures are not those of its run, or a ratio that is better than they are."""
    found, guide = json.loads((ROOT / "examples/benchmarks/engine.json").read_text())["results"], GUIDES["vllm"]
    for name, row in found.items():
        cells = [f"{row['cache bytes'] / 1e6:.2f} MB"]
        for clients in ("1", "8", "32"):
            first = row[clients]["first token, median"]
            cells.append(f"{row[clients]['requests a second']:.2f} /s, {first:.2f} s")
        assert f"{name} | " + " | ".join(cells) in guide.replace("**", "")
    ours, *peers = [row["32"]["requests a second"] for row in found.values()]
    assert [f"{ours / peer:.2f}" for peer in peers] == ["5.67", "1.87", "1.04"]


def test_the_picture_of_the_readme_is_small():
    """A picture that is missing or too large for a repository."""
    pictures = re.findall(r"!\[.+?\]\((.+?)\)", README)
    assert pictures == ["examples/photos/questions.jpg"]
    assert (ROOT / pictures[0]).stat().st_size < 300_000


def sections_of(text):
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files_and_sections(name):
    """A link to a file or a section that is not there, or a script that its guide does not name."""
    here = (ROOT / name).parent
    for link in re.findall(r"\]\(([^)]+)\)", PAGES[name]):
        file, _, section = link.partition("#")
        if not file.startswith("http"):
            assert (here / file).exists(), link
            assert not section or section in sections_of((here / file).read_text() if file else PAGES[name]), link
    if name.startswith("examples/") and name.endswith(".md"):
        assert [script.name for script in here.glob("*.py") if script.stem not in PAGES[name]] == []
