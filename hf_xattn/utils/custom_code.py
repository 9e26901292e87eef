"""Loads and saves decoders, vision towers, connectors and gates whose code came with their checkpoint.

With `trust_remote_code=True`, transformers runs the code of a checkpoint, and copies it when the model is saved. It
does neither for a part of a larger model, so this module does it. A configuration is read without running code: until a
model is loaded with `trust_remote_code=True`, the configuration of such a decoder or tower is an [`UnreadConfig`].
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save, get_class_from_dynamic_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .keywords import CODE_KEYWORDS, given
from .parts import Parts, named_parts


class UnreadConfig(PreTrainedConfig):
    """The fields of a configuration whose class is custom code that has not been run."""

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "model_type": self.__dict__.get("model_type", "")}


_trusted: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar("trusted", default=None)


@contextlib.contextmanager
def trusting(checkpoint: object, load_kwargs: dict[str, Any]) -> Iterator[None]:
    """Context in which the code of a checkpoint may run, if `load_kwargs` hold `trust_remote_code=True`."""
    source = None
    if load_kwargs.get("trust_remote_code") is True:
        source = {"pretrained_model_name_or_path": checkpoint, **given(CODE_KEYWORDS, load_kwargs)}
    token = _trusted.set(source)
    try:
        yield
    finally:
        _trusted.reset(token)


def read_config(config: PreTrainedConfig | dict[str, Any] | None) -> Any:
    """Returns the configuration of a part, also from a `dict`.

    If its class is custom code that may not run, the result is an [`UnreadConfig`].
    """
    if isinstance(config, UnreadConfig):
        fields = config.to_dict()
    elif isinstance(config, dict) and config.get("model_type") not in CONFIG_MAPPING and _code_of(config, "AutoConfig"):
        fields = dict(config)
    else:
        return config
    source = _trusted.get()
    if source is None:
        return config if isinstance(config, UnreadConfig) else UnreadConfig(**fields)
    config_class: Any = get_class_from_dynamic_module(fields["auto_map"]["AutoConfig"], **source)
    config_class.register_for_auto_class()
    read = config_class(**{name: value for name, value in fields.items() if name != "model_type"})
    if isinstance(config, UnreadConfig):
        read._attn_implementation = config._attn_implementation
        read._experts_implementation = config._experts_implementation
    return read


def build_part(auto_class: Any, config: PreTrainedConfig) -> PreTrainedModel:
    """Builds a model with random weights. Raises a `ValueError` for custom code that may not run."""
    source = _trusted.get()
    ref = _code_of(config, auto_class.__name__)
    is_known = type(config) in auto_class._model_mapping
    # In the second case transformers would ask the user at the terminal.
    if isinstance(config, UnreadConfig) or (ref is not None and source is None and not is_known):
        model_type = getattr(config, "model_type", None) or config.__dict__["model_type"]
        raise ValueError(
            f"The code of the {model_type!r} part of this model came with its checkpoint. Load the model with "
            "`trust_remote_code=True` (`--trust-remote-code` of the commands) to run it, or register its classes with "
            "the Auto classes first."
        )
    if ref is None or source is None or _is_registered_by_user(auto_class, config):
        return auto_class.from_config(config)
    model_class: Any = get_class_from_dynamic_module(ref, **source)
    model_class.register_for_auto_class(auto_class.__name__)
    if not is_known:  # as transformers does, so that building the model again, for its card, does not ask
        auto_class.register(type(config), model_class)
    return model_class._from_config(config)


def read_parts(config: PreTrainedConfig) -> None:
    """Registers the classes of connectors and gates that came with a checkpoint, if [`trusting`] allows their code.

    A class that the user has registered is kept.

    Raises:
        ValueError: if another checkpoint has brought another class of the same name.
    """
    source = _trusted.get()
    for parts, name in named_parts(config):
        ref = _code_of(config, _key_of(parts))
        if ref is None or source is None or not parts.is_own(name):
            continue
        known = parts.find(name)
        if known is None or _came_along(known):
            parts.register(name, get_class_from_dynamic_module(ref, **source))


def save_parts_code(config: PreTrainedConfig, folder: Path, with_code: bool) -> None:
    """Copies the code of connectors and gates of the user's own into a folder, and notes it in the configuration.

    Args:
        config: the configuration of the whole model.
        with_code (`bool`): copy also code that did not come with a checkpoint.

    Raises:
        ValueError: for a class that is in no file, and for a file whose name is taken.
    """
    for parts, name in named_parts(config):
        key = _key_of(parts)
        if getattr(config, "auto_map", None):
            config.auto_map.pop(key, None)
        made: Any = parts.find(name)
        if made is None or not parts.is_own(name) or not (with_code or _came_along(made)):
            continue
        path = getattr(sys.modules[made.__module__], "__file__", None)
        if path is None or made.__module__ == "__main__":
            raise ValueError(
                f"`with_code=True`: expected the class of the {parts.kind} {name!r} in a file of its own, which can be "
                f"saved, got {made.__qualname__} of {made.__module__}."
            )
        file = Path(path)
        if (folder / file.name).is_file() and (folder / file.name).read_bytes() != file.read_bytes():
            raise ValueError(f"Two parts of this model bring different files with the name {file.name}. Rename one.")
        made._auto_class = key
        folder.mkdir(parents=True, exist_ok=True)
        noted: Any = config  # transformers says that it takes a `dict`
        custom_object_save(made.__new__(made), folder, config=noted)


def _key_of(parts: Parts) -> str:
    """Returns the key under which the `auto_map` of a configuration names the class of a connector or gate."""
    return f"XAttn{parts.kind.capitalize()}"


def _came_along(part: Any) -> bool:
    return str(part.__module__).startswith("transformers_modules.")


def save_code(parts: list[tuple[PreTrainedModel, PreTrainedConfig]], folder: str | os.PathLike[str]) -> None:
    """Copies the code of custom decoders and towers into a folder, and notes it in their configurations.

    Args:
        parts: the parts, each with its configuration inside the configuration of the whole model.

    Raises:
        ValueError: if two parts have different files with the same name.
    """
    written: dict[Path, bytes] = {}
    for part, config in parts:
        note: Any = config
        if not part.is_custom_code() and getattr(config, "auto_map", None):
            del config.auto_map  # the part is of transformers' own class, not of a custom one
        if not part.is_remote_code():
            continue
        os.makedirs(folder, exist_ok=True)
        for made_of_code in (part, config):
            if type(made_of_code)._auto_class is None:
                continue
            for file in custom_object_save(made_of_code, folder, config=note) or []:
                content = Path(file).read_bytes()
                if written.setdefault(Path(file), content) != content:
                    raise ValueError(
                        f"Two parts of this model bring different files with the name {Path(file).name}. Rename one "
                        "in its checkpoint."
                    )


def _code_of(config: Any, auto_class: str) -> str | None:
    """Returns the class that the `auto_map` of a configuration names for an Auto class."""
    auto_map = config.get("auto_map") if isinstance(config, dict) else getattr(config, "auto_map", None)
    return (auto_map or {}).get(auto_class)


def _is_registered_by_user(auto_class: Any, config: PreTrainedConfig) -> bool:
    """Whether the user has registered a class of their own. transformers prefers such a class, too."""
    if type(config) not in auto_class._model_mapping:
        return False
    known = auto_class._model_mapping[type(config)]
    return isinstance(known, type) and not known.__module__.startswith(("transformers.", "transformers_modules."))
