"""Refuses to save parts for which a saved folder has no names: a user's own, and layers of adapters (PEFT).

It would load with the parts of this package or of transformers, and answer otherwise. So would a part that was built
with other settings than the configuration has by now. The layers of an adapter rename the weights below them, so what
is saved with them loads into no other model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING
from transformers.utils import logging

from ..decoders.block_stack import BlockStack, blocks_at
from ..decoders.decoder import find_decoder
from ..decoders.insertion import BLOCKS
from ..decoders.vocabulary import vocabulary_options
from ..images.connector import XAttnConnector
from ..layers.block import GatedCrossAttentionBlock
from ..utils.architectures import TILED_VISION_TYPES
from ..utils.distributed import is_sharded_by_transformers
from ..utils.first_values import ValuesComeLater
from ..utils.stub import PACKAGE


logger = logging.get_logger(__name__)

# What a block keeps of its configuration, and does not read there again.
SETTINGS = ("attention_dropout", "quiet_softmax", "head_dim", "eps")
# Of a configuration: no setting of what a part computes.
NOTES = {"_name_or_path", "architectures", "dtype", "transformers_version", "quantization_config"}
# FSDP and activation checkpointing wrap modules, and leave the names of weights as they are. `torch.compile` does not.
WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")
COMPILED = "_orig_mod"
SAVE_OR_MERGE = (
    "Save the adapter by itself, with `save_pretrained` of the `PeftModel`, or merge it first: `merge_and_unload()`."
)


def refuse_own_parts(model: Any) -> None:
    """Raises a `ValueError` for a part that was compiled, or that loading would build of another class."""
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
    is_ours = _is_built_by_us(model)
    found, expected = _found_and_expected(body) if is_ours else ({}, {})
    wrong = next(chain(_wrong_parts(model), _wrong_modules(found, expected)), None) if is_ours else None
    if wrong is not None:
        raise ValueError(
            f"`save_pretrained` cannot save a part of your own: {wrong}. A folder names no such parts, so it would "
            "load with the expected one. Save the weights of this part by themselves (`torch.save(part.state_dict(), "
            "file)`), and the model with the expected part in its place. Connectors, gates and codes of positions of "
            "your own may have names: see `register_connector`, `register_gate` and `register_position`. Or make the "
            "part in `__init__` of a subclass of the model, which then loads what it saves."
        )
    wrong = next(chain(_wrong_settings(body), _wrong_values(model, found, expected) if is_ours else ()), None)
    if wrong is not None:
        raise ValueError(
            f"`save_pretrained` cannot save {wrong}. A part is built once: a later change of the configuration does "
            "not reach it, and the folder would load as another model. Give both the same value."
        )


def warn_of_own_parts(model: Any) -> None:
    """Warns once where training begins. It is called at each step, so it looks at the parts and at the first block."""
    if _is_built_by_us(model) and (found := next(_wrong_parts(model), None)) is not None:
        logger.warning_once(f"`save_pretrained` will refuse this model, because of a part of your own: {found}.")
    elif (found := next(_wrong_settings(model.base_model), None)) is not None:
        logger.warning_once(f"`save_pretrained` will refuse this model: it cannot save {found}.")


def _class_of(module: nn.Module | None) -> type:
    """The class of a module, without what FSDP2 derives from it and what wraps it."""
    while module is not None and (inner := next(filter(module._modules.get, WRAPPERS), None)) is not None:
        module = module._modules[inner]
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.distributed."))


def _is_ours(kind: Any) -> bool:
    return f"{kind.__module__}.".startswith(f"{PACKAGE}.")


def _is_built_by_us(model: Any) -> bool:
    """Whether loading builds the parts. A subclass with an `__init__` of its own may build others."""
    kind: Any = _class_of(model)
    return _is_ours(kind.__init__)


def _wrong_parts(model: Any) -> Iterator[str]:
    body, config = model.base_model, model.config
    if body is not model and not _is_ours(_class_of(body)):
        yield _words("model", _class_of(body), "XAttnModel")
    tower: Any = MODEL_MAPPING
    if config.vision_config is not None and config.vision_config.model_type in TILED_VISION_TYPES:
        from transformers import MllamaVisionModel

        tower = {type(config.vision_config): MllamaVisionModel}  # not registered with AutoModel
    for name, part, mapping in (
        ("text_model", config.text_config, MODEL_FOR_CAUSAL_LM_MAPPING),
        ("vision_tower", config.vision_config, tower),
        ("connector", config.vision_config, {type(config.vision_config): XAttnConnector}),
    ):
        found, expected = _class_of(getattr(body, name)), mapping.get(type(part), None)
        if part is None or expected is None or found.__module__.startswith("peft."):
            continue
        if issubclass(found, PreTrainedModel):
            # Such as a tower with a projection, which loads without it.
            of_same_type = found.__module__.startswith("transformers.") and found.config_class is type(part)
            if of_same_type or found.is_remote_code():  # which is saved beside the weights
                continue
        kinds = expected if isinstance(expected, (tuple, list)) else (expected,)
        if found not in kinds:
            yield _words(name, found, kinds[0].__name__)


def _wrong_modules(found: dict[str, nn.Module], expected: dict[str, nn.Module]) -> Iterator[str]:
    """Modules of connector and blocks that differ from those of new ones."""
    for path in sorted(found.keys() | expected.keys()):
        ours, new = (_class_of(each.get(path)) for each in (found, expected))
        if ours is not new:
            yield _words(path, ours, new.__name__)


def _wrong_values(model: Any, found: dict[str, nn.Module], expected: dict[str, nn.Module]) -> Iterator[str]:
    """What modules of connector and blocks keep of their configuration, where new ones would keep something else."""
    body = model.base_model
    cut = is_sharded_by_transformers(model) or any("_fsdp_wrapped_module" in path for path, _ in body.named_modules())
    for path, module in found.items():
        new = expected.get(path, module)
        for name in SETTINGS:
            ours, theirs = (vars(each).get(name) for each in (module, new))
            if ours != theirs:
                yield f"`{path}`: it was built with {name}={ours!r}, which is {theirs!r} in the configuration"
        for name in sorted({*dict(module.named_parameters(recurse=False)), *dict(new.named_parameters(recurse=False))}):
            ours, theirs = (_shape_of(getattr(each, name, None)) for each in (module, new))
            if ours != theirs and not cut:
                yield f"`{path}.{name}`: it was built {ours}, and a new one is built {theirs}"
    for name, built in vocabulary_options(body.text_model).items():
        if built != (saved := getattr(body.config, name)):
            yield f"`text_model`: it was built with {name}={built!r}, which is {saved!r} in the configuration"


def _shape_of(weight: torch.Tensor | None) -> str:
    return "without it" if weight is None else f"with shape {tuple(weight.shape)}"


def _found_and_expected(body: Any) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """The modules of connector and blocks by their paths, and those of new ones."""
    config = copy.deepcopy(body.config)
    found: dict[str, nn.Module] = {}
    expected: dict[str, nn.Module] = {}
    with torch.device("meta"), ValuesComeLater():
        block = GatedCrossAttentionBlock(config.cross_attention_config)
        if config.vision_config is not None:
            found = _modules("connector", body.connector)
            expected = _modules("connector", XAttnConnector(config))
    _, layers = find_decoder(body.text_model)
    paths = {id(module): path for path, module in body.named_modules()}
    for index, layer in enumerate(layers):
        for name, place in zip(BLOCKS, [index] if index < len(layers) - 1 else [index, index + 1]):
            path, count = f"{paths[id(layer)]}.{name}", len(blocks_at(config.cross_attention_layers, place))
            found |= _modules(path, getattr(layer, name, None))
            if count:
                expected |= _modules(path, block if count == 1 else BlockStack(*[block] * count))
    return found, expected


def _wrong_settings(body: Any) -> Iterator[str]:
    """Settings with which a part was built, and which the configuration has otherwise."""
    for name, kept in (("text_model", "text_config"), ("vision_tower", "vision_config")):
        built, saved = getattr(getattr(body, name), "config", None), getattr(body.config, kept)
        if built is not None and saved is not None and built is not saved:
            now = saved.to_dict()
            for key, value in built.to_dict().items():
                if key not in NOTES and now.get(key) != value:
                    yield f"`{name}`: it was built with {key}={value!r}, which is {now.get(key)!r} in `config.{kept}`"
    block = next((each for each in body.text_model.modules() if isinstance(each, GatedCrossAttentionBlock)), None)
    if block is not None:  # the others are made of the same configuration
        for difference in _of_block(block, body.config.cross_attention_config):
            yield f"{difference} in `config.cross_attention_config`"


def _of_block(block: Any, config: Any) -> Iterator[str]:
    for path, module in block.named_modules(prefix="cross_attention_block"):
        for attribute in SETTINGS if _is_ours(_class_of(module)) else ():
            of_heads = path.endswith(("q_norm", "k_norm"))
            key = {"eps": "qk_norm_eps" if of_heads else "norm_eps"}.get(attribute, attribute)
            saved = getattr(config, key)
            if (value := vars(module).get(attribute, saved)) != saved:
                yield f"`{path}`: it was built with {key}={value!r}, which is {saved!r}"
    if (block.attn_gate is None) != (config.gate == "none"):
        built = "without a gate" if block.attn_gate is None else "with a gate"
        yield f"`cross_attention_block`: it was built {built}, which is gate={config.gate!r}"


def _modules(path: str, module: nn.Module | None) -> dict[str, nn.Module]:
    """Each module in a part, by its path without wrappers."""
    inside = () if module is None else module.named_modules(prefix=path, remove_duplicate=False)
    return {".".join(name for name in each.split(".") if name not in WRAPPERS): part for each, part in inside}


def _words(path: str, found: type, expected: str) -> str:
    return f"`{path}` is a {found.__module__}.{found.__qualname__}, expected a {expected}"


def refuse_adapter_layers(module: nn.Module, what: str, remedy: str) -> None:
    """Raises a `ValueError` for a module with layers of an adapter. `what` and `remedy` are parts of its message."""
    for layer, _ in adapter_layers(module):
        raise ValueError(
            f"{what} a model that holds LoRA layers or other layers of an adapter (PEFT): {layer} is one. {remedy}"
        )


def adapter_layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers with an adapter, or of `modules_to_save`, in a module, by name."""
    for name, part in module.named_modules():
        if isinstance(getattr(part, "_disable_adapters", None), bool):  # which both have, and no `PreTrainedModel`
            yield name, part


def warn_of_weights_left_out(model: Any) -> None:
    """Warns once of weights that train beside an adapter of `add_adapter`, which is saved without them."""
    configs = vars(model).get("peft_config")
    if not configs:  # marked as a model with an adapter, without one
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


def warn_of_tower(model: Any) -> None:
    """Warns once of an adapter whose short names, such as `"q_proj"`, mean layers of the vision tower, too.

    PEFT calls nothing of a model when it adds layers. So this is called where training begins.
    """
    configs = vars(model).get("peft_config")
    body = model.base_model
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
