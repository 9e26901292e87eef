"""The weights of a model's text half against those of its base, tensor by tensor, and its logits for text alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from ..checkpoints.adapter_saving import equal_bits, scales_are_close
from ..checkpoints.adapters import weights_of, without_ties
from ..checkpoints.bases import load_text, text_config_of
from ..checkpoints.gguf_files import split_gguf
from ..checkpoints.own_parts import adapter_layers
from ..decoders.decoder import find_decoder
from ..decoders.insertion import BLOCKS
from ..decoders.quantization import quantization_of_text
from ..utils.quantized_weights import first_quantized, is_quantized
from .inputs import random_text
from .results import BROKEN, HOLDS, Result, largest_difference, listed, number


ADDED = (*BLOCKS, "additional")  # parts of the text half that no base has


def load_base(model: Any, name: str, saved: torch.dtype | None = None) -> PreTrainedModel:
    """Loads a base in the dtype and with the quantization of a model's text half. Errors as those of `retrofit`.

    `saved` is the dtype of the model's file, if it was loaded in another one.
    """
    text = model.base_model.text_model
    # From float32, all weights of the file come back as they are.
    first = saved if saved is not None and text.dtype == torch.float32 else text.dtype
    options: dict[str, Any] = {"dtype": first}
    if text.is_remote_code():
        options["trust_remote_code"] = True
    source, where = split_gguf("--base", name, {})
    config = text_config_of(source, {**options, **where})
    if config.model_type != text.config.model_type:
        raise ValueError(
            f"Expected `--base` to be a {text.config.model_type!r} model, as the text half of this model, got {name}, "
            f"a {config.model_type!r} model."
        )
    if first_quantized(text) is not None and getattr(config, "quantization_config", None) is None:
        options["quantization_config"] = quantization_of_text(model.hf_quantizer.quantization_config)
        options["device_map"] = {"": text.device}
    base = load_text(source, **options, **where).eval()
    if first != text.dtype and first_quantized(base) is None:
        base = base.float()
    return base if "device_map" in options or base.device == text.device else base.to(text.device)


def check_weights(model: Any, base: PreTrainedModel) -> Result:
    """Base weights untouched: each tensor of the base is in the text half, bit for bit."""
    differing, scales, total = _compare(model.base_model.text_model, base)
    if differing:
        line = f"{len(differing)} of {total} tensors differ: {listed(differing)}"
        return Result("base-weights", BROKEN, line, len(differing), 0)
    rounded = f", {scales} of them scales of quantized weights, equal to rounding" if scales else ""
    return Result("base-weights", HOLDS, f"0 of {total} tensors differ, bit for bit{rounded}", 0, 0)


def _compare(text: PreTrainedModel, base: PreTrainedModel) -> tuple[list[str], int, int]:
    """Returns what differs, in words; how many scales are equal but for rounding; how many tensors were compared."""
    weights = {name: tensor for name, tensor in text.state_dict().items() if not set(name.split(".")) & set(ADDED)}
    once, theirs = without_ties(weights, text), weights_of(base)
    tied = {_without_adapter(name): tensor for name, tensor in weights.items() if not _of_adapter(name)}
    ours = {_without_adapter(name): tensor for name, tensor in once.items() if not _of_adapter(name)}
    differing, scales = [], 0
    for name, expected in theirs.items():
        mine = ours.get(name, tied.get(name))
        if mine is None:
            differing.append(f"{name} (missing)")
        elif mine.shape != expected.shape and not is_quantized(mine):
            differing.append(f"{name} (shape {tuple(mine.shape)}, not {tuple(expected.shape)})")
        elif not equal_bits(mine, expected):
            if _is_scale(name, theirs) and mine.is_floating_point() and scales_are_close(mine, expected):
                scales += 1
            elif is_quantized(mine) or is_quantized(expected):
                differing.append(name)
            else:
                differing.append(f"{name} (by {number(largest_difference(mine, expected.to(mine.dtype)))})")
    differing += [f"{name} (not in the base)" for name in ours if name not in theirs and name not in base.state_dict()]
    adapted = (name for name, _ in adapter_layers(text) if not set(name.split(".")) & set(ADDED))
    differing += [f"{name} (LoRA or another adapter)" for name in adapted]
    return differing, scales, len(theirs)


def _without_adapter(name: str) -> str:
    """The name of a weight before PEFT put a layer of an adapter around it."""
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def _of_adapter(name: str) -> bool:
    return any(part.startswith("lora_") or part == "modules_to_save" for part in name.split("."))


def _is_scale(name: str, weights: dict[str, torch.Tensor]) -> bool:
    """Whether a tensor belongs to a 4-bit weight. bitsandbytes rounds these when it computes on a CPU."""
    weight, found, _ = name.rpartition(".weight.")
    is_real = weights[name].is_floating_point()
    return bool(found) and is_real and is_quantized(weights.get(f"{weight}.weight", torch.empty(0)))


@torch.no_grad()
def check_text_only(model: Any, base: PreTrainedModel | None) -> Result:
    """Text without images: the logits are those of the base, or of the text half without its blocks, bit for bit."""
    ids = random_text(model)
    ours = model(ids, use_cache=True).logits
    if base is not None:
        share_weights(base, model.base_model.text_model)
        theirs, of = base(ids, use_cache=True).logits, "the base"
    else:
        text = model.base_model.text_model
        with without_blocks(text):
            theirs, of = text(ids, use_cache=True).logits, "its own text half without the blocks (no --base)"
    if not bool(ours.isfinite().any()) or bool(ours.isnan().any()):
        return Result("text-only", BROKEN, "the logits are not finite", float("inf"), 0.0)
    apart = largest_difference(ours[..., : theirs.shape[-1]], theirs)
    line = f"largest difference of logits {number(apart)}, allowed 0: {ids.numel()} tokens against {of}"
    return Result("text-only", HOLDS if apart == 0 else BROKEN, line, apart, 0.0)


@contextlib.contextmanager
def without_blocks(text: PreTrainedModel) -> Iterator[None]:
    """Inside, the decoder's layers have no blocks."""
    taken = [(layer, place, layer._modules.pop(place, None)) for layer in find_decoder(text)[1] for place in BLOCKS]
    try:
        yield
    finally:
        for layer, place, block in taken:
            if block is not None:
                setattr(layer, place, block)


def share_weights(base: PreTrainedModel, text: PreTrainedModel) -> None:
    """Lets a base compute with the equal tensors of a model: kernels round by where a tensor lies in memory."""
    ours = {_without_adapter(name): parameter for name, parameter in text.named_parameters(remove_duplicate=False)}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        mine = ours.get(name)
        if mine is None or is_quantized(mine) or is_quantized(parameter) or mine.dtype != parameter.dtype:
            continue
        if equal_bits(mine.data, parameter.data):
            parameter.data = mine.data
