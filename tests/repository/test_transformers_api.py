"""What the package uses of transformers' private API: all of it is in one table, and the table is true."""

import ast
import inspect
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

import hf_xattn
from hf_xattn import XAttnForConditionalGeneration
from hf_xattn.utils import transformers_api
from hf_xattn.utils.transformers_api import NEWEST, OLDEST, PRIVATE, exists, warn_of_version
from hf_xattn.vllm_plugin import plugin


PACKAGE = Path(hf_xattn.__file__).parent
# Private names of Python, torch, huggingface_hub and Gradio, and of marks that this package leaves on a model.
OF_OTHERS = frozenset(
    """_ActionsContainer _SubParsersAction _apply _asdict _assert_async _buffers _cdata _dynamo _fields _get_fsdp_state _gguf_file
_local_tensor _looked_at _modules _non_persistent_buffers_set _parameters _queue _replace _to_copy _version""".split()  # noqa: E501
)


def trees():
    return {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def own_names():
    """Names that the package itself defines: functions, classes, attributes that it sets on `self`."""
    own = set()
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                own.add(node.target.id)
            elif isinstance(node, ast.Assign):
                own |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    own.add(node.attr)
    return own


def test_attributes_are_listed():
    """A private attribute of transformers that the code reads or writes, and that a new release
    may rename unnoticed.
    """
    known = set(PRIVATE) | set(plugin.PRIVATE) | OF_OTHERS | own_names()
    unlisted = {}
    for path, tree in trees().items():
        for node in ast.walk(tree):
            name = node.attr if isinstance(node, ast.Attribute) else ""
            if is_private(name) and name not in known:
                unlisted.setdefault(name, path.name)
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transformers":
                unlisted |= {n.name: path.name for n in node.names if is_private(n.name) and n.name not in PRIVATE}
    assert not unlisted


def test_overrides_are_listed():
    """A private method or attribute of transformers that a class here replaces."""
    classes = [hf_xattn.XAttnConfig, hf_xattn.CrossAttentionConfig, hf_xattn.XAttnProcessor, hf_xattn.XAttnModel]
    classes += [hf_xattn.XAttnForConditionalGeneration, hf_xattn.GatedCrossAttentionBlock]
    unlisted = set()
    for made in classes:
        of_transformers = [base for base in made.__mro__ if base.__module__.startswith("transformers.")]
        for own in (base for base in made.__mro__ if base.__module__.startswith("hf_xattn.")):
            names = (name for name in vars(own) if is_private(name) and name not in PRIVATE)
            unlisted |= {name for name in names if any(name in vars(base) for base in of_transformers)}
    # flags that every model class of transformers sets
    assert {name for name in unlisted if not name.startswith(("_supports_", "_can_compile", "_skip_keys"))} == set()


@pytest.mark.parametrize("name", PRIVATE)
def test_the_table_is_true(name):
    """A name that the installed transformers no longer has in that file; a wrong first version."""
    module, since = PRIVATE[name]
    assert exists(name) == transformers_api.has(name), f"{name}: {module}, since {since}"


@pytest.mark.parametrize("version", ["4.57.6", "5.16.1", "5.17.0.dev0"])
def test_older_versions_are_told(version):
    """An old transformers with which the model gives other answers, without a word."""
    older = Version(Version(version).base_version) < Version(OLDEST)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        warn_of_version(version)
    said = [f"hf_xattn needs transformers {OLDEST} or newer, got {version}" in str(warning.message) for warning in told]
    assert said == ([True] if older else [])


@pytest.mark.parametrize("version", ["5.25.0", "5.25.0.dev0", "6.0.0"])
def test_newer_versions_are_told(version, monkeypatch):
    """A transformers that nobody has tested, without a word; or without the names that it no longer has."""
    with pytest.warns(UserWarning, match=f"{version} is newer than {NEWEST}.* `hf-xattn check` measures"):
        warn_of_version(version)
    monkeypatch.setitem(PRIVATE, "_no_such_name", ("generation.utils", OLDEST))
    with pytest.warns(
        UserWarning, match="It lacks .*`_no_such_name` of `transformers.generation.utils`: .*hf-xattn check"
    ):
        warn_of_version(version)


@pytest.mark.parametrize("version", [OLDEST, "5.23.9", NEWEST, "5.24.9"])
def test_supported_versions_pass(version):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_version(version)


@pytest.mark.parametrize("version, words", [("5.16.0", "hf_xattn needs transformers"), ("7.0.0", "newer than")])
def test_import_warns_once(version, words):
    """A warning with every model, or none at import."""
    script = (
        f"import warnings, transformers; transformers.__version__ = '{version}'\n"
        "with warnings.catch_warnings(record=True) as told:\n"
        "    warnings.simplefilter('always'); import hf_xattn, hf_xattn as again; "
        f"hf_xattn.XAttnConfig(text_config=transformers.LlamaConfig())\nassert sum('{words}' in "
        "str(w.message) for w in told) == 1, told"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_splitting_over_ranks_is_refused_in_an_old_version(monkeypatch, tmp_path):
    """Blocks that no rank splits, so that every rank adds their whole output."""
    monkeypatch.setattr(transformers_api.transformers, "__version__", "5.22.2")
    with pytest.raises(ValueError, match="`tp_plan` needs transformers 5.23.0 or newer, got 5.22.2"):
        XAttnForConditionalGeneration.from_pretrained(tmp_path, tp_plan="auto")


def test_parts_without_declarations():
    """Versions before 5.20 do not make configurations of declared parts: the stand-in has to."""
    source = inspect.getsource(transformers_api)
    space = {"__name__": "hf_xattn.utils.old", "__package__": "hf_xattn.utils"}
    without = source.replace("from transformers.configuration_utils import SubConfigSpec", "raise ImportError")
    assert without != source
    exec(compile(without, "old", "exec"), space)
    spec = space["SubConfigSpec"](config_class=transformers.AutoConfig, model_type="llama")
    assert isinstance(spec.create_subconfig("text_config", {"hidden_size": 64})[0], transformers.LlamaConfig)
    assert isinstance(spec.create_subconfig("text_config", {"model_type": "gpt2"})[0], transformers.GPT2Config)
    with pytest.raises(ValueError, match="`text_config` needs a `model_type` that transformers knows, got 'nonsense'"):
        spec.create_subconfig("text_config", {"model_type": "nonsense"})
