"""Saved folders in sessions that do not import this package, and where it is not installed."""

import ast
import builtins
import json
import logging
import os
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, dynamic_module_utils
from transformers.dynamic_module_utils import get_imports

import hf_xattn
from helpers.models.tiny_models import make_model, make_text, pixels, randomize, token_ids
from helpers.processes import warm_processes
from hf_xattn import CrossAttentionConfig, GatedCrossAttentionBlock, XAttnForConditionalGeneration, retrofit
from hf_xattn.utils import stub
from hf_xattn.version import HOW_TO_INSTALL, __version__


AUTO_CLASSES = ("AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM")
HIDE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_xattn":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
"""


def run(script, tmp_path, *arguments, hidden=False):
    """Runs a script in a session of its own, without a terminal, with an empty cache of modules."""
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    script = (HIDE if hidden else "") + textwrap.dedent(script)
    return warm_processes.run(["-c", script, *arguments], environment=environment, cwd=tmp_path)


def check(made):
    assert made.returncode == 0, made.stderr
    return made.stdout


LOAD = f"""
import sys, transformers
from helpers.processes import warm_processes
folder = sys.argv[1]
assert "hf_xattn" not in sys.modules
processor = transformers.AutoProcessor.from_pretrained(folder, trust_remote_code=True)
assert type(processor).__module__ == "hf_xattn.processing_xattn", type(processor)
for name in {AUTO_CLASSES}:
    model = getattr(transformers, name).from_pretrained(folder, trust_remote_code=True)
    expected = "XAttnModel" if name == "AutoModel" else "XAttnForConditionalGeneration"
    assert type(model) is getattr(sys.modules["hf_xattn"], expected), type(model)
model.save_pretrained("again")
processor.save_pretrained("again")
block = transformers.AutoModel.from_pretrained(sys.argv[2], trust_remote_code=True)
assert type(block).__name__ == "GatedCrossAttentionBlock"
"""


def test_loads_without_the_import(chat_folder, tmp_path):
    """A folder that every session must be told how to load; loaded and saved again, one that says something else."""
    GatedCrossAttentionBlock(CrossAttentionConfig(hidden_size=32, num_attention_heads=4)).save_pretrained(
        tmp_path / "block"
    )
    made = run(LOAD, tmp_path, chat_folder, tmp_path / "block")
    check(made)
    assert "warn" not in made.stderr.lower() and "xattn" not in made.stderr, made.stderr
    again = tmp_path / "again"
    assert sorted(path.name for path in again.glob("*.py")) == ["xattn_stub.py"]
    for name in ("config.json", "processor_config.json"):
        assert (
            json.loads((again / name).read_text())["auto_map"]
            == json.loads((chat_folder / name).read_text())["auto_map"]
        )


def test_a_missing_package_is_named(chat_folder, tmp_path):
    """Advice to upgrade transformers; a bare tokenizer in place of the processor."""
    script = """
        import sys, transformers
        for name in ("AutoConfig", "AutoProcessor", "AutoModelForImageTextToText"):
            for trust in (True, None):
                try:
                    made = getattr(transformers, name).from_pretrained(sys.argv[1], trust_remote_code=trust)
                except (ImportError, ValueError) as error:
                    made = str(error).splitlines()
                print("\\n", name, trust, made)
    """
    lines = check(run(script, tmp_path, chat_folder, hidden=True)).splitlines()
    lines = [line for line in lines if line.startswith(" Auto")]
    trusted = [line for line in lines if " True " in line]
    assert len(lines) == 6 and len(trusted) == 3
    for line in lines:
        asked = (
            f"needs the Python package hf_xattn ({__version__} or newer). {HOW_TO_INSTALL}" if line in trusted else ""
        )
        assert (asked or "trust_remote_code=True") in line, line


def test_nothing_asks_where_the_package_is_imported(chat_folder, monkeypatch, caplog):
    """A prompt in the middle of a job, or code of a folder that runs in place of the imported package."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    for trust in (None, False, True):
        assert type(AutoProcessor.from_pretrained(chat_folder, trust_remote_code=trust)) is hf_xattn.XAttnProcessor
        loaded = AutoModelForImageTextToText.from_pretrained(chat_folder, trust_remote_code=trust)
        assert type(loaded) is XAttnForConditionalGeneration
    assert not caplog.records


def test_a_folder_of_an_earlier_version(chat_folder, tmp_path):
    """A folder without a stub, which cannot be read any more."""
    make_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["auto_map"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "xattn_stub.py").unlink()
    for trust in (None, True):
        loaded = AutoModelForImageTextToText.from_pretrained(tmp_path, trust_remote_code=trust)
    loaded.save_pretrained(tmp_path)
    assert "auto_map" in json.loads((tmp_path / "config.json").read_text()) and (tmp_path / "xattn_stub.py").is_file()


def test_a_reference_to_a_repository_becomes_one_to_the_folder(tmp_path):
    """A saved folder whose code is somebody else's repository, which may change or go."""
    model = make_model()
    model.config.auto_map = {
        "AutoConfig": "somebody/else--xattn_stub.XAttnConfig",
        "AutoModelForOther": "somebody/else--own.Own",
    }
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert saved == {**stub.references("xattn"), "AutoModelForOther": "somebody/else--own.Own"}


def test_an_older_package_says_so(chat_folder, tmp_path, monkeypatch, caplog):
    """A model read wrongly by an older version without a word."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(hf_xattn, "__version__", "0.0.9")
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    made = dynamic_module_utils.get_class_from_dynamic_module("xattn_stub.XAttnConfig", chat_folder)
    assert made is hf_xattn.XAttnConfig
    assert f"saved with hf_xattn {__version__}, but 0.0.9 is installed" in caplog.text and HOW_TO_INSTALL in caplog.text


@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (ModuleNotFoundError("No module named 'accelerate'", name="accelerate"), ModuleNotFoundError, "^No module named 'accelerate'$"),  # noqa: E501
        (ImportError("cannot import name 'XAttnModel' from 'hf_xattn' (unknown location)", name="hf_xattn"), ImportError, "installs it.*XAttnModel"),  # noqa: E501
    ],
    ids=["needs another", "is a folder of that name"],
)  # fmt: skip
def test_a_broken_package_is_not_called_missing(chat_folder, error, raised, words):
    """ "Ask for it" where it is installed, and something that it needs is not."""

    def broken(name, *arguments):
        if name == "hf_xattn":
            raise error
        return __import__(name, *arguments)

    source = (chat_folder / "xattn_stub.py").read_text()
    with pytest.raises(raised, match=words):
        exec(source, {"__builtins__": {**vars(builtins), "__import__": broken}})


# Everything that a user does with a checkpoint, in an environment without the package.
WHOLE_FLOW = """
import sys
import torch, transformers
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoModel, AutoProcessor, pipeline

source, results = sys.argv[1:]
processor = AutoProcessor.from_pretrained(source, trust_remote_code=True)
model = AutoModelForImageTextToText.from_pretrained(source, trust_remote_code=True).eval()
chat = [{"role": "user", "content": [{"type": "image", "image": Image.open(results + "/image.png")}, {"type": "text", "text": "what is it ?"}]}]
inputs = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt")
with torch.no_grad():
    made = {"logits": model(**inputs).logits}
options = {"max_new_tokens": 6, "do_sample": False}
made["greedy"] = model.generate(**inputs, **options)
made["beams"] = model.generate(**inputs, **options, num_beams=3)
images = model.encode_images(pixel_values=inputs["pixel_values"])
made["cached"] = model.generate(inputs["input_ids"], cache=images, **options)
model.enable_image_store()
made["stored"] = model.generate(**inputs, **options)
model.disable_image_store()
pipe = pipeline("image-text-to-text", model=model, processor=processor)
made["text"] = pipe(text=chat, max_new_tokens=6, return_full_text=False)[0]["generated_text"]
model.save_pretrained("again")
processor.save_pretrained("again")
again = AutoModelForImageTextToText.from_pretrained("again", trust_remote_code=True).eval()
assert type(AutoProcessor.from_pretrained("again", trust_remote_code=True)).__name__ == "XAttnProcessor"
assert type(AutoModel.from_pretrained("again", trust_remote_code=True)).__name__ == "XAttnModel"
with torch.no_grad():
    made["again"] = again(**inputs).logits
labels = inputs["input_ids"].clone()
loss = again.train()(**inputs, labels=labels).loss
loss.backward()
made["loss"] = loss.detach()
torch.save(made, results + "/made.pt")
names = {name for name in sys.modules if name.split(".")[0] == "hf_xattn"}
print(type(model).__module__.split(".")[0], sorted(names))
"""  # noqa: E501


def test_code_in_the_folder(chat_folder, tmp_path, monkeypatch):
    """A folder with its code that needs the package all the same, somewhere on the way of a user."""
    model = AutoModelForImageTextToText.from_pretrained(chat_folder).eval()
    processor = AutoProcessor.from_pretrained(chat_folder)
    source = tmp_path / "a model, v1.0"
    model.save_pretrained(source, with_code=True)
    processor.save_pretrained(source)
    from helpers.models.chat_models import drawing

    drawing(0).save(tmp_path / "image.png")
    alone = check(run(WHOLE_FLOW, tmp_path, source, tmp_path, hidden=True))
    assert alone.splitlines()[-1] == "transformers_modules []"
    made = torch.load(tmp_path / "made.pt")
    installed = check(run(WHOLE_FLOW, tmp_path, source, tmp_path))
    assert installed.splitlines()[-1].startswith("hf_xattn ['hf_xattn'")
    expected = torch.load(tmp_path / "made.pt")
    assert made.keys() == expected.keys()
    for name, value in made.items():
        assert value == expected[name] if isinstance(value, str) else torch.equal(value, expected[name]), name
    assert torch.equal(made["logits"], made["again"])
    # The folder that was saved without the package has its code, and loads where the package is.
    assert (tmp_path / "again" / "xattn_code.py").read_text() == (source / "xattn_code.py").read_text()
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "again")
    assert type(loaded) is XAttnForConditionalGeneration


def test_the_code_is_complete(tmp_path):
    """A module that another one imports at its top, and that is missing on the machine of somebody else; more code
    than a model needs.
    """
    make_model().save_pretrained(tmp_path, with_code=True)
    code = (tmp_path / "xattn_code.py").read_text()
    files = re.findall(r"^# ==== (\S+)$", code, flags=re.MULTILINE)
    assert len(files) == len(set(files))
    assert {"modeling_xattn.py", "processing_xattn.py", "layers/block.py", "parts/position_bias.py"} <= set(files)
    assert not {"retrofit.py", "checkpoints/model_card.py"} & set(files)
    root, needed = Path(hf_xattn.__file__).parent, set()
    for name in files:
        text = (root / name).read_text()
        assert "\n".join(f"# {line}".rstrip() for line in text.splitlines()) in code, name
        for node in ast.parse(text).body:
            if isinstance(node, ast.ImportFrom) and node.level:
                folder = (root / name).parents[node.level - 1].relative_to(root)
                modules = [node.module] if node.module else [each.name for each in node.names]
                for module in modules:
                    path = folder / module.replace(".", "/")
                    assert {f"{path}.py", f"{path}/__init__.py"} & set(files), (name, module)
        needed |= set(get_imports(root / name))
    assert needed - set(sys.stdlib_module_names) <= {
        "accelerate",
        "gguf",  # for a base in a GGUF file
        "huggingface_hub",
        "jinja2",  # torch needs it
        "numpy",
        "packaging",
        "PIL",
        "safetensors",
        "torch",
        "transformers",
        "typing_extensions",  # torch needs it; in this package only type checkers read it
        "yaml",  # huggingface_hub needs it
    }
    # transformers copies what the regular expression of this function finds, and would look for files of these names.
    assert dynamic_module_utils.get_relative_imports(tmp_path / "xattn_stub.py") == ["xattn_code"]
    assert dynamic_module_utils.get_relative_imports(tmp_path / "xattn_code.py") == []


def test_small_checkpoints_by_the_code_in_a_folder(tmp_path):
    """A model loaded by the code in a folder that cannot save a small checkpoint, or load one; a card without the code
    that writes it.
    """
    make_text().save_pretrained(tmp_path / "base")
    made = retrofit(tmp_path / "base", every=2)
    made.save_pretrained(tmp_path / "added", adapter_only=True)
    made.save_pretrained(tmp_path / "model", with_code=True)
    for name in ("xattn_stub.py", "xattn_code.py"):
        (tmp_path / "added" / name).write_text((tmp_path / "model" / name).read_text())
    (tmp_path / "model" / "README.md").unlink()
    script = """
        import sys
        from pathlib import Path
        from transformers import AutoModelForCausalLM
        source, added = sys.argv[1:]
        model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)
        model.save_pretrained("small", adapter_only=True)
        for folder in ("small", added):
            again = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
            assert all((weight == model.get_parameter(name)).all() for name, weight in again.named_parameters())
        model.save_pretrained("whole")
        assert not Path("whole", "README.md").exists()
    """
    check(run(script, tmp_path, tmp_path / "model", tmp_path / "added", hidden=True))


def test_faults_in_the_code_of_a_folder_are_readable(tmp_path):
    """A traceback without a line of source; no word about the package where a part is missing that only it has."""
    make_model().save_pretrained(tmp_path, with_code=True)
    script = """
        import inspect, sys, traceback
        from transformers import AutoModelForImageTextToText
        model = AutoModelForImageTextToText.from_pretrained(sys.argv[1], trust_remote_code=True)
        print(inspect.getsource(type(model)).splitlines()[0])
        try:
            model(None)
        except ValueError:
            print(traceback.format_exc())
        import importlib
        for module in ("commands.main", "no_such"):
            try:
                importlib.import_module(type(model).__module__.replace("modeling_xattn", module))
            except ImportError as error:
                print(error)
    """
    said = check(run(script, tmp_path, tmp_path, hidden=True))
    assert "class XAttnForConditionalGeneration" in said and "raise ValueError(" in said, said
    assert said.count("needs the package hf_xattn") == 2, said


def test_code_stays_up_to_date(tmp_path):
    """Code of an earlier save beside weights of a later one; a stub that lost the code beside it."""
    model = make_model()
    model.save_pretrained(tmp_path, with_code=True)
    code = tmp_path / "xattn_code.py"
    assert code.read_text().startswith(stub.NOTICE)
    code.write_text(f"{stub.NOTICE}\nraise RuntimeError('old')\n")
    (tmp_path / "mine.py").write_text("MINE = 1\n")
    model.save_pretrained(tmp_path)
    assert "RuntimeError('old')" not in code.read_text()
    assert stub.holds_code(tmp_path) and (tmp_path / "mine.py").is_file()


def test_files_of_others_are_kept(tmp_path):
    """A decoder's code, written over by a file of this package."""
    (tmp_path / "xattn_code.py").write_text("MINE = 1\n")
    with pytest.raises(ValueError, match="xattn_code.py"):
        make_model().save_pretrained(tmp_path, with_code=True)
    assert (tmp_path / "xattn_code.py").read_text() == "MINE = 1\n" and not list(tmp_path.glob("*.safetensors"))
    make_model().save_pretrained(tmp_path)


@torch.no_grad()
def test_custom_code_of_decoder_and_tower_comes_along(checkpoints):
    """A decoder and a tower whose code stands beside that of this package."""
    made = randomize(retrofit(checkpoints / "text", checkpoints / "vision", every=2, trust_remote_code=True)).eval()
    made.save_pretrained(checkpoints / "model", with_code=True)
    script = """
        import sys, torch
        from transformers import AutoModelForImageTextToText
        given = torch.load(sys.argv[2])
        model = AutoModelForImageTextToText.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
        with torch.no_grad():
            assert torch.equal(model(given["ids"], pixel_values=given["pixels"]).logits, given["logits"])
        assert type(model.config.text_config).__name__ == "CustomDecoderConfig"
        model.save_pretrained("again")
        AutoModelForImageTextToText.from_pretrained("again", trust_remote_code=True)
    """
    given = {"ids": token_ids(), "pixels": pixels()}
    given["logits"] = made(given["ids"], pixel_values=given["pixels"]).logits
    torch.save(given, checkpoints / "given.pt")
    for hidden in (True, False):
        check(run(script, checkpoints, checkpoints / "model", checkpoints / "given.pt", hidden=hidden))


def test_uploads_hold_the_stub(tmp_path):
    """A repository whose `auto_map` names a file that never went up."""
    model = make_model()
    model.save_pretrained(tmp_path)
    before = model._get_files_timestamps(tmp_path)
    assert "config.json" in before and "xattn_stub.py" not in before
    assert "xattn_stub.py" not in model.config._get_files_timestamps(tmp_path)


def test_transformers_serve_knows_the_model_of_a_saved_folder(chat_folder, tmp_path):
    """Transformers' own server, which knows classes of transformers only."""
    pytest.importorskip("fastapi")
    script = """
        import sys
        from transformers.cli.serving.model_manager import ModelManager
        manager = ModelManager(device="cpu", trust_remote_code=True)
        model, processor = manager.load_model_and_processor(manager.process_model_name(sys.argv[1]))
        print(type(model).__name__, type(processor).__name__, manager.get_model_modality(model, processor).name)
        manager.shutdown()  # its timer would keep the process alive for five minutes
    """
    words = check(run(script, tmp_path, chat_folder)).split()
    assert words[-3:] == ["XAttnForConditionalGeneration", "XAttnProcessor", "MULTIMODAL"], words


def test_export_leaves_them_out(tmp_path):
    """Code of this package in a checkpoint of another."""
    from hf_xattn.importers.conversion import copy_side_files

    source, target = tmp_path / "source", tmp_path / "target"
    make_model().save_pretrained(source, with_code=True)
    target.mkdir()
    copy_side_files(source, target)
    assert not list(target.glob("*.py"))
