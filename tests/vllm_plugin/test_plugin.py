"""vLLM calls `register` at each start, for every model, outside a `try`: whatever fails in it, other models start."""

import importlib
import logging
import os
import subprocess
import sys

import pytest


pytest.importorskip("vllm.config", reason="vLLM is not installed (see examples/vllm)")

from transformers import AutoConfig
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.renderers.registry import RENDERER_REGISTRY
from vllm.tokenizers.registry import TokenizerRegistry
from vllm.transformers_utils import config as of_configs
from vllm.transformers_utils.model_arch_config_convertor import MODEL_ARCH_CONFIG_CONVERTORS

from helpers.processes.engine_models import save_model, save_with_base
from hf_xattn import XAttnConfig
from hf_xattn.vllm_plugin import plugin


TABLES = (
    ModelRegistry.models,
    MODELS_CONFIG_MAP,
    RENDERER_REGISTRY.renderers,
    TokenizerRegistry.tokenizers,
    of_configs._CONFIG_FORMAT_TO_CONFIG_PARSER,
    MODEL_ARCH_CONFIG_CONVERTORS,
)
LISTED = [(owner.rpartition(".")[0], name) for name, owner in plugin.PRIVATE.items()]
# What `register` imports: the model's own modules are imported when such a model loads.
IMPORTED = [
    ("vllm.config.compilation", "CUDAGraphMode"),
    ("vllm.model_executor.models", "ModelRegistry"),
    ("vllm.model_executor.models.config", "MODELS_CONFIG_MAP"),
    ("vllm.renderers.registry", "RENDERER_REGISTRY"),
    ("vllm.tokenizers.registry", "TokenizerRegistry"),
    ("vllm.transformers_utils.config", "HFConfigParser"),
    ("vllm.transformers_utils.model_arch_config_convertor", "MODEL_ARCH_CONFIG_CONVERTORS"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_model(path)
    return str(path)


@pytest.fixture
def registered(caplog, monkeypatch):
    """Calls `register` as vLLM does. Returns what it has changed, and its warnings. Afterwards all is as before."""
    before = [dict(table) for table in TABLES]
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)

    def call():
        for name in [name for name in sys.modules if name.startswith("hf_xattn.vllm_plugin.")]:
            if name != plugin.__name__:
                monkeypatch.delitem(sys.modules, name)
        plugin.register()
        changed = [dict(table) for table in TABLES] != before
        return changed, [record.getMessage() for record in caplog.records if record.name == "vllm.hf_xattn"]

    yield call
    for table, old in zip(TABLES, before):
        table.clear()
        table.update(old)
    AutoConfig.register("xattn", XAttnConfig, exist_ok=True)


def check_refused(registered, folder, reason):
    changed, (warning,) = registered()
    assert not changed
    assert warning.startswith("hf_xattn cannot serve its models on this vLLM: ") and reason in warning
    assert warning.endswith(". Other models are not affected.")
    with pytest.raises(ValueError, match="hf_xattn cannot serve its models on this vLLM") as error:
        AutoConfig.from_pretrained(folder)
    assert reason in str(error.value)


def test_all_is_there(registered, folder):
    """Checks that refuse a vLLM that has all names."""
    assert registered() == (True, [])
    assert type(AutoConfig.from_pretrained(folder)) is XAttnConfig
    assert "XAttnForConditionalGeneration" in ModelRegistry.models


@pytest.mark.parametrize("module, name", LISTED)
def test_a_name_that_vllm_lacks(module, name, registered, folder, monkeypatch):
    """A release without a name that is used: an engine that does not start, or a model that fails half-way."""
    original = plugin.source
    monkeypatch.setattr(
        plugin, "source", lambda asked: original(asked).replace(name, "") if asked == module else original(asked)
    )
    check_refused(registered, folder, f"`{name}` of `{module}`")


@pytest.mark.parametrize("module, name", IMPORTED)
def test_an_import_that_fails(module, name, registered, folder, monkeypatch):
    """A name that stands in the source and cannot be imported."""
    monkeypatch.delattr(importlib.import_module(module), name)
    check_refused(registered, folder, name)


def test_a_transformers_that_fails(registered, folder, monkeypatch):
    """A transformers in which this package cannot be imported."""
    monkeypatch.setitem(sys.modules, "hf_xattn", None)
    check_refused(registered, folder, "hf_xattn")


def test_a_registration_that_fails(registered, folder, monkeypatch):
    """A registry that wants other arguments: half of a model, or an engine that does not start."""

    def other(*arguments):
        raise TypeError("takes 2 arguments")

    monkeypatch.setattr(ModelRegistry, "register_model", other, raising=False)
    check_refused(registered, folder, "TypeError: takes 2 arguments")


LACKS_A_NAME = "from hf_xattn.vllm_plugin import plugin\nplugin.PRIVATE['GoneFromHere'] = 'vllm.config.Nothing'\n"
BROKEN_IMPORT = "import sys\nsys.modules['hf_xattn.modeling_xattn'] = None\n"


@pytest.fixture
def starting(tmp_path):
    """Makes the environment of processes that run some code when they start."""

    def make(code):
        (tmp_path / "sitecustomize.py").write_text(code)
        return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}

    return make


SCRIPT = """
import sys
from vllm import LLM, SamplingParams

llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=256, gpu_memory_utilization=0.5)
outputs = llm.generate(["what is it ?", "a b c d e"], SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
print("TOKENS", [list(output.outputs[0].token_ids) for output in outputs])
"""


def asked(folder, environment):
    """An engine in processes of its own. Returns its tokens, None if it does not start, and all that it printed."""
    command = [sys.executable, "-c", SCRIPT, folder]
    made = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    return next(
        (line for line in made.stdout.splitlines() if line.startswith("TOKENS")), None
    ), made.stdout + made.stderr


def test_a_plain_llama_starts(tmp_path, starting):
    """An engine of somebody else's model that an installed hf_xattn stops, or whose answers it changes."""
    base = str(tmp_path / "base")
    save_with_base(str(tmp_path / "whole"), base)
    without, said = asked(base, {**os.environ, "VLLM_PLUGINS": ""})
    assert without is not None and "hf_xattn" not in said, said[-4000:]
    for code, told in (
        (LACKS_A_NAME, "it lacks `GoneFromHere` of `vllm.config`"),
        (BROKEN_IMPORT, "Failed to load plugin hf_xattn"),
    ):
        with_plugin, said = asked(base, starting(code))
        assert with_plugin == without and told in said, said[-4000:]


def test_a_folder_of_ours_says_why(folder, starting):
    """A model of this package that another class of vLLM runs, without its images; an error without the reason."""
    tokens, said = asked(folder, starting(LACKS_A_NAME))
    last = said.strip().splitlines()[-12:]
    assert tokens is None and any("hf_xattn cannot serve its models on this vLLM" in line for line in last), last
