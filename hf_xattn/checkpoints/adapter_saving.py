"""Saves what the bases of a model do not hold (`adapter_only=True`), as `adapters.py` describes it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.accelerate import load_offloaded_parameter

from ..utils.checkpoint_files import CARD, sha256_of
from ..utils.distributed import saved_by_one
from ..utils.quantized_weights import first_quantized, is_quantized, plain_tensors
from ..utils.whole_folder import WholeFolder
from ..version import __version__
from .adapters import FORMAT, PARTS, digest_of_shapes, fingerprint, weights_of, without_ties
from .bases import BaseSource, base_of, named_base
from .folders import MANIFEST, WEIGHTS, check_target, weight_files_of
from .own_parts import SAVE_OR_MERGE, refuse_adapter_layers
from .quantization import check_requantizable, quantization_of_text, without_quantizer


def save_adapter(
    model: Any,
    target: Path,
    bases: dict[str, Any],
    with_code: bool,
    state_dict: dict[str, torch.Tensor] | None,
    options: dict[str, Any],
) -> None:
    """Saves what the bases of a model do not hold.

    Args:
        bases (`dict`): `text_base` and `vision_base`, where the caller names them.
        state_dict (`dict`, *optional*): all weights of the model, where they are gathered already.
        options (`dict`): the other keyword arguments of `PreTrainedModel.save_pretrained`.

    Raises:
        TypeError: for a `text_base` or `vision_base` that is no name.
        ValueError: for a base without a name or a checkpoint, a base whose quantization cannot be repeated, a model
            with LoRA layers, a `state_dict` with gaps, and a folder that holds a whole model, a base or an adapter
            (PEFT).
    """
    check_target(target)
    sources = check_bases(model, bases)
    for source in sources.values():
        if source.gguf_file is None and target.is_dir() and target.resolve() == Path(source.folder).resolve():
            raise ValueError(
                f"`adapter_only=True`: {target} is the folder of the base, whose configuration would be lost. Choose "
                "another folder."
            )
    if state_dict is not None:
        _check_complete(model, state_dict)
    state = without_ties(model.state_dict() if state_dict is None else state_dict, model)
    records: dict[str, Any] = {}
    requantized = False
    for name, argument, load in PARTS:
        if name in sources:
            comparison = _Comparison(model, name, sources[name].resolved(), load)
            records[argument] = comparison.take_out_of(state)
            requantized = requantized or comparison.requantized
    if requantized:
        config = model.hf_quantizer.quantization_config
        records["quantization_config"] = json.loads(config.to_json_string(use_diff=False))
    added = {name: _whole(model, name, tensor) for name, tensor in state.items()}
    with WholeFolder(target, weight_files_of) as fresh:
        if (target / CARD).is_file():  # written anew only if no person has changed it
            shutil.copy2(target / CARD, fresh / CARD)
        # Loading lays them over the weights of a base in memory, so they keep the names that they have there.
        options = {**options, "state_dict": added, "save_original_format": False}
        with without_quantizer(model, keeps_config=not requantized), saved_by_one(model):
            model._write(fresh, with_code, options, target, small=True)
        for path in sorted(fresh.glob("model*.safetensors")):
            path.rename(fresh / path.name.replace("model", WEIGHTS, 1))
        for path in fresh.glob("model.safetensors.index*.json"):
            path.unlink()  # the manifest names the files
        files = {
            str(path.relative_to(fresh)): {"sha256": sha256_of(path), "bytes": path.stat().st_size}
            for path in sorted(fresh.rglob("*"))
            if path.is_file() and path.name != CARD  # a person may edit the card
        }
        manifest = {"format": FORMAT, "hf_xattn": __version__, **records, "files": files}
        (fresh / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def check_bases(model: Any, bases: dict[str, Any] | None = None) -> dict[str, BaseSource]:
    """Finds the bases of a model, before work is lost on one without them. Errors as [`save_adapter`]."""
    bases = bases or {}
    body, sources = model.base_model, {}
    refuse_adapter_layers(body, "`adapter_only=True` cannot save", SAVE_OR_MERGE)
    check_requantizable(model)
    for name, argument, _ in PARTS:
        part = getattr(body, name)
        named = named_base(argument, bases.get(argument))
        if part is None:
            if named is not None:
                raise ValueError(f"`{argument}` ({named}): this model has no {name}.")
            continue
        source = base_of(part.config) if named is None else named
        if source is None:
            raise ValueError(
                f"`adapter_only=True`: the {name} was not loaded from a checkpoint, so it cannot be fetched again. "
                f"Save it to a folder and pass `{argument}=`, the Hub id or folder of its weights."
            )
        if source.is_gone():
            raise ValueError(
                f"`adapter_only=True`: the {name} was loaded from {source}, where there is no {source.kind} now. Pass "
                f"`{argument}=`, its Hub id or folder."
            )
        sources[name] = source
    return sources


class _Comparison:
    """Compares a part of a model with its base. `load` is [`load_text`] or [`load_vision`]."""

    def __init__(self, model: Any, name: str, source: BaseSource, load: Callable[..., PreTrainedModel]):
        self.model, self.name, self.source = model, name, source
        self.prefix = ("" if model.base_model is model else f"{model.base_model_prefix}.") + f"{name}."
        self.part: PreTrainedModel = getattr(model.base_model, name)
        options: dict[str, Any] = {"dtype": self.part.dtype}
        if self.part.is_remote_code():
            options["trust_remote_code"] = True
        base = source.load(load, **options)
        self.base = weights_of(base)
        self.theirs = self.base
        quantized = first_quantized(self.part) is not None
        # A checkpoint may be quantized itself. Loading quantizes any other base again.
        self.requantized = quantized and getattr(base, "hf_quantizer", None) is None
        del base
        if self.requantized:
            options["quantization_config"] = quantization_of_text(model.hf_quantizer.quantization_config)
            self.theirs = weights_of(source.load(load, device_map={"": self.part.device}, **options))

    def take_out_of(self, state: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Takes the weights that equal the base's out of `state`. Returns the manifest's entry of the base."""
        absent = [name for name in self.base if self.prefix + name not in state]
        dtypes: dict[str, str] = {}
        for name, theirs in self.theirs.items():
            if self.prefix + name not in state:
                continue
            ours = _whole(self.model, self.prefix + name, state[self.prefix + name])
            if equal_bits(ours, theirs):
                del state[self.prefix + name]
                if name in self.base and not is_quantized(ours) and ours.dtype != theirs.dtype:
                    dtypes[name] = str(ours.dtype).removeprefix("torch.")
        self._take_scales_out_of(state)
        changed = [
            name
            for name, theirs in self.theirs.items()
            if self.prefix + name in state and (is_quantized(theirs) or name not in self.base)
        ]
        if changed:
            raise ValueError(
                f"`adapter_only=True`: quantized weights of the {self.name} differ from its base {self.source}: "
                f"{changed[0]}; merging an adapter does that. Save the whole model."
            )
        return {
            **self.source.record(),
            "dtype": str(self.part.dtype).removeprefix("torch."),
            "prefix": self.prefix,
            "shapes": digest_of_shapes(self.base),
            "fingerprint": fingerprint(self.base),
            "absent": absent,
            "dtypes": dtypes,
        }

    def _take_scales_out_of(self, state: dict[str, torch.Tensor]) -> None:
        """Those of equal 4-bit weights. bitsandbytes rounds them when it runs on a CPU."""
        for name in [name for name in state if name.startswith(self.prefix) and ".weight." in name]:
            weight = name[: name.rindex(".weight.") + len(".weight")].removeprefix(self.prefix)
            if self.prefix + weight in state or not is_quantized(self.theirs.get(weight, torch.empty(0))):
                continue
            ours, theirs = state[name], self.theirs.get(name.removeprefix(self.prefix))
            if theirs is not None and ours.is_floating_point() and theirs.is_floating_point():
                if not scales_are_close(ours, theirs):
                    continue
            del state[name]


def _check_complete(model: Any, state_dict: dict[str, torch.Tensor]) -> None:
    names = {name for name, _ in model.named_parameters()}
    for path, part in model.named_modules():
        kept = part._buffers.keys() - part._non_persistent_buffers_set
        names |= {f"{path}.{name}".lstrip(".") for name in kept if part._buffers[name] is not None}
    lacking = sorted({name.replace("_fsdp_wrapped_module.", "") for name in names}.difference(state_dict))
    if lacking:
        raise ValueError(
            f"`adapter_only=True`: expected all weights of the model in `state_dict`, but {len(lacking)} are missing, "
            f"such as {lacking[0]}. What the bases hold is left out by itself."
        )


def _whole(model: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A weight that accelerate has offloaded, as a tensor on a CPU; others as they are."""
    return load_offloaded_parameter(model, name) if tensor.is_meta else tensor


def equal_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Bit for bit, in the dtype of `ours`: -0.0 and 0.0 differ, and NaN equals itself."""
    if ours.shape != theirs.shape or is_quantized(ours) != is_quantized(theirs):
        return False
    mine, others = plain_tensors(ours), plain_tensors(theirs)
    return len(mine) == len(others) and all(map(_equal_plain, mine, others))


def _equal_plain(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    ours, theirs = ours.cpu(), theirs.to(ours.dtype).cpu()
    if ours.is_floating_point():
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.element_size()]
        ours, theirs = ours.contiguous().view(integers), theirs.contiguous().view(integers)
    return torch.equal(ours, theirs)


def scales_are_close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether floating-point scales of a quantized weight are equal but for rounding to bfloat16, in either order."""
    orders = (ours.flatten(), ours.t().flatten()) if ours.dim() == 2 else (ours.flatten(),)
    expected = theirs.flatten().float().cpu()
    return ours.numel() == theirs.numel() and any(
        torch.allclose(order.float().cpu(), expected, rtol=2**-7, atol=0) for order in orders
    )
