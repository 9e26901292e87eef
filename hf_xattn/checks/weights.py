"""A model against its base and against itself after saving, tensor by tensor; its logits for text alone."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..checkpoints.adapter_saving import equal_bits, scales_are_close
from ..checkpoints.adapters import weights_of, without_ties
from ..checkpoints.bases import load_text, text_config_of
from ..checkpoints.gguf_files import split_gguf
from ..checkpoints.own_parts import adapter_layers
from ..checkpoints.quantization import quantization_of_text
from ..decoders.decoder import find_decoder
from ..decoders.insertion import BLOCKS
from ..utils.quantized_weights import first_quantized, is_quantized
from .measures import BROKEN, HOLDS, NOT_CHECKED, Result, largest_difference, listed, number, random_text


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
    again = base.state_dict()  # holds tied weights under each of their names
    for name in (name for name in ours if name not in theirs):
        if name not in again:
            differing.append(f"{name} (not in the base)")
        elif again[name].shape != ours[name].shape or not equal_bits(ours[name], again[name]):
            differing.append(f"{name} (tied in the base)")
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


# Fields of a configuration that say where a model is, or who wrote it.
OF_THE_FILE = "_name_or_path name_or_path transformers_version auto_map architectures dtype torch_dtype".split()


def check_files(model: Any, reload: Callable[[Path], Any], adapter_only: bool) -> Result:
    """A saved model loads again with the same weights, bit for bit, and the same configuration."""
    layer = next((name for name, _ in adapter_layers(model)), None)
    if layer is not None:
        line = f"an adapter (PEFT) is saved without its model: {layer} is a layer of one"
        return Result("save-load", NOT_CHECKED, line)
    what = "only what was added (adapter-only)" if adapter_only else "the whole model"
    with tempfile.TemporaryDirectory(prefix="hf-xattn-check-") as name:
        tensors = () if adapter_only else model.state_dict().values()
        needed, free = sum(tensor.nbytes for tensor in tensors), shutil.disk_usage(name).free
        if needed > 0.9 * free:
            return Result(
                "save-load",
                NOT_CHECKED,
                f"needs {needed / 2**30:.1f} GiB, {tempfile.gettempdir()} has {free / 2**30:.1f}. Set TMPDIR, or save "
                "only what was added: `--adapter-only`",
            )
        folder = Path(name)
        try:
            model.save_pretrained(folder, adapter_only=adapter_only)
        except (ValueError, OSError) as error:
            return Result("save-load", NOT_CHECKED, f"saving {what} was refused: {error}")
        saved = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        again = reload(folder)
        differing, total = _differences(model, again)
        del again
    if differing:
        line = f"saved {what}, {len(differing)} differ: {listed(differing)}"
        return Result("save-load", BROKEN, line, len(differing), 0)
    line = f"0 of {total} tensors differ, bit for bit: saved {what}, {saved / 2**20:.1f} MiB"
    return Result("save-load", HOLDS, line, 0, 0)


def _differences(model: Any, again: Any) -> tuple[list[str], int]:
    # After saving: bitsandbytes rounds and packs 4-bit scales when it saves weights that have computed on a CPU.
    ours, theirs = model.state_dict(), again.state_dict()
    differing = [f"{name} (missing)" for name in ours if name not in theirs]
    differing += [f"{name} (not in the model)" for name in theirs if name not in ours]
    for name in ours.keys() & theirs.keys():
        mine, other = ours[name], theirs[name]
        if not isinstance(mine, torch.Tensor):
            continue
        if mine.dtype != other.dtype:
            differing.append(f"{name} ({mine.dtype}, loaded as {other.dtype})")
        elif not equal_bits(mine, other):
            differing.append(name)
    before, after = _settings(model.config.to_dict()), _settings(again.config.to_dict())
    names = before.keys() | after.keys()
    differing += [f"config.{name}" for name in names if before.get(name) != after.get(name)]
    return sorted(differing), len(ours)


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a configuration without those about files."""
    return {
        str(name): _settings(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in OF_THE_FILE and not str(name).startswith("base_")
    }
