"""Refuses to save a model that would load as another one.

Loading builds all parts from the configuration. Three kinds of parts would come back different: a part of a class of
the user's own, for which the configuration has no name; a part that was built with other settings than the
configuration has now; and a part with layers of an adapter (PEFT), which rename the weights below them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..decoders.insertion import BLOCKS
from ..parts.vocabulary import vocabulary_options
from ..utils.distributed import is_sharded_by_transformers


logger = logging.get_logger(__name__)

# Attributes that a module copies from the configuration when it is built, and does not read there again.
SETTINGS = ("attention_dropout", "quiet_softmax", "head_dim", "eps")
# Fields of a configuration that do not change what a part computes. Fields that begin with `_` or `base_`, and the ids
# of single tokens, do not change it either.
NOTES = frozenset(
    "name_or_path architectures dtype torch_dtype transformers_version quantization_config use_cache auto_map "
    "return_dict output_attentions output_hidden_states gradient_checkpointing id2label label2id".split()
)
# FSDP and activation checkpointing wrap modules with these names, but keep the names of weights. `torch.compile`
# changes them.
WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")
COMPILED = "_orig_mod"
SAVE_OR_MERGE = (
    "Save the adapter by itself, with `save_pretrained` of the `PeftModel`, or merge it first: `merge_and_unload()`."
)


def refuse_own_parts(model: PreTrainedModel) -> None:
    """Raises a `ValueError` for a part that was compiled, or that loading would build in another way."""
    body = model.base_model
    if any(adapter_layers(body)):
        return  # other checks refuse these
    for path, _ in body.named_modules():
        if path.endswith(COMPILED):
            path = path.removesuffix(COMPILED).rstrip(".")
            raise ValueError(
                f"`save_pretrained` cannot save what `torch.compile` returned ({path}): it has renamed the weights, so "
                "loading would not find them. Use `part.compile()`, which compiles a module in its place."
            )
    for path, name, built, loaded in chain(_differing_parts(model), _differing_configs(body)):
        raise ValueError(
            f"`save_pretrained` cannot save `{path}`: its {name} is {built}, and loaded from the folder it would be "
            f"{loaded}. A part is built once, so a later change of the configuration does not reach it: set the same "
            "value in both. A folder records no part of your own: register a connector, a gate or a position encoding "
            "under a name (`register_connector`, ...), or create the part in `__init__` of a subclass of the model."
        )


def warn_before_training(model: PreTrainedModel) -> None:
    """Warns of what saving will refuse or leave out. Each model is checked once, and again if its adapters change."""
    whole: Any = model
    body: Any = model.base_model
    configs = (vars(each).get("peft_config") for each in (model, body))
    adapters, of_body = (sorted(each) if isinstance(each, dict) else [] for each in configs)
    if getattr(model, "_looked_at", None) == adapters:
        return
    body._looked_at, whole._looked_at = of_body, adapters
    try:
        refuse_own_parts(model)
    except ValueError as error:
        logger.warning(f"This model trains, but {error}")
    warn_of_tower(model)
    if getattr(model, "_hf_peft_config_loaded", False):
        warn_of_weights_left_out(model)


def skeleton_of(model: PreTrainedModel) -> PreTrainedModel | None:
    """Builds the model as loading would, without weights. Returns None if this needs code that may not run here."""
    try:
        with torch.device("meta"):
            new = _class_of(model)._from_config(copy.deepcopy(model.config), dtype=model.dtype)  # type: ignore[attr-defined]
            return new.eval()  # the card runs it on one image, which batch norm refuses in training mode
    except (RuntimeError, TypeError, ValueError) as error:
        logger.info(f"The model cannot be built anew: {error}")
        return None


def _class_of(module: nn.Module | None) -> type:
    """Returns the class of a module before FSDP2 derived another class from it, and inside any wrapper."""
    while module is not None and (inner := next(filter(module._modules.get, WRAPPERS), None)) is not None:
        module = module._modules[inner]
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.distributed."))


def _compared(model: Any) -> dict[str, nn.Module]:
    """Returns the parts of a model, and all modules of connector and blocks, by their paths without wrappers."""
    paths = ((path.split("."), part) for path, part in model.base_model.named_modules(remove_duplicate=False))
    parts = (([name for name in path if name not in WRAPPERS], part) for path, part in paths)
    return {
        ".".join(path) or "model": part
        for path, part in parts
        if len(path) == 1 or path[0] == "connector" or not set(BLOCKS).isdisjoint(path)
    }


def _differing_parts(model: Any) -> Iterator[tuple[str, str, Any, Any]]:
    """Yields what is different in a model that is built from the configuration: the path of a part, `class`, `shape` or
    the name of a setting, the value in `model`, and the other value.
    """
    if (new := skeleton_of(model)) is None:
        return
    found, expected, body = _compared(model), _compared(new), model.base_model
    cut = is_sharded_by_transformers(model) or any("_fsdp_wrapped_module" in path for path, _ in body.named_modules())
    for path in sorted(found.keys() | expected.keys()):
        parts = found.get(path), expected.get(path)
        kind, right = map(_class_of, parts)
        if kind is not right and not kind.__module__.startswith("peft.") and not _is_allowed(path, kind, right):
            yield path, "class", f"{kind.__module__}.{kind.__qualname__}", right.__name__
        elif kind is right and path not in ("model", "text_model", "vision_tower"):
            for name in SETTINGS:
                ours, theirs = (vars(part).get(name) for part in parts)
                if ours != theirs:
                    yield path, name, ours, theirs
            weights = [dict(part.named_parameters(recurse=False)) for part in parts if part is not None]
            for name in () if cut else sorted({*weights[0], *weights[1]}):
                shapes = [None if name not in each else tuple(each[name].shape) for each in weights]
                if shapes[0] != shapes[1]:
                    yield f"{path}.{name}", "shape", shapes[0], shapes[1]
    for name, built in vocabulary_options(body.text_model).items():
        if built != (saved := getattr(body.config, name)):
            yield "text_model", name, built, saved


def _is_allowed(path: str, kind: Any, right: type) -> bool:
    """Whether a text model or a tower may be of another class: of the same model type, such as a tower with a
    projection, which loads without the projection; or of custom code, which is saved beside the weights.
    """
    if path not in ("text_model", "vision_tower") or not issubclass(kind, PreTrainedModel):
        return False
    of_type = kind.__module__.startswith("transformers.") and kind.config_class is getattr(right, "config_class", None)
    return of_type or kind.is_remote_code()


def _differing_configs(body: Any) -> Iterator[tuple[str, str, Any, Any]]:
    """Yields what [`_differing_parts`] does, for settings of the text model and the tower."""
    for name, kept in (("text_model", "text_config"), ("vision_tower", "vision_config")):
        built, saved = getattr(getattr(body, name), "config", None), getattr(body.config, kept)
        if built is not None and saved is not None and built is not saved:
            for key in differing_settings(built, saved):
                yield name, key, getattr(built, key, None), getattr(saved, key, None)


def differing_settings(one: PreTrainedConfig, other: PreTrainedConfig) -> list[str]:
    """Returns the names of settings that differ, without those that say where a part came from or how it runs."""
    mine, others = (json.loads(json.dumps(config.to_dict(), default=str)) for config in (one, other))
    names = {*mine, *others}.difference(NOTES)
    names = {name for name in names if not name.startswith(("_", "base_")) and not name.endswith("_token_id")}
    return sorted(name for name in names if mine.get(name) != others.get(name))


def refuse_adapter_layers(module: nn.Module, what: str, remedy: str) -> None:
    """Raises a `ValueError` for a module with layers of an adapter. `what` and `remedy` are parts of its message."""
    for layer, _ in adapter_layers(module):
        raise ValueError(
            f"{what} a model that holds LoRA layers or other layers of an adapter (PEFT): {layer} is one. {remedy}"
        )


def adapter_layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the layers of a module that have an adapter or are in `modules_to_save`, with their names."""
    for name, part in module.named_modules():
        # PEFT's layers have it, and a `PreTrainedModel` has not.
        if isinstance(getattr(part, "_disable_adapters", None), bool):
            yield name, part


def warn_of_weights_left_out(model: PreTrainedModel) -> None:
    """Warns once of weights that train beside an adapter of `add_adapter`, which is saved without these weights."""
    configs = vars(model).get("peft_config")
    if not configs:  # the model is marked as one with an adapter, but has none
        return
    saved = {
        id(weight)
        for _, layer in adapter_layers(model)
        for name, weight in layer.named_parameters()
        if not name.startswith(("base_layer.", "original_module."))
    }
    with_bias = any(getattr(config, "bias", "none") != "none" for config in configs.values())
    left = [
        name
        for name, weight in model.named_parameters()
        if weight.requires_grad and id(weight) not in saved and not (with_bias and name.endswith("bias"))
    ]
    if left:
        logger.warning_once(
            f"{len(left)} weights train outside of the adapter, such as {left[0]}. With an adapter, `save_pretrained` "
            "saves the adapter alone, so what they learn is lost. To keep blocks and connector, name them in its "
            "configuration: `LoraConfig(..., modules_to_save=hf_xattn.added_modules(model))`."
        )


def warn_of_tower(model: PreTrainedModel) -> None:
    """Warns once of an adapter whose short names, such as `"q_proj"`, also fit layers of the vision tower.

    It is called when training begins, because PEFT calls no method of the model when it adds layers.
    """
    configs = vars(model).get("peft_config")
    body: Any = model.base_model
    if not isinstance(configs, dict) or body.vision_tower is None:
        return
    count, others = (
        sum("base_layer" in part._modules for part in half.modules()) for half in (body.vision_tower, body.text_model)
    )
    targets = [getattr(config, "target_modules", None) or () for config in configs.values()]
    names = {name for target in targets for name in ([target] if isinstance(target, str) else target)}
    if count and others and not any("vision_tower" in name for name in names):
        logger.warning_once(
            f"The adapter trains {count} layers of the vision tower, too: its `target_modules` "
            f"({', '.join(sorted(names)[:3])}) are ends of names, which layers of the tower have as well. For the text "
            "model alone pass `target_modules=hf_xattn.lora_targets(model)`."
        )
