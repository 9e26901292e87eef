"""Keeps everything but the text model in high precision when a model is quantized.

A quantizer of transformers converts every linear layer of a model, except those that its configuration names. It would
convert the blocks too: they could not be trained, and image features would lose precision. So this module adds the
blocks, the connector and the vision tower to the list of layers that the quantizer leaves alone. The list is saved in
`config.json`, so a saved model loads in the same way.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AutoQuantizationConfig
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationMethod

from ..configuration_xattn import XAttnConfig
from ..layers.block import cross_attention_blocks
from ..utils.custom_code import build_part
from ..utils.tensor_checks import first_quantized, is_quantized


if TYPE_CHECKING:
    from transformers.utils.quantization_config import QuantizationConfigMixin

# Patterns of the modules that stay in high precision. In a model with a head, names begin with `model.`.
KEPT = (r"(?:model\.)?vision_tower", r"(?:model\.)?connector", r".*\.cross_attention_block(?:_after)?")

TEXT = r"(?:model\.)?text_model\."

# Fields of the quantizers' configurations that name the layers to leave alone.
SKIP_FIELDS = ("modules_to_not_convert", "llm_int8_skip_modules", "skip_modules")

# What a quantizer sets on the model that it has converted. `is_quantized` is left out: see `share_quantizer`.
MARKS = ("hf_quantizer", "quantization_method", "is_loaded_in_4bit", "is_loaded_in_8bit")

# End of the errors for models that loading could not quantize in the same way.
PRECISE_TEXT = (
    "Retrofit the text model in full precision, give it these blocks and this connector (`load_state_dict(weights, "
    "strict=False)`), and save that."
)
PRECISE_TOWER = "Put a tower in full precision in its place (`model.base_model.vision_tower = tower`), then save."


def keep_added_precise(
    quantization_config: dict[str, Any] | QuantizationConfigMixin, config: XAttnConfig
) -> QuantizationConfigMixin:
    """Returns a quantizer's configuration that also leaves blocks, connector and vision tower in high precision.

    Args:
        quantization_config: the argument of `from_pretrained`. It is not changed.
        config: the configuration of the model.
    """
    if isinstance(quantization_config, dict):
        asked: QuantizationConfigMixin = AutoQuantizationConfig.from_dict(quantization_config)
    else:
        asked = quantization_config
    field = _skip_field(asked)
    if field is None:
        return asked
    given = getattr(asked, field)
    if given is None:
        # By default a quantizer leaves the head alone, and modules that share its weights. A list replaces this
        # default, so these modules are found in the text model and put into the list.
        with torch.device("meta"):
            text_model = build_part(AutoModelForCausalLM, config.text_config)
        given = [TEXT + re.escape(name) for name in sorted(get_keys_to_not_convert(text_model))]
    else:  # each name is added a second time as a name in the text model, so that "lm_head" fits both
        given = [*given, *(f"{TEXT}(?:{name})" for name in given if not name.startswith(TEXT) and name not in KEPT)]
    return _with_skips(asked, field, list(dict.fromkeys([*given, *KEPT])))


def adopt_quantizer(model: PreTrainedModel, text_model: PreTrainedModel) -> None:
    """Gives the quantizer of a text model to the [`XAttnModel`] around it, which can then be saved and loaded.

    The configuration takes over the quantization (see [`XAttnConfig.to_dict`]).
    """
    quantizer = getattr(text_model, "hf_quantizer", None)
    if quantizer is None:
        return
    if _is_gguf(quantizer) and first_quantized(text_model) is None:
        # The GGUF loader also marks a model as quantized if it has unpacked the weights.
        quantizer.remove_quantization_config(text_model)
        configs = [model.config, model.config.get_text_config()]
        for config in (*configs, *(part.config for part in text_model.modules() if isinstance(part, PreTrainedModel))):
            for name in ("quantization_config", "_is_quantized"):
                vars(config).pop(name, None)
        return
    quantizer = copy.copy(quantizer)
    field = _skip_field(quantizer.quantization_config)
    if field is not None:
        blocks = {id(part) for block in cross_attention_blocks(text_model) for part in block.modules()}
        linear = ((n, m) for n, m in text_model.named_modules() if isinstance(m, (nn.Linear, Conv1D)))
        left_alone = (n for n, m in linear if id(m) not in blocks and not is_quantized(m.weight))
        skipped = [*(TEXT + re.escape(name) for name in left_alone), *KEPT]
        quantizer.quantization_config = _with_skips(quantizer.quantization_config, field, skipped)
        quantizer.modules_to_not_convert = skipped
    _give(quantizer, text_model, model)


def return_quantizer(model: PreTrainedModel, text_model: PreTrainedModel) -> None:
    """Gives the quantizer of a model to the text model inside it. This is the reverse of [`adopt_quantizer`]."""
    quantizer = copy.copy(getattr(model, "hf_quantizer", None))
    if quantizer is None:
        return
    if _skip_field(quantizer.quantization_config) is not None:
        quantizer.quantization_config = quantization_of_text(quantizer.quantization_config)
    _give(quantizer, model, text_model)


def _give(quantizer: Any, source: PreTrainedModel, model: Any) -> None:
    """Gives a quantizer, which is that of `source` with another list of layers, to a model."""
    model.config.quantization_config = quantizer.quantization_config
    share_quantizer(source, model)
    model.hf_quantizer = quantizer


def _is_gguf(quantizer: Any) -> bool:
    return quantizer.quantization_config.quant_method == QuantizationMethod.GGUF


def share_quantizer(source: PreTrainedModel, model: PreTrainedModel) -> None:
    """Marks `model` as transformers has marked the model `source`, if that is quantized.

    `is_quantized` stays False: `Trainer` would refuse to train it without PEFT, but here the blocks can be trained.
    """
    for name in MARKS:
        if name in source.__dict__:
            setattr(model, name, source.__dict__[name])


def finish_quantized(model: PreTrainedModel) -> None:
    """Corrects the marks by which transformers knows a quantized model, after such a model was loaded."""
    if getattr(model, "hf_quantizer", None) is None:
        return
    setattr(model, "is_quantized", False)  # noqa: B010  # see `share_quantizer`
    body: Any = model.base_model
    if body is not model:
        share_quantizer(model, body)


def check_requantizable(model: PreTrainedModel) -> None:
    """Checks that loading can quantize the text model in the same way, and that nothing else is quantized.

    Raises:
        ValueError: for weights that were quantized by hand, for quantized weights in a vision tower or a block, and for
            a quantizer without a list of layers to leave alone.
    """
    quantizer: Any = getattr(model, "hf_quantizer", None)
    body: Any = model.base_model
    if body.vision_tower is not None and (name := first_quantized(body.vision_tower)):
        raise ValueError(
            f"The vision tower is quantized ({name}), and a saved model has one quantization, that of its text model. "
            f"{PRECISE_TOWER}"
        )
    added = [(f"block {block.layer_idx}", block) for block in cross_attention_blocks(body)]
    for part, module in [*added, ("the connector", body.connector or nn.Identity())]:
        if name := first_quantized(module):
            raise ValueError(
                f"The weights of {part} are quantized ({name}). Only those of the text model can be saved so. "
                f"{PRECISE_TEXT}"
            )
    quantized = first_quantized(body.text_model)
    if quantized is None:
        return
    if quantizer is None:
        raise ValueError(
            f"This model holds weights that were quantized without a quantizer of transformers ({quantized}), so its "
            f"configuration cannot say how to load them. {PRECISE_TEXT}"
        )
    field = _skip_field(quantizer.quantization_config)
    if _is_gguf(quantizer):
        raise ValueError(
            f"This model holds packed weights of a GGUF file ({quantized}), which transformers cannot save. Load the "
            "file with `retrofit`, or with `quantization_config=GgufConfig(dequantize=True)`: both unpack them."
        )
    if field is None:
        raise ValueError(
            f"{type(quantizer.quantization_config).__name__} has no list of layers to leave alone, so loading would "
            f"quantize the blocks too. {PRECISE_TEXT}"
        )
    skipped = getattr(quantizer.quantization_config, field) or []
    for name, weight in body.named_parameters():
        if is_quantized(weight) and not should_convert_module(name.rpartition(".")[0], skipped):
            raise ValueError(
                f"{name} is quantized, but the quantizer's configuration leaves it alone, so loading would too. "
                f"{PRECISE_TEXT}"
            )


def quantization_of_text(quantization_config: QuantizationConfigMixin) -> QuantizationConfigMixin:
    """Returns the configuration of the quantizer for the text model alone, from that for the whole model."""
    field: Any = _skip_field(quantization_config)
    names = getattr(quantization_config, field) or []
    return _with_skips(quantization_config, field, [name.removeprefix(TEXT) for name in names if name not in KEPT])


@contextlib.contextmanager
def without_quantizer(model: PreTrainedModel, keeps_config: bool) -> Iterator[None]:
    """Context in which a model is saved as if it was not quantized: transformers writes the weights that it is given.

    Args:
        keeps_config (`bool`): whether the saved configuration still names the quantization.
    """
    held: Any = model
    config: Any = model.config
    quantizer, quantization_config = getattr(model, "hf_quantizer", None), getattr(config, "quantization_config", None)
    if quantizer is None:
        yield
        return
    held.hf_quantizer = None
    if not keeps_config:
        del config.quantization_config
    try:
        yield
    finally:
        held.hf_quantizer, config.quantization_config = quantizer, quantization_config


def _skip_field(quantization_config: Any) -> str | None:
    return next((name for name in SKIP_FIELDS if hasattr(quantization_config, name)), None)


def _with_skips(quantization_config: Any, field: str, skipped: list[str]) -> Any:
    quantization_config = copy.copy(quantization_config)
    setattr(quantization_config, field, skipped)
    return quantization_config
