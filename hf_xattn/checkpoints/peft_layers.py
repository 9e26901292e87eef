"""Finds layers of adapters (PEFT) in a model. They rename the weights below them, so what is saved with them loads into no other model."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.utils import logging


logger = logging.get_logger(__name__)


def refuse_adapter_layers(module: nn.Module, what: str, remedy: str) -> None:
    """Raises a `ValueError` for a module with layers of an adapter.

    Args:
        what (`str`): what does not work with them, as the beginning of a sentence.
        remedy (`str`): what to do instead, as a sentence.
    """
    layer = first_adapter_layer(module)
    if layer is not None:
        raise ValueError(
            f"{what} a model that holds LoRA layers or other layers of an adapter (PEFT): {layer} is one. {remedy}"
        )


def first_adapter_layer(module: nn.Module) -> str | None:
    """Name of the first layer with an adapter, or of `modules_to_save`, in a module. None where there is none.

    Both have this attribute. A `PreTrainedModel` has the other ones of such layers too.
    """
    for name, part in module.named_modules():
        if isinstance(getattr(part, "_disable_adapters", None), bool):
            return name
    return None


def warn_of_tower(model: Any) -> None:
    """Warns once of an adapter whose short names, such as `"q_proj"`, mean layers of the vision tower, too.

    PEFT calls nothing of a model when it adds layers, but it leaves `peft_config` on the model. So this is called where training begins.
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
            f"The adapter trains {count} layers of the vision tower, too: its `target_modules` ({', '.join(sorted(names)[:3])}) are ends "
            "of names, which layers of the tower have as well. For the text model alone pass "
            "`target_modules=hf_xattn.lora_targets(model)`."
        )
