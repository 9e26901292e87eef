"""Finds out what the folder of a checkpoint holds, and checks it before loading takes endless work or memory.

A folder holds one of three things: a whole model, what was added to the bases of a model (see `adapters.py`), or an
adapter of PEFT.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import find_adapter_config_file, is_peft_available, logging
from transformers.utils.hub import cached_file

from ..utils.checkpoint_files import (
    SHARDS,
    SHARDS_OF_RANKS,
    SIDE_FILES,
    Stored,
    check_inside,
    check_weights,
    read_headers,
    read_headers_of_ranks,
    read_json,
    short,
    weight_files,
)
from ..utils.config_checks import check_fields, check_layer_count, is_quantized
from ..utils.keywords import FILE_KEYWORDS, given
from ..utils.tensor_checks import is_quantized as is_quantized_weight
from ..utils.transformers_api import has, needs
from ..utils.whole_folder import refuse_unfinished
from .saved_names import places_in_memory


logger = logging.get_logger(__name__)

MANIFEST = "cross_attention.json"  # in a folder of added weights
WEIGHTS = "cross_attention"  # begins the names of files of added weights, where transformers' names begin with `model`
# By the names that safetensors gives them.
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CODES = {dtype: code for code, dtype in FLOATS.items()}
PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

# A model may have up to `TIMES` as many elements as its files hold, and `MORE` on top. It may have more than its files,
# because a new part starts with random weights, and some buffers are not saved.
TIMES, MORE = 4, 2**26
MAX_WEIGHTS_PER_BYTE = 8  # of quantized weights: a weight takes one bit or more


class CheckedFolder(NamedTuple):
    """What was read of a folder."""

    fields: dict[str, Any]  # its config.json; empty if there is none
    headers: dict[str, Stored]  # its weights; empty if it has none


def check_config_file(source: object, load_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Checks the JSON files in a folder.

    Returns:
        the content of config.json. It is empty if there is no such file, and for a Hub id.

    Raises:
        ValueError: for a file that is damaged or leads out of the folder, and for values that no model has.
    """
    if not isinstance(source, (str, os.PathLike)) or not os.path.isdir(source):
        return {}
    folder = Path(source) / (load_kwargs.get("subfolder") or "")
    fields: dict[str, Any] = {}
    for name in (*SIDE_FILES, "config.json"):
        if (folder / name).is_file():
            check_inside(folder, folder / name)
            fields[name] = read_json(folder / name)
    config = fields.get("config.json", {})
    check_fields(config, str(folder / "config.json"))
    return config


def check_folder(source: object, load_kwargs: dict[str, Any]) -> CheckedFolder | None:
    """Checks a folder as [`check_config_file`] does, and also its weights.

    Returns:
        what was read, or None for a Hub id: [`check_stored`] checks its files when they are downloaded.

    Raises:
        ValueError: for a save that was cut off, and for damaged weights.
    """
    if not isinstance(source, (str, os.PathLike)) or not os.path.isdir(source):
        return None
    folder = Path(source, load_kwargs.get("subfolder") or "")
    refuse_unfinished(folder)
    fields = check_config_file(source, load_kwargs)
    if load_kwargs.get("state_dict") is not None or load_kwargs.get("gguf_file") is not None:
        return CheckedFolder(fields, {})
    files, index = weight_files(folder, load_kwargs.get("variant"), fields.get("transformers_weights"))
    if not files:
        return CheckedFolder(fields, {})
    of_ranks = files[0].match(SHARDS_OF_RANKS)
    if of_ranks and not has("parts of ranks"):
        raise ValueError(needs("parts of ranks", f"A checkpoint that several ranks wrote together, as {folder},"))
    headers = read_headers_of_ranks(files, str(folder)) if of_ranks else read_headers(files, index, where=str(folder))
    check_weights(headers, is_quantized(fields), str(folder))
    check_layer_count(fields, len(headers), f"{folder / 'config.json'}")
    return CheckedFolder(fields, headers)


def check_size(
    model_class: Any, config: PreTrainedConfig, headers: dict[str, Stored], quantized: bool, what: str
) -> None:
    """Calls [`check_against_weights`] before a model is built. A model that cannot be built passes this check, because
    loading it gives a better error.
    """
    build = getattr(model_class, "from_config", None) or model_class._from_config
    try:
        with torch.device("meta"):
            model = build(copy.deepcopy(config))
    except Exception:
        return
    check_against_weights(model, headers, quantized, what)


def check_against_weights(model: nn.Module, headers: dict[str, Stored], quantized: bool, what: str) -> None:
    """Checks a model on the meta device against the weights that it is to get, before memory is allocated.

    Args:
        headers (`dict[str, Stored]`): the weights in the checkpoint.
        quantized (`bool`): whether the weights in the checkpoint are packed, so that shapes do not tell their number.
        what (`str`): names the checkpoint at the beginning of a message.

    Raises:
        ValueError: for a model that would be far larger than its weights. transformers reports other differences.
    """
    elements = sum(stored.numel for stored in headers.values())
    if quantized:
        elements *= 8 * MAX_WEIGHTS_PER_BYTE  # an element may have eight bytes
    own: dict[int, int] = {id(tensor): tensor.numel() for tensor in (*model.parameters(), *model.buffers())}
    needed = sum(own.values())
    if needed > TIMES * elements + MORE:
        raise ValueError(
            f"{what}: the checkpoint holds {elements} weights, but its configuration asks for {needed}: it was changed "
            "or belongs to another checkpoint."
        )


def check_stored(
    model: nn.Module, state_dict: object, checkpoint_files: Sequence[str | os.PathLike[str]] | None, load_config: object
) -> dict[str, Stored]:
    """Checks a model without values against the weights that it is to get, and returns what their headers say.

    Raises:
        ValueError: for files that are damaged, for weights that are integers, and for a model that is far larger than
            its weights. transformers itself refuses weights of another shape.
    """
    quantized = getattr(load_config, "hf_quantizer", None) is not None
    what = str(getattr(load_config, "pretrained_model_name_or_path", None) or "The checkpoint")
    if isinstance(state_dict, dict):
        headers = {
            name: Stored("", tuple(tensor.shape), CODES.get(tensor.dtype, ""))
            for name, tensor in state_dict.items()
            if hasattr(tensor, "shape")
        }
    elif checkpoint_files:
        index = (getattr(load_config, "sharded_metadata", None) or {}).get("weight_map") or {}
        headers = read_headers([Path(file) for file in checkpoint_files], index, where=what)
        check_weights(headers, quantized, what)
    else:
        return {}
    check_against_weights(model, headers, quantized, what)
    return headers


def warn_of_rounding(model: PreTrainedModel, headers: dict[str, Stored], what: str) -> None:
    """Warns if weights were rounded: if a loaded model holds them in a dtype that lacks values of the stored dtype."""
    own = {name: tensor.dtype for name, tensor in model.state_dict().items() if not is_quantized_weight(tensor)}
    places = places_in_memory(model, [name for name, stored in headers.items() if stored.dtype in FLOATS])
    pairs = {name: (FLOATS[headers[name].dtype], own[place]) for name, place in places.items() if place in own}
    rounded = {name: pair for name, pair in pairs.items() if torch.promote_types(*pair) != pair[1]}
    if rounded:
        name, pair = next(iter(rounded.items()))
        stored, held, wider = map(name_of_dtype, (*pair, torch.promote_types(*pair)))
        logger.warning(
            f"{what} holds {len(rounded)} weights, such as {short(name)}, in {stored}, and its configuration asks for "
            f"{held}: they were rounded, so the model answers differently from the one that was saved. To keep them, "
            f"pass `dtype=torch.{wider}`. Pass `dtype=torch.{held}` if they may be rounded."
        )


def name_of_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def refuse_other_files(checkpoint_files: Sequence[str | os.PathLike[str]] | None) -> None:
    """Raises a `ValueError` if transformers has found weights on the Hub that are no safetensors files."""
    for file in checkpoint_files or ():
        if not str(file).endswith(".safetensors"):
            raise ValueError(
                f"Expected weights in safetensors files, got {file}. Pickled weights can run code, and are not read. "
                "Convert them to safetensors, or use another revision."
            )


def weight_files_of(folder: Path) -> list[Path]:
    """Returns the files of added weights in a folder: one file, or its shards."""
    return sorted(path for shards in ("", SHARDS) for path in folder.glob(f"{WEIGHTS}{shards}.safetensors"))


def find_manifest(name: object, load_kwargs: dict[str, Any]) -> Path | None:
    """Returns the path of the manifest of added weights, or None if there is none."""
    if not isinstance(name, (str, os.PathLike)) or load_kwargs.get("state_dict") is not None:
        return None
    return find_file(os.fspath(name), MANIFEST, given(FILE_KEYWORDS, load_kwargs))


def find_file(name: str, file: str, hub: dict[str, Any]) -> Path | None:
    """Returns the path of a file in a folder or repository, and downloads it if necessary. None if it is not there."""
    quiet = {f"_raise_exceptions_for_{case}": False for case in ("gated_repo", "missing_entries", "connection_errors")}
    found = cached_file(name, file, **quiet, **hub)
    if found is None:
        return None
    if os.path.isdir(name):
        check_inside(Path(name), Path(found))
    return Path(found)


class PeftFolder(NamedTuple):
    """A checkpoint with an adapter of PEFT."""

    name: str  # its folder or Hub id
    base: str  # folder or Hub id of the model below it. This is `name` if one folder holds both
    hub: dict[str, Any]  # keyword arguments that say where the files of the adapter are
    revision: str | None  # of the base

    def base_kwargs(self, load_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the caller's keyword arguments for the base, with the base's own revision and without a subfolder."""
        if self.base == self.name:
            return load_kwargs
        apart = ("adapter_name", "adapter_kwargs", "revision", "subfolder")
        kept = {name: value for name, value in load_kwargs.items() if name not in apart}
        return kept if self.revision is None else {**kept, "revision": self.revision}


def find_peft(checkpoint: object, load_kwargs: dict[str, Any]) -> PeftFolder | None:
    """Reads the configuration of an adapter. Returns None if the checkpoint is no adapter."""
    if not isinstance(checkpoint, (str, os.PathLike)) or not is_peft_available():
        return None
    hub = given(FILE_KEYWORDS, load_kwargs)
    of_adapter = dict(load_kwargs.get("adapter_kwargs") or {})
    # An Auto class sets this name, and replaces `checkpoint` by the base.
    known = of_adapter.pop("_adapter_model_path", None)
    name = os.fspath(checkpoint if known is None else known)
    if known is not None:
        hub.pop("subfolder", None)
    hub.update(given(of_adapter, of_adapter))
    file = find_adapter_config_file(name, **hub)
    if file is None:
        return None
    fields = read_json(Path(file))
    own = fields.get("revision")
    if known is not None:
        return PeftFolder(name, os.fspath(checkpoint), hub, own or load_kwargs.get("revision"))
    if Path(name, hub.get("subfolder", ""), "config.json").is_file():
        return PeftFolder(name, name, hub, None)
    # A folder has no revisions, so the caller's revision is meant for the base.
    asked = load_kwargs.get("revision") if os.path.isdir(name) else None
    return PeftFolder(name, os.fspath(fields["base_model_name_or_path"]), hub, asked or own)


def check_adapter_folder(name: object, hub: dict[str, Any]) -> None:
    """Checks an adapter before layers are added to a model. `hub` is as in [`PeftFolder`].

    Raises:
        ValueError: for a save that was cut off, for a file that is not whole or leads out of the folder, for a rank
            that no weight has, and for `modules_to_save` that the installed transformers would not load.
    """
    if not isinstance(name, (str, os.PathLike)):
        return
    folder = Path(name) / (hub.get("subfolder") or "")
    if os.path.isdir(name):
        refuse_unfinished(folder)
    if not has("modules_to_save") and (file := find_adapter_config_file(os.fspath(name), **hub)) is not None:
        fields = read_json(Path(file))
        for field in ("modules_to_save", "trainable_token_indices"):
            if fields.get(field):
                raise ValueError(
                    f"{needs('modules_to_save', f'`{field}` of the adapter {name}')} "
                    "`peft.PeftModel.from_pretrained(model, adapter)` loads it with this version, too."
                )
    weights, config = folder / PEFT_WEIGHTS, folder / PEFT_CONFIG
    if weights.is_file() and config.is_file():
        for path in (weights, config):
            check_inside(folder, path)
        sizes = [size for stored in read_headers([weights], {}, str(folder)).values() for size in stored.shape]
        most = max(sizes, default=0)
        fields = read_json(config)
        for rank in (fields.get("r"), *(fields.get("rank_pattern") or {}).values()):
            if rank is not None and not 0 <= rank <= most:  # PEFT makes layers of this rank before it reads weights
                raise ValueError(f"{config}: expected `r` to be the rank of the weights, from 0 to {most}, got {rank}.")


def check_adapter_target(target: Path, base: str | None) -> None:
    """Raises a `ValueError` for a folder with a whole model, because an adapter in it would be loaded on that model.

    The folder of `base`, the model below the adapter, is allowed.
    """
    if base and os.path.isdir(base) and target.is_dir() and os.path.samefile(base, target):
        return
    files = (target / MANIFEST, *target.glob("model*.safetensors"), *target.glob(SHARDS_OF_RANKS))
    if (target / "config.json").is_file() and (whole := [path.name for path in files if path.is_file()]):
        raise ValueError(
            f"{target} holds a whole model ({whole[0]}), on which an adapter (PEFT) in the same folder would be loaded "
            f"in place of its base ({base or 'a model without a name'}). Choose another folder."
        )


def check_target(target: Path, adapter_only: bool = True) -> None:
    """Raises a `ValueError` if a folder holds something that would be loaded in place of the save, or on top of it."""
    if target.is_file():
        raise ValueError(f"Expected `save_directory` to be a folder, got {target}, a file. Choose another name.")
    if adapter_only and (whole := sorted(path.name for path in target.glob("model*.safetensors"))):
        raise ValueError(f"`adapter_only=True`: {target} holds a whole model ({whole[0]}). Choose another folder.")
    if (target / PEFT_CONFIG).is_file():
        raise ValueError(
            f"{target} holds an adapter of PEFT ({PEFT_CONFIG}), which would be loaded, too. Choose another folder."
        )
