"""Lists the private names of transformers that this package uses, and evens out differences between its versions.

Private names may change with any release. A test compares the table below with the code of this package and with the
installed transformers. The rest of the package imports names that some supported versions lack from here.
"""

from __future__ import annotations

import contextlib
import inspect
import platform
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import transformers
from packaging.version import Version
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer
from transformers.models.auto import modeling_auto
from transformers.models.auto.image_processing_auto import AutoImageProcessor  # see `REPAIRED`
from transformers.utils.deprecation import deprecate_kwarg

from ..version import __version__


# The oldest and the newest version of transformers with which all tests ran.
OLDEST, NEWEST = "5.17.0", "5.24.0"
# The packages whose versions a bug report should name, in this order.
PACKAGES = ("transformers", "torch", "accelerate", "peft", "trl", "datasets", "vllm")

# The names that are used, by the module that defines them and the first version that has them.
_TABLE = {
    ("configuration_utils", OLDEST): """
        _attn_implementation _attn_implementation_internal _auto_class _experts_implementation
        _experts_implementation_internal _from_auto _from_pipeline _name_or_path""",
    ("generation.configuration_utils", OLDEST): "_get_default_generation_params",
    ("modeling_utils", OLDEST): """
        _adjust_missing_and_unexpected_keys _can_set_attn_implementation _can_set_experts_implementation
        _from_config _get_dtype_plan _init_weights _initialize_weights _is_hf_initialized _is_quantized
        _keep_in_fp32_modules_strict _keys_to_ignore_on_save _load_pretrained_model _no_split_modules
        _set_gradient_checkpointing _tied_weights_keys""",
    ("models.auto.auto_factory", OLDEST): "_model_mapping",
    ("distributed.mixin", OLDEST): "_fsdp_plan _tp_plan",
    ("distributed.mixin", "5.23.0"): "_resolve_parallel_plans",
    ("core_model_loading", OLDEST): "_weight_conversions",
    ("utils.hub", OLDEST): "_commit_hash _get_files_timestamps _upload_modified_files",
    ("integrations.peft", OLDEST): "_adapter_model_path _hf_peft_config_loaded",
    ("generation.utils", OLDEST): """
        _beam_search _get_candidate_generator _get_logits_processor _is_stateful _prepare_cache_for_generation
        _prepare_generation_config _update_model_kwargs_for_generation _validate_model_kwargs""",
    ("integrations.accelerate", OLDEST): "_hf_hook",
    ("modeling_layers", OLDEST): "_gradient_checkpointing_func",
    ("processing_utils", OLDEST): "_merge_kwargs",
    ("tokenization_utils_base", "5.23.0"): "_mark_chat_inputs",
    ("exporters.base", "5.23.0"): "ExportedModel",
}
PRIVATE = {name: where for where, names in _TABLE.items() for name in names.split()}

# Things that earlier versions do wrongly, with the first version that does them right.
REPAIRED = {
    "cache of FP8": "5.21.0",  # before, quantized caches needed a library
    "parts of ranks": "5.20.0",  # before, `from_pretrained` did not find such files
    "special tokens of a GGUF file": "5.18.0",  # before, texts ended with the begin token, and nothing was padding
    "prefill_chunk_size": "5.23.0",  # before, text in the cache was read a second time
    # before, `from transformers import AutoImageProcessor` needed torchvision
    "AutoImageProcessor without torchvision": "5.18.0",
    "activate_past_recording": "5.18.0",  # before, attention read all that a sliding window had recorded
    "modules_to_save": "5.18.0",  # before, `load_adapter` left such modules of an adapter at the values of the base
    "cache": "5.24.0",  # before, models called this argument, and this field of their results, `past_key_values`
}


def warn_of_version(version: str = transformers.__version__) -> None:
    """Warns if the installed transformers is older or newer than all versions that were tested.

    A newer version is used as far as it works. The warning lists the private names that it lacks.
    """
    given, newest = Version(Version(version).base_version), Version(NEWEST)
    if given < Version(OLDEST):
        warnings.warn(
            f"hf_xattn needs transformers {OLDEST} or newer, got {version}: results may be wrong without an error. "
            f'`pip install "transformers>={OLDEST}"` installs a version that is supported.',
            UserWarning,
            stacklevel=3,
        )
    elif given.release[:2] > newest.release[:2]:
        missing = [f"`{name}` of `transformers.{module}`" for name, (module, _) in PRIVATE.items() if not exists(name)]
        lacks = f" It lacks {', '.join(missing)}: what uses these names fails, or does less." if missing else ""
        warnings.warn(
            f"transformers {version} is newer than {NEWEST}, the newest version that hf_xattn was tested with.{lacks} "
            "`hf-xattn check` measures on a model whether its caches and its rows without images are right.",
            UserWarning,
            stacklevel=3,
        )


def installed() -> dict[str, str]:
    """Returns the versions of this package, of `PACKAGES` as far as they are installed, and of Python."""
    found = {"hf_xattn": __version__}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return {**found, "python": platform.python_version()}


def exists(name: str) -> bool:
    """Whether the installed transformers has a name of `PRIVATE` in the source of its module."""
    file = Path(transformers.__file__).parent.joinpath(*PRIVATE[name][0].split(".")).with_suffix(".py")
    return file.is_file() and name in file.read_text(encoding="utf-8")


def is_before(version: str) -> bool:
    """Whether the installed transformers is older than a version."""
    return Version(Version(transformers.__version__).base_version) < Version(version)


def has(name: str) -> bool:
    """Whether the installed transformers has a name of `PRIVATE`, or does a thing of `REPAIRED` right."""
    return not is_before(_since(name))


def needs(name: str, what: str) -> str:
    """Returns an error message that says which version of transformers something needs.

    Args:
        name (`str`): a name of `PRIVATE` or `REPAIRED`, or a version.
        what (`str`): what needs the version. It begins the message.
    """
    return f"{what} needs transformers {_since(name)} or newer, got {transformers.__version__}."


def _since(name: str) -> str:
    return REPAIRED.get(name) or PRIVATE.get(name, ("", name))[1]


Function = TypeVar("Function", bound=Callable[..., Any])

# The name that the installed transformers gives the cache, in the arguments and the results of every model.
CACHE = "cache" if has("cache") else "past_key_values"


def takes_cache(function: Function) -> Function:
    """Decorates a function with an argument `cache`, so that it also takes it under the name `past_key_values`.

    Since 5.24, transformers uses the same decorator for this. The old name gives a warning, and beside `cache` it is
    ignored. Earlier versions pass the name `past_key_values`, and look for it in signatures.
    """
    removed_in = "5.40.0" if has("cache") else "0"  # a warning comes in all versions before this one, so "0" gives none
    renamed: Any = deprecate_kwarg("past_key_values", removed_in, new_name="cache")(function)
    signature = inspect.signature(function)
    parameters = [each.replace(name=CACHE) if each.name == "cache" else each for each in signature.parameters.values()]
    renamed.__signature__ = signature.replace(parameters=parameters)
    return renamed


HAS_RECORDING = has("activate_past_recording")  # computed once, because compiled code reads it


def check_recorded(cache: Cache) -> None:
    """Raises a `ValueError` for a sliding window that has recorded too much for a transformers before 5.18."""
    layer: Any
    for layer in cache.layers:
        if (
            getattr(layer, "record_past", False)
            and layer.keys is not None
            and layer.keys.shape[-2] >= layer.sliding_window
        ):
            what = "Text after a full sliding window that records its past (`activate_past_recording`)"
            raise ValueError(needs("activate_past_recording", what) + " Call `cache.crop(0)` before.")


def check_tokenizer(gguf_file: str | None) -> None:
    """Raises a `ValueError` if the installed transformers would read wrong special tokens from a GGUF file."""
    if gguf_file is not None and not has("special tokens of a GGUF file"):
        raise ValueError(
            needs("special tokens of a GGUF file", f"The tokenizer of {gguf_file}")
            + " Or pass a folder that has the tokenizer in files of its own."
        )


def is_blank_card(text: str) -> bool:
    """Whether a model card is the empty template that transformers uploads to a repository without a card."""
    return "model that has been pushed on the Hub. This model card has been automatically generated." in text


def empty_dynamic_layers(cache: Cache) -> None:
    """Empties the dynamic layers of a reset cache. transformers before 5.18 keeps their length, and fills them with
    zeros.
    """
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer):
            _empty(layer)


def empty_all_layers(cache: Cache) -> None:
    """Empties all layers of a reset cache, so that it takes text with any number of rows.

    transformers keeps zeros for the rows from before, in static layers and in layers with states.
    """
    for layer in cache.layers:
        _empty(layer)
        for name in ("conv_states", "recurrent_states"):
            for index in (states := getattr(layer, name, {})):
                states[index] = None
                getattr(layer, f"is_{name}_initialized")[index] = False


def _empty(layer: Any) -> None:
    if getattr(layer, "keys", None) is not None:
        layer.keys = layer.values = None
        layer.is_initialized = False
    if getattr(layer, "indexer_keys", None) is not None:
        layer.indexer_keys = None
        layer.is_indexer_initialized = False


try:  # since 5.20
    from transformers.configuration_utils import SubConfigSpec

    class DeclaresParts:
        """Base of configurations that declare their parts in `sub_configs_defaults`."""

except ImportError:
    from transformers import CONFIG_MAPPING, AutoConfig

    class SubConfigSpec:  # type: ignore[no-redef]
        """Declares the class of a configuration's part, as transformers does since 5.20."""

        def __init__(self, config_class: Any, model_type: str | None = None, optional: bool = False):
            self.config_class, self.optional = config_class, optional
            self.model_type = model_type or config_class.model_type

        def create_subconfig(self, key: str, subconfig: Any = None, **kwargs) -> tuple[Any, dict[str, Any]]:
            if isinstance(subconfig, PreTrainedConfig):
                return subconfig, kwargs
            fields = dict(subconfig or {})
            if self.config_class is not AutoConfig:
                return self.config_class(**fields), kwargs
            model_type = fields.get("model_type", self.model_type)
            if model_type not in CONFIG_MAPPING:
                raise ValueError(f"`{key}` needs a `model_type` that transformers knows, got {model_type!r}.")
            return CONFIG_MAPPING[model_type](**fields), kwargs

    class DeclaresParts:  # type: ignore[no-redef]
        """Base of configurations that declare their parts in `sub_configs_defaults`. It builds the parts."""

        sub_configs_defaults: dict[str, SubConfigSpec] = {}
        sub_configs: dict[str, Any] = {}
        has_no_defaults_at_init: bool = False

        def __init_subclass__(cls, **kwargs: Any) -> None:
            cls.sub_configs = {name: spec.config_class for name, spec in cls.sub_configs_defaults.items()}
            cls.has_no_defaults_at_init = any(not spec.optional for spec in cls.sub_configs_defaults.values())
            super().__init_subclass__(**kwargs)

        def __post_init__(self, **kwargs: Any) -> None:
            for name, spec in self.sub_configs_defaults.items():
                part = getattr(self, name)
                if part is not None or not spec.optional:
                    setattr(self, name, spec.create_subconfig(name, part)[0])
            super().__post_init__(**kwargs)  # type: ignore[misc]


try:  # since 5.23
    from transformers.cache_utils import DummyLayer
except ImportError:

    class DummyLayer:  # type: ignore[no-redef]
        """A layer of a cache that holds nothing. Older versions do not have this class."""


try:  # since 5.22
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
except ImportError:
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

try:  # since 5.18
    from transformers.utils.hub import resolve_revision
except ImportError:

    def resolve_revision(name: str, revision: str | None = None, **hub: Any) -> str | None:  # type: ignore[misc]
        """Returns the commit that a revision means now, if it can be found. Before 5.18, configurations hold it."""
        import os

        if os.path.exists(name):
            return revision
        try:
            config, _ = PreTrainedConfig.get_config_dict(name, revision=revision, **hub)
        except OSError:  # no error, as since 5.18: loading the files gives a better one
            return revision
        return config.get("_commit_hash") or revision


__all__ = ["ALL_PARALLEL_STYLES", "AutoImageProcessor", "DummyLayer", "SubConfigSpec", "resolve_revision"]


def name_causal_lm(name: str) -> None:
    """Tells transformers that a class predicts the next token, so that `Trainer` shifts labels for label smoothing."""
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[f"xattn {name}"] = name
