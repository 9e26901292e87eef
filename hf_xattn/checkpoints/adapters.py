"""Loads checkpoints that hold only what was added to a base (`adapter_saving.py` writes them).

Such a folder holds blocks, connector, added vocabulary, and every weight of the text model or the vision tower that
differs from its base. Saving compares every weight, so bases and folder give the whole model, bit for bit.

The manifest names the bases with their commits, a fingerprint of their weights, and the SHA-256 of each file. It is
written last: a folder without a manifest is not loaded. If the text model was quantized while it was loaded, the
manifest holds the quantizer's configuration, and loading quantizes the base again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import GenerationConfig, PreTrainedModel
from transformers.modeling_utils import local_torch_dtype, remove_tied_weights_from_state_dict
from transformers.utils import logging

from ..configuration_xattn import XAttnConfig
from ..utils.checkpoint_files import check_name, read_headers, read_json, sha256_of, short
from ..utils.keywords import CONFIG_KEYWORDS, FILE_KEYWORDS, HUB_KEYWORDS, LOAD_KEYWORDS, given
from ..utils.quantized_weights import first_quantized, plain_tensors, shape_before
from .bases import BaseSource, base_of, load_text, load_vision, named_base
from .folders import MANIFEST, find_file, find_manifest
from .model_identity import checksum, digest_of, line_of
from .own_parts import refuse_adapter_layers


logger = logging.get_logger(__name__)

# Name of the part, its argument of `save_pretrained` and `from_pretrained`, and the function that loads it.
PARTS: tuple[tuple[str, str, Callable[..., PreTrainedModel]], ...] = (
    ("text_model", "text_base", load_text),
    ("vision_tower", "vision_base", load_vision),
)
FORMAT = 1
OF_PEFT = ("adapter_kwargs", "adapter_name")  # keywords of `from_pretrained` for an adapter (PEFT) on the model
# Fields of a part's configuration that change no answer.
NO_SETTINGS = frozenset(
    "name_or_path architectures dtype torch_dtype transformers_version quantization_config use_cache auto_map "
    "return_dict output_attentions output_hidden_states gradient_checkpointing id2label label2id".split()
)
# Entries of a base, the types that they may have, and whether they must be there.
BASE_ENTRIES: dict[str, tuple[tuple[type, ...], bool]] = {
    "name_or_path": ((str,), True),
    "revision": ((str, type(None)), True),
    "subfolder": ((str, type(None)), True),
    "gguf_file": ((str, type(None)), False),
    "prefix": ((str,), True),
    "dtype": ((str,), True),
    "dtypes": ((dict,), True),
    "absent": ((list,), True),
    "shapes": ((str,), True),
    "fingerprint": ((str,), True),
}


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads a manifest. Raises a `ValueError` for a damaged one, a later format, and the name of a file elsewhere."""
    try:
        manifest = read_json(path)
    except ValueError as error:
        raise ValueError(f"{error} Save the model again.") from error
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {short(manifest.get('format'))}, this version of hf_xattn reads {FORMAT}. Update "
            "hf_xattn."
        )
    _check_files(manifest.get("files"), path)
    for _, argument, _ in PARTS:
        if argument in manifest:
            _check_base(manifest[argument], f"{path}, `{argument}`")
    quantization = manifest.get("quantization_config")
    if not isinstance(quantization, (dict, type(None))):
        raise ValueError(
            f"{path} is damaged: expected `quantization_config` to be an object, got {short(quantization)}."
        )
    return manifest


def _check_files(files: Any, path: Path) -> None:
    if not isinstance(files, dict):
        raise ValueError(f"{path} is damaged: expected `files` to be an object, got {short(files)}.")
    for name, facts in files.items():
        check_name(name, str(path))
        size, digest = (facts.get("bytes"), facts.get("sha256")) if isinstance(facts, dict) else (None, None)
        if type(size) is not int or not isinstance(digest, str):
            raise ValueError(f"{path} is damaged: expected `bytes` and `sha256` of {short(name)}, got {short(facts)}.")


def _check_base(record: Any, where: str) -> None:
    if not isinstance(record, dict):
        raise ValueError(f"{where} is damaged: expected an object, got {short(record)}.")
    for name, (kinds, required) in BASE_ENTRIES.items():
        if required or name in record:
            if name not in record or not isinstance(record[name], kinds):
                expected = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
                raise ValueError(
                    f"{where} is damaged: expected `{name}` to be {expected}, got {short(record.get(name))}."
                )
    for name in ("subfolder", "gguf_file"):
        if record.get(name):
            check_name(record[name], where)
    if not all(isinstance(name, str) for name in record["absent"]):
        raise ValueError(f"{where} is damaged: expected `absent` to be a list of names, got {short(record['absent'])}.")
    for dtype in (record["dtype"], *record["dtypes"].values()):
        if not isinstance(dtype, str) or not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ValueError(f"{where} is damaged: expected dtypes of torch, got {short(dtype)}.")


@dataclass(frozen=True)
class SmallCheckpoint:
    """A checkpoint of added weights, which `adapter_only=True` has saved. An adapter of PEFT is something else."""

    name: str  # its folder or Hub id
    manifest: dict[str, Any]  # the content of the file
    hub: dict[str, Any]  # keyword arguments that say where its files are

    @classmethod
    def find(cls, name: Any, load_kwargs: dict[str, Any]) -> SmallCheckpoint | None:
        """Reads the manifest. None and errors as [`find_manifest`] and [`read_manifest`]."""
        path = find_manifest(name, load_kwargs)
        return None if path is None else cls(os.fspath(name), read_manifest(path), given(FILE_KEYWORDS, load_kwargs))

    def file(self, name: str) -> Path:
        """The path of a file. Raises a `ValueError` for one that is missing, cut off or another one."""
        path = find_file(self.name, name, self.hub)
        if path is None:
            raise ValueError(f"{self.name} lacks {name}, which its {MANIFEST} names. Copy the folder again.")
        expected = self.manifest["files"][name]
        size = path.stat().st_size
        if size == expected["bytes"] and sha256_of(path) == expected["sha256"]:
            return path
        raise ValueError(
            f"{path} is not the file that was saved: its {MANIFEST} names {expected['bytes']} bytes with SHA-256 "
            f"{expected['sha256'][:12]}..., got {size} bytes. Copy the folder again; to change settings, "
            "change them in the model and save it."
        )

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a file, whether or not its manifest names it."""
        return find_file(self.name, name, self.hub) is not None

    def recorded_base(self, argument: str) -> BaseSource | None:
        """The base that the manifest names for `text_base` or `vision_base`. None for a model without this part."""
        record = self.manifest.get(argument)
        return None if record is None else BaseSource.of_record(record)

    def added(self) -> dict[str, torch.Tensor]:
        """The weights in the checkpoint."""
        weights: dict[str, torch.Tensor] = {}
        for name in self.manifest["files"]:
            if name.endswith(".safetensors"):
                path = self.file(name)
                read_headers([path], {}, where=self.name)  # the manifest may name a file that is none
                weights.update(load_file(path))
        return weights

    def check_settings(self) -> None:
        """Raises a `ValueError` if a file beside the weights is not the one that was saved."""
        for name in self.manifest["files"]:
            if not name.endswith(".safetensors"):  # `added` checks those
                self.file(name)

    def load_kwargs(self, config: Any, asked: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments of `from_pretrained` that load the whole model. `asked` are the caller's."""
        self.check_settings()
        bases = {argument: named_base(argument, asked.pop(argument, None)) for _, argument, _ in PARTS}
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
        for argument, part in (("text_base", config.text_config), ("vision_base", config.vision_config)):
            recorded = self.recorded_base(argument)
            if part is not None and recorded is not None:
                (bases[argument] or recorded).note_in(part)  # for the next time that the model is saved
        state = dict(self._base_weights(bases, apart))
        state.update(self.added())
        if apart.get("generation_config") is None and "generation_config.json" in self.manifest["files"]:
            apart["generation_config"] = GenerationConfig.from_pretrained(self.name, **self.hub)
        kept = {name: value for name, value in apart.items() if name not in (*CONFIG_KEYWORDS, "adapter_kwargs")}
        return {**rest, **kept, "config": config, "state_dict": state}

    def _base_weights(
        self, bases: dict[str, BaseSource | None], load_kwargs: dict[str, Any], parts: Any = PARTS
    ) -> Iterator[tuple[str, torch.Tensor]]:
        hub = given((*HUB_KEYWORDS, "trust_remote_code"), load_kwargs)
        for _, argument, load in parts:
            record, named = self.manifest.get(argument), bases[argument]
            if record is None:
                if named is not None:
                    raise ValueError(f"`{argument}` ({named.name}): {self.name} was saved without one.")
                continue
            for name, tensor in self.kept(argument, self.base(argument, load, named, hub)):
                yield record["prefix"] + name, tensor

    def kept(self, argument: str, base: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights of a base that the model has, in its dtypes."""
        record, weights = self.manifest[argument], weights_of(base)
        if unknown := {*record["absent"], *record["dtypes"]}.difference(weights):
            raise ValueError(
                f"{self.name}: {MANIFEST} is damaged: `{argument}` names {short(min(unknown))}, which its base "
                "does not have. Save the model again."
            )
        for name, tensor in weights.items():
            if name not in record["absent"]:
                dtype = record["dtypes"].get(name)
                yield name, tensor if dtype is None else tensor.to(getattr(torch, dtype))

    def base(
        self, argument: str, load: Callable[..., PreTrainedModel], named: BaseSource | None, hub: dict[str, Any]
    ) -> PreTrainedModel:
        """Loads a base. Warns if its weights are not those that the model was saved with."""
        record = self.manifest[argument]
        source = named or BaseSource.of_record(record)
        if source.is_gone():
            raise ValueError(
                f"{self.name} was saved without the weights of its base {source}, where there is no {source.kind} now. "
                f"Pass `{argument}=` to `from_pretrained`, the Hub id or folder of that base."
            )
        try:
            base = source.load(load, dtype=getattr(torch, record["dtype"]), **hub)
        except OSError as error:
            raise OSError(
                f"{self.name} was saved without the weights of its base {source}, which cannot be loaded: {error} Pass "
                f"`{argument}=` to `from_pretrained`, the Hub id or folder of that base."
            ) from error
        weights = weights_of(base)
        if digest_of_shapes(weights) != record["shapes"]:
            raise self._of_another_shape(argument, source.name)
        self._check_fingerprint(argument, source.name, weights)
        return base

    def _of_another_shape(self, argument: str, name: str) -> ValueError:
        return ValueError(
            f"{self.name} was saved on the base {self.manifest[argument]['name_or_path']}, and `{argument}` {name} is "
            f"a model of another shape. Pass `{argument}=`, the Hub id or folder of that base."
        )

    def _check_fingerprint(self, argument: str, name: str, weights: dict[str, torch.Tensor]) -> None:
        record = self.manifest[argument]
        if fingerprint(weights) != record["fingerprint"]:
            logger.warning(
                f"The weights of the base {name} are not those that {self.name} was saved with "
                f"({record['name_or_path']}, revision {record['revision']}): the base has changed, and the model will "
                "answer differently."
            )

    def identity(self) -> str:
        """SHA-256 of the weights in the checkpoint and of its configuration."""
        files = self.manifest["files"]
        names = [name for name in sorted(files) if name == "config.json" or name.endswith(".safetensors")]
        return digest_of(*(files[name]["sha256"] for name in names))

    def onto(self, model_class: Any, text: PreTrainedModel, config: Any, asked: dict[str, Any]) -> Any:
        """Puts the checkpoint onto a text model that is loaded, which contains the blocks afterwards.

        `asked` are the caller's keyword arguments. Everything is made on the device and in the dtype of the text model.

        Raises:
            ValueError: for keyword arguments that load a text model; for a text model that is another base than that
                of the checkpoint; for a checkpoint that changes weights of its text model.
        """
        named = named_base("vision_base", asked.pop("vision_base", None))
        for name, value in asked.items():
            if name not in (*CONFIG_KEYWORDS, *OF_PEFT) and name[0] != "_" and value is not None:
                raise ValueError(
                    f"`from_pretrained` does not take `{name}` beside a `text_base` that is loaded already, got "
                    f"{short(value)}. Change the text model before, or the model afterwards."
                )
        self.check_settings()
        if not isinstance(config, XAttnConfig):
            config = XAttnConfig.from_pretrained(self.name if config is None else config, **self.hub)
        self._check_loaded(text, config.text_config)
        prefix, weights = self.manifest["text_base"]["prefix"], self.added()
        own = {prefix + name for name in tensors_of(text)}
        if self.manifest["text_base"]["absent"] or own.intersection(weights):
            raise ValueError(
                f"{self.name} changes weights of its text model, so it cannot be put onto one that is loaded. Load it "
                "without `text_base`."
            )
        config.text_config = text.config
        for part in (config, *(getattr(config, name) for name in config.sub_configs)):
            if part is not None:
                part.dtype = text.dtype
        if (recorded := self.recorded_base("vision_base")) is not None:
            (named or recorded).note_in(config.vision_config)
        weights = dict(self._base_weights({"vision_base": named}, asked, PARTS[1:])) | weights
        with local_torch_dtype(text.dtype), text.device:
            model = model_class(config, text_model=text)
        start = prefix.removesuffix("text_model.")
        result = model.base_model.load_state_dict({name.removeprefix(start): weights[name] for name in weights}, False)
        missing = {start + name for name in result.missing_keys}.difference(own)
        model._lacking = missing, set(result.unexpected_keys)
        if "generation_config.json" in self.manifest["files"]:
            model.generation_config = GenerationConfig.from_pretrained(self.name, **self.hub)
        return model.eval()

    def _check_loaded(self, text: PreTrainedModel, config: Any) -> None:
        """Checks a text model that is loaded as [`base`] checks one that it loads, as far as its weights tell."""
        refuse_adapter_layers(text, "`from_pretrained` cannot put blocks into", "Merge the adapter, or delete it.")
        if any(weight.is_meta for weight in text.parameters()):
            raise ValueError("`text_base`: the weights of the text model are offloaded. Load it without a device map.")
        if differing := _differing(config, text.config):
            logger.warning(
                f"{self.name} was saved with another `{differing[0]}` of the text model ({len(differing)} settings "
                "differ): it will answer differently on this one. Load it without `text_base`."
            )
        record, base, quantized = self.manifest["text_base"], base_of(text.config), first_quantized(text) is not None
        name, weights = type(text).__name__ if base is None else base.name, without_ties(tensors_of(text), text)
        before = digest_of_shapes({each: shape_before(tensor) for each, tensor in weights.items()})
        # A checkpoint that is quantized itself holds more than that.
        if record["shapes"] != before and not (quantized and record["shapes"] == digest_of_shapes(weights_of(text))):
            raise self._of_another_shape("text_base", name)
        if not quantized and record["dtype"] == str(text.dtype).removeprefix("torch."):
            self._check_fingerprint("text_base", name, weights)
        elif base is None or (base.name, base.revision) != (record["name_or_path"], record["revision"]):
            logger.warning(
                f"{self.name} was saved on a base in {record['dtype']}, and the text model is "
                f"{'quantized' if quantized else f'in {text.dtype}'}, so whether it is the base "
                f"{record['name_or_path']} was not checked."
            )


def _differing(one: Any, other: Any) -> list[str]:
    """The settings of a part that differ, but for those that say where it is from or how it runs."""

    def settings(config: Any) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
        return {name: value for name, value in fields.items() if name not in NO_SETTINGS and name[0] != "_"}

    mine, others = settings(one), settings(other)
    names = {name for name in (*mine, *others) if not name.startswith("base_") and not name.endswith("_token_id")}
    return sorted(name for name in names if mine.get(name) != others.get(name))


def weights_of(base: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights of a model as they are saved: each tied weight once."""
    return without_ties(base.state_dict(), base)


def tensors_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters and saved buffers, by name. In a `state_dict`, bitsandbytes rounds 4-bit weights of a CPU for good."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for path, part in model.named_modules():
        for name, tensor in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                found[f"{path}.{name}" if path else name] = tensor
    return found


def without_ties(weights: dict[str, torch.Tensor], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights of a model, each tied weight once. Weights of torchao's classes are never tied."""
    packed = {name for name, tensor in weights.items() if len(plain_tensors(tensor)) > 1}
    once = remove_tied_weights_from_state_dict({n: t for n, t in weights.items() if n not in packed}, model)
    return {name: once.get(name, tensor) for name, tensor in weights.items() if name in packed or name in once}


def fingerprint(weights: dict[str, torch.Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and sums of weights."""
    lines = []
    for name, tensor in sorted(weights.items()):
        sums = ",".join(str(checksum(plain.detach())) for plain in plain_tensors(tensor))
        lines.append(line_of(name, tensor, sums) + "\n")
    return digest_of(*lines)


def digest_of_shapes(shapes: Mapping[str, Any]) -> str:
    """SHA-256 over names and shapes of weights, from the weights or their shapes."""
    found = {name: tuple(getattr(each, "shape", each)) for name, each in shapes.items()}
    return digest_of("\n".join(f"{name}:{shape}" for name, shape in sorted(found.items())))
