"""Checkpoints that hold only what was added to a base, and loading them. Saving them is in `checkpoints/adapter_saving.py`.

Most weights of a retrofitted model are those of its bases. Such a folder holds the others: blocks, connector, added vocabulary, and every
weight of the text model or the vision tower that differs from its base. Saving does not rely on `requires_grad`. It loads the bases again
and compares every weight. So bases and folder together always give the whole model, bit for bit.

The manifest is written last. It names the bases with their commits, a fingerprint of their weights, and the SHA-256 of each file. A folder
without a manifest is not loaded. The fingerprint consists of sums over all words of all weights (see `checkpoints/model_identity.py`). It takes about
0.5 s for a GB on two CPU cores, when the model is saved and when it is loaded.

A text model that was quantized while it was loaded has a base in full precision. The manifest then holds the quantizer's configuration,
and loading quantizes the base again. A checkpoint that holds quantized weights is a base like any other.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import GenerationConfig, PreTrainedModel
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import logging
from transformers.utils.hub import cached_file

from ..configuration_xattn import XAttnConfig
from ..utils.checkpoint_files import SHARDS, check_inside, read_headers, sha256_of, short
from ..utils.quantized_weights import plain_tensors
from .adapter_manifest import MANIFEST, read_manifest
from .bases import CONFIG_KEYWORDS, LOAD_KEYWORDS, BaseSource, load_text, load_vision, named_base
from .model_identity import checksum


logger = logging.get_logger(__name__)

WEIGHTS = "cross_attention"  # in place of the `model` of transformers' names

# Name of the part, its argument of `save_pretrained` and `from_pretrained`, and the function that loads it.
PARTS: tuple[tuple[str, str, Callable[..., PreTrainedModel]], ...] = (
    ("text_model", "text_base", load_text),
    ("vision_tower", "vision_base", load_vision),
)
HUB_KEYWORDS = ("cache_dir", "force_download", "local_files_only", "proxies", "token")


def weight_files_of(folder: Path) -> list[Path]:
    """The weights of a checkpoint of added weights in a folder: one file, or its shards. A file with a longer name is somebody else's."""
    return sorted(path for shards in ("", SHARDS) for path in folder.glob(f"{WEIGHTS}{shards}.safetensors"))


def weights_of(base: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights of a model as they are saved: each tied weight once."""
    return without_ties(base.state_dict(), base)


def without_ties(weights: dict[str, torch.Tensor], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights of a model, each tied weight once. Weights of torchao's classes have no storage to compare, and are never tied."""
    packed = {name for name, tensor in weights.items() if len(plain_tensors(tensor)) > 1}
    once = remove_tied_weights_from_state_dict({n: t for n, t in weights.items() if n not in packed}, model)
    return {name: once.get(name, tensor) for name, tensor in weights.items() if name in packed or name in once}


def fingerprint(weights: dict[str, torch.Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and sums of weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        sums = ",".join(str(checksum(plain.detach())) for plain in plain_tensors(tensor))
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}:{sums}\n".encode())
    return digest.hexdigest()


def shapes_of(weights: dict[str, torch.Tensor]) -> str:
    """SHA-256 over names and shapes of weights."""
    return digest_of_shapes({name: tensor.shape for name, tensor in weights.items()})


def digest_of_shapes(shapes: dict[str, torch.Size]) -> str:
    return hashlib.sha256(
        "\n".join(f"{name}:{tuple(shape)}" for name, shape in sorted(shapes.items())).encode()
    ).hexdigest()


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
        """Reads the manifest. None if there is none, or if `name` is no folder and no repository.

        Raises:
            ValueError: for a folder that is half written or damaged, or was written by a later version.
        """
        if not isinstance(name, (str, os.PathLike)) or load_kwargs.get("state_dict") is not None:
            return None
        hub = {key: load_kwargs[key] for key in (*HUB_KEYWORDS, "revision", "subfolder") if load_kwargs.get(key)}
        path = _find(os.fspath(name), MANIFEST, hub)
        if path is None:
            folder = Path(name) / hub.get("subfolder", "")
            if weight_files_of(folder) and not any(folder.glob("model*.safetensors")):
                raise ValueError(
                    f"{folder} holds weights of blocks, but no {MANIFEST}: it was only half written. Save it again."
                )
            return None
        manifest = read_manifest(path)
        return cls(os.fspath(name), manifest, hub)

    def file(self, name: str) -> Path:
        """Returns the path of a file of the checkpoint, and checks its digest.

        Raises:
            ValueError: for a file that is missing, cut off or another one.
        """
        path = _find(self.name, name, self.hub)
        if path is None:
            raise ValueError(f"{self.name} lacks {name}, which its {MANIFEST} names. Copy the folder again.")
        expected = self.manifest["files"][name]
        size = path.stat().st_size
        if size == expected["bytes"] and sha256_of(path) == expected["sha256"]:
            return path
        raise ValueError(
            f"{path} is not the file that was saved: its {MANIFEST} names {expected['bytes']} bytes with SHA-256 "
            f"{expected['sha256'][:12]}..., got {size} bytes. It was cut off or changed. Copy the folder again; settings are changed in the "
            "model, which is then saved again."
        )

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a file, whether or not its manifest names it."""
        return _find(self.name, name, self.hub) is not None

    def recorded_base(self, argument: str) -> BaseSource | None:
        """The base that the manifest names for `text_base` or `vision_base`. None for a model without this part."""
        record = self.manifest.get(argument)
        return None if record is None else _recorded(record)

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

    def load_kwargs(self, config: Any, given: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments of `from_pretrained` that load the whole model from its weights.

        Args:
            config (`XAttnConfig`, *optional*): if the caller has read it already.
            given (`dict`): the caller's, with `text_base` and `vision_base`.
        """
        self.check_settings()
        bases = {argument: named_base(argument, given.pop(argument, None)) for _, argument, _ in PARTS}
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
            if unknown := {*record["absent"], *record["dtypes"]}.difference(weights):
                raise ValueError(
                    f"{self.name}: {MANIFEST} is damaged: `{argument}` names {short(min(unknown))}, which its base does not have. Save the model "
                    "again."
                )
            for name, tensor in weights.items():
                if name not in record["absent"]:
                    dtype = record["dtypes"].get(name)
                    yield record["prefix"] + name, tensor if dtype is None else tensor.to(getattr(torch, dtype))

    def base(
        self, argument: str, load: Callable[..., PreTrainedModel], named: BaseSource | None, hub: dict[str, Any]
    ) -> PreTrainedModel:
        """Loads a base. Warns if its weights are not those that the model was saved with."""
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
    """The path of a file in a folder or repository, downloaded if necessary. None if there is no such file."""
    if os.path.isdir(name):
        folder = Path(name) / hub.get("subfolder", "")
        if not (folder / file).is_file():
            return None
        check_inside(folder, folder / file)
        return folder / file
    quiet = {f"_raise_exceptions_for_{case}": False for case in ("gated_repo", "missing_entries", "connection_errors")}
    found = cached_file(name, file, **quiet, **hub)
    return None if found is None else Path(found)
