"""Checkpoints that hold only what was added to a base: `save_pretrained(folder, adapter_only=True)`, and loading them.

A retrofitted model is mostly its bases, whose weights did not change. Such a folder holds blocks, connector, added vocabulary, and every
weight of the text model or the vision tower that differs from its base. What differs is not taken from flags: saving loads the bases once
more, as loading will, and compares every weight. So bases and folder together are always the whole model, bit for bit.

The manifest is written last and names everything else: the bases with their commits and a fingerprint of their weights, and the SHA-256 of
each file. Without it the folder is not taken. The fingerprint is made of sums over all words of all weights (see `model_identity.py`). It
takes about 0.5 s for a GB on two CPU cores, when the model is saved and when it is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import GenerationConfig, PreTrainedModel
from transformers.integrations.accelerate import load_offloaded_parameter
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import logging
from transformers.utils.hub import cached_file

from .bases import CONFIG_KEYWORDS, LOAD_KEYWORDS, BaseSource, base_of, load_text, load_vision
from .configuration_xattn import XAttnConfig
from .file_digests import sha256_of
from .gguf_files import is_gguf_path, split_gguf
from .model_card import FILE as CARD
from .model_identity import checksum
from .tensor_checks import type_name
from .version import __version__


logger = logging.get_logger(__name__)

MANIFEST = "cross_attention.json"
WEIGHTS = "cross_attention"  # and what transformers appends to `model` for shards
FORMAT = 1

# Name of the part, its argument of `save_pretrained` and `from_pretrained`, and the function that loads it.
PARTS: tuple[tuple[str, str, Callable[..., PreTrainedModel]], ...] = (
    ("text_model", "text_base", load_text),
    ("vision_tower", "vision_base", load_vision),
)
HUB_KEYWORDS = ("cache_dir", "force_download", "local_files_only", "proxies", "token")


def save_adapter(
    model: Any,
    folder: str | os.PathLike[str],
    save: Callable[[Path, dict[str, torch.Tensor]], None],
    bases: dict[str, Any],
    state_dict: dict[str, torch.Tensor] | None = None,
) -> None:
    """Saves what the bases of a model do not hold. The folder is whole, or it is not taken.

    Args:
        model ([`XAttnPreTrainedModel`]): the model.
        folder (`str`): where it goes.
        save (`Callable`): saves configuration, code and the given weights into a folder, as `save_pretrained` does.
        bases (`dict`): `text_base` and `vision_base`, where the caller names them.
        state_dict (`dict`, *optional*): weights of the model, where they are gathered already.

    Raises:
        TypeError: for a `text_base` or `vision_base` that is no name.
        ValueError: for a base without a name or a checkpoint, a quantized base, a model with LoRA weights, and a folder that
            holds a whole model.
    """
    target = Path(folder)
    if target.is_file():
        raise ValueError(f"Expected `save_directory` to be a folder, got {target}, a file.")
    if target.is_dir() and (whole := sorted(path.name for path in target.glob("model*.safetensors"))):
        raise ValueError(f"`adapter_only=True`: {target} holds a whole model ({whole[0]}). Choose another folder.")
    sources = check_bases(model, bases)
    state = dict(model.state_dict() if state_dict is None else state_dict)
    state = remove_tied_weights_from_state_dict(state, model)
    records: dict[str, Any] = {}
    for name, argument, load in PARTS:
        if name in sources:
            source = sources[name].resolved()
            records[argument] = _without_base(model, _prefix(model) + name + ".", source, load, state)
    added = {name: _whole(model, name, tensor) for name, tensor in state.items()}
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary:
        fresh = Path(temporary) / target.name
        if (target / CARD).is_file():  # written anew only if no person has changed it
            fresh.mkdir()
            shutil.copy2(target / CARD, fresh / CARD)
        save(fresh, added)
        for path in sorted(fresh.glob("model*")):
            if path.suffix == ".safetensors":
                path.rename(fresh / path.name.replace("model", WEIGHTS, 1))
            else:
                path.unlink()  # the index of shards: the manifest names the files
        files = {
            str(path.relative_to(fresh)): _describe(path)
            for path in sorted(fresh.rglob("*"))
            if path.is_file() and path.name != CARD  # a person may edit the card
        }
        manifest = {"format": FORMAT, "hf_xattn": __version__, **records, "files": files}
        (fresh / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        _move_into_place(fresh, target)


def check_bases(model: Any, bases: dict[str, Any] | None = None) -> dict[str, BaseSource]:
    """Finds the bases of a model, before work is lost on a model that cannot be saved without them.

    Raises:
        TypeError, ValueError: as [`save_adapter`].
    """
    bases = bases or {}
    body, sources = model.base_model, {}
    if getattr(model, "_hf_peft_config_loaded", False) or any(hasattr(part, "base_layer") for part in body.modules()):
        raise ValueError(
            "`adapter_only=True`: the model holds LoRA layers, which rename the base's weights. Merge them first, or save them on "
            "their own."
        )
    for name, argument, _ in PARTS:
        part = getattr(body, name)
        named = _checked_name(argument, bases.get(argument))
        if part is None:
            if named is not None:
                raise ValueError(f"`{argument}` ({named}): this model has no {name}.")
            continue
        quantizers = (getattr(owner, "hf_quantizer", None) for owner in (model, part))
        if any(quantizer is not None for quantizer in quantizers) or not part.dtype.is_floating_point:
            raise ValueError(f"`adapter_only=True`: the {name} is quantized, so its weights cannot be compared.")
        source = base_of(part.config) if named is None else named
        if source is None:
            raise ValueError(
                f"`adapter_only=True`: the {name} was not loaded from a checkpoint, so it cannot be fetched again. Save it to a "
                f"folder and pass `{argument}=`, the Hub id or folder of its weights."
            )
        if source.is_gone():
            raise ValueError(
                f"`adapter_only=True`: the {name} was loaded from {source}, where there is no {source.kind} now. Pass `{argument}=`, "
                "its Hub id or folder."
            )
        sources[name] = source
    return sources


def _checked_name(argument: str, named: Any) -> BaseSource | None:
    if named is None:
        return None
    if not isinstance(named, (str, os.PathLike)):
        raise TypeError(f"Expected `{argument}` to be a Hub id or a folder, got {type_name(named)}.")
    name = os.fspath(named)
    if argument == "text_base" and is_gguf_path(name):
        folder, where = split_gguf(argument, name, {})
        return BaseSource(folder, **where)
    is_folder = os.path.isdir(name)
    if not is_folder and (isinstance(named, os.PathLike) or name.startswith((".", "~", os.sep)) or name.count("/") > 1):
        raise ValueError(f"Expected `{argument}` to be a folder or a Hub id, got {name!r}, where there is no folder.")
    return BaseSource(os.path.abspath(name) if is_folder else name)


def _prefix(model: Any) -> str:
    """In front of the names of the body's weights."""
    return "" if model.base_model is model else f"{model.base_model_prefix}."


def _whole(model: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A weight that accelerate has offloaded or FSDP has sharded, as one tensor on a CPU; others as they are."""
    if tensor.is_meta:
        tensor = load_offloaded_parameter(model, name)
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _without_base(
    model: Any,
    prefix: str,
    source: BaseSource,
    load: Callable[..., PreTrainedModel],
    state: dict[str, torch.Tensor],
) -> dict[str, Any]:
    """Takes the weights that equal the base's out of `state`. Returns what loading must know about the base."""
    part = model.get_submodule(prefix.rstrip("."))
    base = weights_of(source.load(load, dtype=part.dtype, **_trust(part)))
    dtypes, absent = {}, []
    for name, theirs in base.items():
        ours = state.get(prefix + name)
        if ours is None:
            absent.append(name)
            continue
        ours = _whole(model, prefix + name, ours).cpu()
        if ours.shape == theirs.shape and _equal(ours, theirs.to(ours.dtype)):
            del state[prefix + name]
            if ours.dtype != theirs.dtype:
                dtypes[name] = str(ours.dtype).removeprefix("torch.")
    return {
        "name_or_path": source.name,
        "revision": source.revision,
        "subfolder": source.subfolder,
        **({} if source.gguf_file is None else {"gguf_file": source.gguf_file}),
        "dtype": str(part.dtype).removeprefix("torch."),
        "prefix": prefix,
        "shapes": shapes_of(base),
        "fingerprint": fingerprint(base),
        "absent": absent,
        "dtypes": dtypes,
    }


def _equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Bit for bit: -0.0 and 0.0 differ, and NaN equals itself."""
    if ours.is_floating_point():
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.element_size()]
        ours, theirs = ours.contiguous().view(integers), theirs.contiguous().view(integers)
    return torch.equal(ours, theirs)


def _trust(part: PreTrainedModel) -> dict[str, bool]:
    return {"trust_remote_code": True} if part.is_remote_code() else {}


def weights_of(base: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights of a model as they are saved: tied ones once."""
    return remove_tied_weights_from_state_dict(dict(base.state_dict()), base)


def fingerprint(weights: dict[str, torch.Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and sums of weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}:{checksum(tensor.detach())}\n".encode())
    return digest.hexdigest()


def shapes_of(weights: dict[str, torch.Tensor]) -> str:
    """SHA-256 over names and shapes of weights."""
    return hashlib.sha256("\n".join(f"{n}:{tuple(t.shape)}" for n, t in sorted(weights.items())).encode()).hexdigest()


def _describe(path: Path) -> dict[str, Any]:
    return {"sha256": sha256_of(path), "bytes": path.stat().st_size}


def _move_into_place(fresh: Path, target: Path) -> None:
    """Renames a whole folder. Into a folder that exists, files move one by one, while it has no manifest."""
    if not target.exists():
        os.rename(fresh, target)
        return
    (target / MANIFEST).unlink(missing_ok=True)
    for path in target.glob(f"{WEIGHTS}*.safetensors"):
        path.unlink()
    files = sorted((path for path in fresh.rglob("*") if path.is_file()), key=lambda path: path.name == MANIFEST)
    for path in files:
        place = target / path.relative_to(fresh)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, place)


def forget_adapter(folder: str | os.PathLike[str]) -> None:
    """Removes what an earlier `adapter_only=True` left in a folder, before a whole model is saved there."""
    path = Path(folder)
    if (path / MANIFEST).is_file():
        (path / MANIFEST).unlink()
        for file in path.glob(f"{WEIGHTS}*.safetensors"):
            file.unlink()


@dataclass(frozen=True)
class Adapter:
    """A checkpoint of added weights.

    Attributes:
        name (`str`): its folder or Hub id.
        manifest (`dict`): the content of its manifest.
        hub (`dict`): keyword arguments that say where its files are.
    """

    name: str
    manifest: dict[str, Any]
    hub: dict[str, Any]

    @classmethod
    def find(cls, name: Any, load_kwargs: dict[str, Any]) -> Adapter | None:
        """Reads the manifest; None for anything but a folder or repository with one.

        Raises:
            ValueError: for a folder that was half written, or by a later version.
        """
        if not isinstance(name, (str, os.PathLike)) or load_kwargs.get("state_dict") is not None:
            return None
        hub = {key: load_kwargs[key] for key in (*HUB_KEYWORDS, "revision", "subfolder") if load_kwargs.get(key)}
        path = _find(os.fspath(name), MANIFEST, hub)
        if path is None:
            folder = Path(name) / hub.get("subfolder", "")
            if any(folder.glob(f"{WEIGHTS}*.safetensors")) and not any(folder.glob("model*.safetensors")):
                raise ValueError(
                    f"{folder} holds weights of blocks, but no {MANIFEST}: it was only half written. Save it again."
                )
            return None
        try:
            manifest = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}. Save the model again.") from error
        if manifest.get("format") != FORMAT:
            raise ValueError(
                f"{path} has format {manifest.get('format')!r}, this version of hf_xattn reads {FORMAT}. Update hf_xattn."
            )
        return cls(os.fspath(name), manifest, hub)

    def file(self, name: str) -> Path:
        """A file of the checkpoint, after a look at its digest.

        Raises:
            ValueError: for a file that is missing, cut off or another one. A changed configuration is only worth a warning.
        """
        path = _find(self.name, name, self.hub)
        if path is None:
            raise ValueError(f"{self.name} lacks {name}, which its {MANIFEST} names. Copy the folder again.")
        expected = self.manifest["files"][name]
        size = path.stat().st_size
        if size == expected["bytes"] and sha256_of(path) == expected["sha256"]:
            return path
        if name.endswith(".safetensors"):
            raise ValueError(
                f"{path} is not the file that was saved: its {MANIFEST} names {expected['bytes']} bytes with SHA-256 "
                f"{expected['sha256'][:12]}..., got {size} bytes. It was cut off or changed. Copy the folder again."
            )
        logger.warning(f"{path} is not the file that was saved beside the weights. It may not fit them.")
        return path

    def added(self) -> dict[str, torch.Tensor]:
        """The weights in the checkpoint."""
        weights: dict[str, torch.Tensor] = {}
        for name in self.manifest["files"]:
            if name.endswith(".safetensors"):
                weights.update(load_file(self.file(name)))
        return weights

    def check_settings(self) -> None:
        """Warns where configuration or code are not those that were saved."""
        for name in self.manifest["files"]:
            if name.endswith((".json", ".py")):
                self.file(name)

    def load_kwargs(self, config: Any, given: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments of `from_pretrained` that load the whole model from its weights.

        Args:
            config (`XAttnConfig`, *optional*): where the caller has read it already.
            given (`dict`): the caller's, with `text_base` and `vision_base`.
        """
        self.check_settings()
        bases = {argument: _checked_name(argument, given.pop(argument, None)) for _, argument, _ in PARTS}
        apart = {name: given.pop(name) for name in tuple(given) if name in LOAD_KEYWORDS | {"output_loading_info"}}
        for name in ("_from_auto", "_from_pipeline", "_commit_hash"):
            given.pop(name, None)
        rest: dict[str, Any] = given
        if not isinstance(config, XAttnConfig):
            source = self.name if config is None else config
            kernels = {name: apart[name] for name in ("attn_implementation", "experts_implementation") if name in apart}
            config, rest = XAttnConfig.from_pretrained(
                source, return_unused_kwargs=True, **self.hub, **kernels, **given
            )
        for _, argument, _ in PARTS:
            self._note_base(argument, config, bases[argument])
        state = dict(self._base_weights(bases, apart))
        state.update(self.added())
        if apart.get("generation_config") is None and "generation_config.json" in self.manifest["files"]:
            apart["generation_config"] = GenerationConfig.from_pretrained(self.name, **self.hub)
        kept = {name: value for name, value in apart.items() if name not in (*CONFIG_KEYWORDS, "adapter_kwargs")}
        return {**rest, **kept, "config": config, "state_dict": state}

    def _note_base(self, argument: str, config: XAttnConfig, named: BaseSource | None) -> None:
        """Names the base that is loaded, for the next time that the model is saved."""
        part: Any = config.text_config if argument == "text_base" else config.vision_config
        record = self.manifest.get(argument)
        if part is None or record is None:
            return
        source = named or _recorded(record)
        part.name_or_path, part.base_revision, part.base_subfolder = source.name, source.revision, source.subfolder
        part.base_gguf_file = source.gguf_file

    def _base_weights(
        self, bases: dict[str, BaseSource | None], load_kwargs: dict[str, Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        hub = {
            key: load_kwargs[key] for key in (*HUB_KEYWORDS, "trust_remote_code") if load_kwargs.get(key) is not None
        }
        for _, argument, load in PARTS:
            record, named = self.manifest.get(argument), bases[argument]
            if record is None:
                if named is not None:
                    raise ValueError(f"`{argument}` ({named.name}): {self.name} was saved without one.")
                continue
            weights = weights_of(self.base(argument, load, named, hub))
            for name, tensor in weights.items():
                if name not in record["absent"]:
                    dtype = record["dtypes"].get(name)
                    yield record["prefix"] + name, tensor if dtype is None else tensor.to(getattr(torch, dtype))

    def base(
        self, argument: str, load: Callable[..., PreTrainedModel], named: BaseSource | None, hub: dict[str, Any]
    ) -> PreTrainedModel:
        """Fetches a base, and warns where they are not those that the model was saved with."""
        record = self.manifest[argument]
        source = named or _recorded(record)
        if source.is_gone():
            raise ValueError(
                f"{self.name} was saved without the weights of its base {source}, where there is no {source.kind} now. Pass "
                f"`{argument}=` to `from_pretrained`, the Hub id or folder of that base."
            )
        try:
            base = source.load(load, dtype=getattr(torch, record["dtype"]), **hub)
        except OSError as error:
            raise OSError(
                f"{self.name} was saved without the weights of its base {source}, which cannot be loaded: {error} Pass "
                f"`{argument}=` to `from_pretrained`, the Hub id or folder of that base."
            ) from error
        weights = weights_of(base)
        if shapes_of(weights) != record["shapes"]:
            raise ValueError(
                f"{self.name} was saved on the base {record['name_or_path']}, and `{argument}` {source.name} is a model of another shape. "
                f"Pass `{argument}=`, the Hub id or folder of that base."
            )
        if fingerprint(weights) != record["fingerprint"]:
            logger.warning(
                f"The weights of the base {source.name} are not those that {self.name} was saved with "
                f"({record['name_or_path']}, revision {record['revision']}): the base has changed, and the model will answer differently."
            )
        return base


def _recorded(record: dict[str, Any]) -> BaseSource:
    """The base that a manifest names."""
    return BaseSource(record["name_or_path"], record["revision"], record["subfolder"], record.get("gguf_file"))


def _find(name: str, file: str, hub: dict[str, Any]) -> Path | None:
    """The path of a file in a folder or repository, fetched where it must be; None where there is none."""
    if os.path.isdir(name):
        path = Path(name) / hub.get("subfolder", "") / file
        return path if path.is_file() else None
    quiet = {f"_raise_exceptions_for_{case}": False for case in ("gated_repo", "missing_entries", "connection_errors")}
    found = cached_file(name, file, **quiet, **hub)
    return None if found is None else Path(found)
