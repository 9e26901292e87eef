"""Small checkpoints (`adapter_only=True`): what was added to the bases of a model, without the bases.

A folder holds blocks, connector, added vocabulary, and every weight of the text model or the vision tower that differs
from its base. Saving loads the bases again and compares every weight, so bases and folder give the whole model, bit for
bit. The manifest (`cross_attention.json`) names the bases with their commits and holds a fingerprint of their weights.
Loading compares each base with its fingerprint and puts the weights of the folder in place of those of the base. If the
text model was quantized while it was loaded, the manifest also holds the configuration of the quantizer, and loading
quantizes the base again.

The manifest is written last, so a folder whose save was cut off is not loaded.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.integrations.accelerate import load_offloaded_parameter
from transformers.modeling_utils import local_torch_dtype, remove_tied_weights_from_state_dict
from transformers.utils import logging

from ..configuration_xattn import XAttnConfig
from ..utils.checkpoint_files import CARD, read_headers, read_json, short
from ..utils.distributed import saved_by_one
from ..utils.keywords import CONFIG_KEYWORDS, FILE_KEYWORDS, HUB_KEYWORDS, LOAD_KEYWORDS, given
from ..utils.tensor_checks import first_quantized, is_quantized, plain_tensors
from ..utils.whole_folder import whole_folder
from ..version import __version__
from .bases import BaseSource, base_of, load_text, load_vision, named_base
from .folders import MANIFEST, WEIGHTS, check_target, find_file, find_manifest, name_of_dtype, weight_files_of
from .model_identity import checksum, digest_of, line_of
from .own_parts import SAVE_OR_MERGE, differing_settings, refuse_adapter_layers
from .quantization import check_requantizable, quantization_of_text, without_quantizer


logger = logging.get_logger(__name__)

Made = TypeVar("Made", bound=PreTrainedModel)

# For each part: its name, the argument that names its base, and the function that loads the base.
PARTS: tuple[tuple[str, str, Callable[..., PreTrainedModel]], ...] = (
    ("text_model", "text_base", load_text),
    ("vision_tower", "vision_base", load_vision),
)
FORMATS = (1, 2)  # formats of the manifest that are read; the last one is written. The first also has digests of files
OF_PEFT = ("adapter_kwargs", "adapter_name")  # keywords of `from_pretrained` for an adapter (PEFT) on the model


@dataclass(frozen=True)
class SmallCheckpoint:
    """A folder or repository that `adapter_only=True` has saved. (An adapter of PEFT is something else.)"""

    name: str  # its folder or Hub id
    manifest: dict[str, Any]  # the content of the file
    hub: dict[str, Any]  # keyword arguments that say where its files are

    @classmethod
    def find(cls, name: str | os.PathLike[str], load_kwargs: dict[str, Any]) -> SmallCheckpoint | None:
        """Reads the manifest of a checkpoint. Returns None for a checkpoint without one.

        Raises:
            ValueError: for a manifest that is no JSON, or that a later version of this package has written.
        """
        path = find_manifest(name, load_kwargs)
        if path is None:
            return None
        manifest = read_json(path)
        if manifest.get("format") not in FORMATS:
            raise ValueError(
                f"{path} has format {short(manifest.get('format'))}, and this version of hf_xattn reads the formats up "
                f"to {FORMATS[-1]}. Update hf_xattn."
            )
        return cls(os.fspath(name), manifest, given(FILE_KEYWORDS, load_kwargs))

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a file."""
        return find_file(self.name, name, self.hub) is not None

    def recorded_base(self, argument: str) -> BaseSource | None:
        """Returns the base that the manifest names for `text_base` or `vision_base`; None if the model has none."""
        record = self.manifest.get(argument)
        return None if record is None else BaseSource.of_record(record)

    def added(self) -> dict[str, torch.Tensor]:
        """Returns the weights in the checkpoint. Raises a `ValueError` for a file that is missing or cut off."""
        weights: dict[str, torch.Tensor] = {}
        for name in self.manifest["files"]:
            if name.endswith(".safetensors"):
                path = find_file(self.name, name, self.hub)
                if path is None:
                    raise ValueError(f"{self.name} lacks {name}, which its {MANIFEST} names. Copy the folder again.")
                read_headers([path], {}, where=self.name)  # raises an error for a damaged file
                weights.update(load_file(path))
        return weights

    def identity(self) -> str:
        """SHA-256 of the weights in the checkpoint and of its configuration."""
        config = find_file(self.name, "config.json", self.hub)
        return digest_of("" if config is None else config.read_text("utf-8"), fingerprint(self.added()))

    def load_kwargs(
        self, config: PreTrainedConfig | str | os.PathLike[str] | None, asked: dict[str, Any]
    ) -> dict[str, Any]:
        """Returns the keyword arguments of `from_pretrained` that load the whole model. `asked` are the caller's."""
        named = {argument: named_base(argument, asked.pop(argument, None)) for _, argument, _ in PARTS}
        apart = {name: asked.pop(name) for name in tuple(asked) if name in LOAD_KEYWORDS | {"output_loading_info"}}
        for name in ("_from_auto", "_from_pipeline", "_commit_hash"):
            asked.pop(name, None)
        rest: dict[str, Any] = asked
        if not isinstance(config, XAttnConfig):
            source = self.name if config is None else config
            kernels = {name: apart[name] for name in ("attn_implementation", "experts_implementation") if name in apart}
            config, rest = XAttnConfig.from_pretrained(
                source, return_unused_kwargs=True, **self.hub, **kernels, **asked
            )
        state: dict[str, torch.Tensor] = {}
        for _, argument, load in PARTS:
            state |= self._weights_of_base(argument, load, named[argument], config, apart)
        state |= self.added()
        apart["generation_config"] = apart.get("generation_config") or self._generation_config()
        kept = {name: value for name, value in apart.items() if name not in (*CONFIG_KEYWORDS, "adapter_kwargs")}
        return {**rest, **kept, "config": config, "state_dict": state}

    def _generation_config(self) -> GenerationConfig | None:
        return GenerationConfig.from_pretrained(self.name, **self.hub) if self.has("generation_config.json") else None

    def _weights_of_base(
        self, argument: str, load: Any, named: BaseSource | None, config: Any, load_kwargs: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Loads a base, and returns its weights under their names in the model.

        The place of the base is noted in `config`.
        """
        recorded, part = self.recorded_base(argument), getattr(config, argument.replace("_base", "_config"))
        if recorded is None:
            if named is not None:
                raise ValueError(f"`{argument}` ({named.name}): {self.name} was saved without one.")
            return {}
        if part is not None:
            (named or recorded).note_in(part)  # so that the model can be saved with `adapter_only=True` again
        base = self.base(argument, load, named, given((*HUB_KEYWORDS, "trust_remote_code"), load_kwargs))
        return {self.manifest[argument]["prefix"] + name: tensor for name, tensor in self.kept(argument, base).items()}

    def base(
        self, argument: str, load: Callable[..., PreTrainedModel], named: BaseSource | None, hub: dict[str, Any]
    ) -> PreTrainedModel:
        """Loads a base. Raises a `ValueError` if it is not the one that the model was saved with."""
        record, source = self.manifest[argument], named or BaseSource.of_record(self.manifest[argument])
        source.check_there(f"{self.name} was saved without the weights of its base", argument)
        try:
            base = source.load(load, dtype=getattr(torch, record["dtype"]), **hub)
        except OSError as error:
            raise OSError(
                f"{self.name} was saved without the weights of its base {source}, which cannot be loaded: {error} Pass "
                f"`{argument}=` to `from_pretrained`, the Hub id or folder of that base."
            ) from error
        if fingerprint(weights_of(base)) != record["fingerprint"]:
            raise self._another_base(argument, source.name, "its weights")
        return base

    def kept(self, argument: str, base: PreTrainedModel) -> dict[str, torch.Tensor]:
        """Returns the weights of a base that the model shares, in the dtypes of the model."""
        record, weights = self.manifest[argument], weights_of(base)
        for name, dtype in record["dtypes"].items():
            weights[name] = weights[name].to(getattr(torch, dtype))
        return {name: tensor for name, tensor in weights.items() if name not in record["absent"]}

    def _another_base(self, argument: str, name: str, what: str) -> ValueError:
        record = self.manifest[argument]
        revision = "" if record["revision"] is None else f", revision {record['revision']}"
        return ValueError(
            f"{self.name} was saved on the base {record['name_or_path']}{revision}, and `{argument}` {name} is another "
            f"one: {what} differ, so the model would answer differently. Pass `{argument}=`, the Hub id or folder of "
            "that base."
        )

    def onto(
        self,
        model_class: type[Made],
        text: PreTrainedModel,
        config: PreTrainedConfig | str | os.PathLike[str] | None,
        asked: dict[str, Any],
    ) -> Made:
        """Puts the checkpoint onto a loaded text model, which then contains the blocks.

        All new parts get the device and the dtype of the text model.

        Args:
            model_class: class of the model to return.
            text: the text model.
            config: configuration of the model, or the name of one; by default that of the checkpoint.
            asked: the keyword arguments of `from_pretrained`.

        Raises:
            ValueError: for keyword arguments that are about loading a text model, for a text model that is not the base
                of the checkpoint, and for a checkpoint that changes weights of its text model.
        """
        named = named_base("vision_base", asked.pop("vision_base", None))
        for name, value in asked.items():
            if name not in (*CONFIG_KEYWORDS, *OF_PEFT) and name[0] != "_" and value is not None:
                raise ValueError(
                    f"`from_pretrained` does not take `{name}` beside a `text_base` that is loaded already, got "
                    f"{short(value)}. Change the text model before the call, or the model after it."
                )
        if not isinstance(config, XAttnConfig):
            config = XAttnConfig.from_pretrained(self.name if config is None else config, **self.hub)
        prefix, weights = self.manifest["text_base"]["prefix"], self.added()
        own = {prefix + name for name in tensors_of(text)}
        if self.manifest["text_base"]["absent"] or own.intersection(weights):
            raise ValueError(
                f"{self.name} changes weights of its text model, so it cannot be put onto one that is loaded. Load it "
                "without `text_base`."
            )
        self._check_loaded(text, config.text_config)
        config.text_config = text.config
        for part in (config, *(getattr(config, name) for name in config.sub_configs)):
            if part is not None:
                part.dtype = text.dtype
        weights = self._weights_of_base("vision_base", load_vision, named, config, asked) | weights
        model: Any
        with local_torch_dtype(text.dtype), text.device:
            model = model_class(config, text_model=text)
        start = prefix.removesuffix("text_model.")
        result = model.base_model.load_state_dict({name.removeprefix(start): weights[name] for name in weights}, False)
        missing = {start + name for name in result.missing_keys}.difference(own)
        model._lacking = missing, set(result.unexpected_keys)
        model.generation_config = self._generation_config() or model.generation_config
        return model.eval()

    def _check_loaded(self, text: PreTrainedModel, config: Any) -> None:
        """Raises a `ValueError` if a loaded text model has other weights or settings than the base."""
        refuse_adapter_layers(text, "`from_pretrained` cannot put blocks into", "Merge the adapter, or delete it.")
        if any(weight.is_meta for weight in text.parameters()):
            raise ValueError("`text_base`: the weights of the text model are offloaded. Load it without a device map.")
        record, source, quantized = self.manifest["text_base"], base_of(text.config), first_quantized(text) is not None
        name = type(text).__name__ if source is None else source.name
        if differing := differing_settings(config, text.config):
            raise self._another_base("text_base", name, f"`{'`, `'.join(differing[:3])}`")
        if not quantized and record["dtype"] == name_of_dtype(text.dtype):
            if fingerprint(without_ties(tensors_of(text), text)) != record["fingerprint"]:
                raise self._another_base("text_base", name, "its weights")
        elif source is None or (source.name, source.revision) != (record["name_or_path"], record["revision"]):
            logger.warning(
                f"{self.name} was saved on a base in {record['dtype']}, and the text model is "
                f"{'quantized' if quantized else f'in {text.dtype}'}, so whether it is the base "
                f"{record['name_or_path']} was not checked."
            )


def save_small(
    model: PreTrainedModel,
    target: Path,
    bases: dict[str, Any],
    with_code: bool,
    state_dict: dict[str, torch.Tensor] | None,
    options: dict[str, Any],
) -> None:
    """Saves what the bases of a model do not hold.

    Args:
        bases (`dict`): `text_base` and `vision_base`, as far as the caller names them.
        with_code (`bool`): write the code of this package, too.
        state_dict (`dict`, *optional*): all weights of the model, if they are gathered already.
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
        names = {name.replace("_fsdp_wrapped_module.", "") for name in tensors_of(model, remove_duplicate=True)}
        if lacking := sorted(names.difference(state_dict)):
            raise ValueError(
                f"`adapter_only=True`: expected all weights of the model in `state_dict`, but {len(lacking)} are "
                f"missing, such as {lacking[0]}. Pass all: those that the bases hold are left out of the folder."
            )
    state = without_ties(model.state_dict() if state_dict is None else state_dict, model)
    manifest: dict[str, Any] = {"format": FORMATS[-1], "hf_xattn": __version__}
    requantized = False
    for name, argument, load in PARTS:
        if name in sources:
            manifest[argument], again = _take_base_out_of(state, model, name, sources[name].resolved(), load)
            requantized = requantized or again
    held: Any = model
    if requantized:
        config = held.hf_quantizer.quantization_config
        manifest["quantization_config"] = json.loads(config.to_json_string(use_diff=False))
    added = {name: _whole(model, name, tensor) for name, tensor in state.items()}
    with whole_folder(target, weight_files_of) as fresh:
        if (target / CARD).is_file():  # written anew only if no person has changed it
            shutil.copy2(target / CARD, fresh / CARD)
        # Loading puts these weights in place of those of a base in memory, so they are saved under the names in memory.
        options = {**options, "state_dict": added, "save_original_format": False}
        with without_quantizer(model, keeps_config=not requantized), saved_by_one(model):
            held._write(fresh, with_code, options, target)
        for path in sorted(fresh.glob("model*.safetensors")):
            path.rename(fresh / path.name.replace("model", WEIGHTS, 1))
        for path in fresh.glob("model.safetensors.index*.json"):
            path.unlink()  # the manifest names the files
        manifest["files"] = sorted(path.name for path in fresh.glob("*.safetensors"))
        (fresh / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def check_bases(model: PreTrainedModel, bases: dict[str, Any] | None = None) -> dict[str, BaseSource]:
    """Returns the bases of a model, by part. Raises the errors of [`save_small`], before any work is done."""
    bases = bases or {}
    body: Any = model.base_model
    sources = {}
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
        source.check_there(f"`adapter_only=True`: the base of the {name} is", argument)
        sources[name] = source
    return sources


def _take_base_out_of(
    state: dict[str, torch.Tensor], model: Any, name: str, source: BaseSource, load: Callable[..., PreTrainedModel]
) -> tuple[dict[str, Any], bool]:
    """Removes the weights that equal those of a base from `state`.

    Returns:
        the entry of the base in the manifest, and whether loading has to quantize the base again.
    """
    prefix = ("" if model.base_model is model else f"{model.base_model_prefix}.") + f"{name}."
    part = getattr(model.base_model, name)
    options = {"dtype": part.dtype, **({"trust_remote_code": True} if part.is_remote_code() else {})}
    base = source.load(load, **options)
    read = theirs = weights_of(base)
    # If the checkpoint of the base is not quantized itself, loading has to quantize the base again.
    requantized = first_quantized(part) is not None and getattr(base, "hf_quantizer", None) is None
    del base
    if requantized:
        options["quantization_config"] = quantization_of_text(model.hf_quantizer.quantization_config)
        theirs = weights_of(source.load(load, device_map={"": part.device}, **options))
    absent = [each for each in read if prefix + each not in state]
    dtypes: dict[str, str] = {}
    for each, weight in theirs.items():
        if prefix + each in state:
            ours = _whole(model, prefix + each, state[prefix + each])
            if equal_bits(ours, weight):
                del state[prefix + each]
                if each in read and not is_quantized(ours) and ours.dtype != weight.dtype:
                    dtypes[each] = name_of_dtype(ours.dtype)
    _take_scales_out_of(state, prefix, theirs)
    for each, weight in theirs.items():
        if prefix + each in state and (is_quantized(weight) or each not in read):
            raise ValueError(
                f"`adapter_only=True`: quantized weights of the {name} differ from its base {source}: {each}; merging "
                "an adapter does that. Save the whole model."
            )
    record = {**source.record(), "dtype": name_of_dtype(part.dtype), "prefix": prefix, "fingerprint": fingerprint(read)}
    return {**record, "absent": absent, "dtypes": dtypes}, requantized


def _take_scales_out_of(state: dict[str, torch.Tensor], prefix: str, theirs: dict[str, torch.Tensor]) -> None:
    """Removes the scales of 4-bit weights that equal those of the base. They may differ: on a CPU, bitsandbytes rounds
    the scales of a model that has run.
    """
    for name in [name for name in state if name.startswith(prefix) and ".weight." in name]:
        weight = name[: name.rindex(".weight.") + len(".weight")].removeprefix(prefix)
        if prefix + weight in state or not is_quantized(theirs.get(weight, torch.empty(0))):
            continue
        ours, scales = state[name], theirs.get(name.removeprefix(prefix))
        if scales is None or not (ours.is_floating_point() and scales.is_floating_point()) or _close(ours, scales):
            del state[name]


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether scales of a quantized weight are equal up to rounding to bfloat16, also if they are transposed."""
    orders = (ours.flatten(), ours.t().flatten()) if ours.dim() == 2 else (ours.flatten(),)
    expected = theirs.flatten().float().cpu()
    return ours.numel() == theirs.numel() and any(
        torch.allclose(order.float().cpu(), expected, rtol=2**-7, atol=0) for order in orders
    )


def _whole(model: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a weight that accelerate has offloaded as a tensor on the CPU, and any other weight as it is."""
    return load_offloaded_parameter(model, name) if tensor.is_meta else tensor


def equal_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two weights have equal bits in the dtype of `ours`. -0.0 and 0.0 differ, and NaN equals itself."""
    if ours.shape != theirs.shape or is_quantized(ours) != is_quantized(theirs):
        return False
    mine, others = plain_tensors(ours), plain_tensors(theirs)
    return len(mine) == len(others) and all(
        torch.equal(_bytes(one), _bytes(other.to(one.dtype))) for one, other in zip(mine, others)
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().flatten().contiguous().view(torch.uint8)


def weights_of(base: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns the weights of a model as they are saved: each tied weight once."""
    return without_ties(base.state_dict(), base)


def tensors_of(model: PreTrainedModel, remove_duplicate: bool = False) -> dict[str, torch.Tensor]:
    """Returns parameters and saved buffers by name.

    `state_dict` is not called, because with it bitsandbytes rounds the 4-bit weights on a CPU for good.
    """
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=remove_duplicate))
    for path, part in model.named_modules():
        for name, tensor in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                found[f"{path}.{name}" if path else name] = tensor
    return found


def without_ties(weights: dict[str, torch.Tensor], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns the weights of a model, each tied weight once. Weights of torchao's classes are never tied."""
    packed = {name for name, tensor in weights.items() if len(plain_tensors(tensor)) > 1}
    once = remove_tied_weights_from_state_dict({n: t for n, t in weights.items() if n not in packed}, model)
    return {name: once.get(name, tensor) for name, tensor in weights.items() if name in packed or name in once}


def fingerprint(weights: dict[str, torch.Tensor]) -> str:
    """Returns the SHA-256 of the names, dtypes, shapes and sums of weights."""
    lines = []
    for name, tensor in sorted(weights.items()):
        sums = ",".join(str(checksum(plain.detach())) for plain in plain_tensors(tensor))
        lines.append(line_of(name, tensor, sums) + "\n")
    return digest_of(*lines)
