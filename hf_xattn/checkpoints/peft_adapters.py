"""Adapters of PEFT: which model a folder of one stands on, checks of its files, and their layers in a model.

The layers rename the weights below them, so what is saved with them loads into no other model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from transformers.utils import find_adapter_config_file, is_peft_available, logging

from ..utils.checkpoint_files import PICKLED, check_inside, read_headers, read_json, refuse_pickled, short
from ..utils.keywords import FILE_KEYWORDS, given
from ..utils.transformers_api import has, needs
from ..utils.whole_folder import refuse_unfinished


PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SAVE_OR_MERGE = (
    "Save the adapter by itself, with `save_pretrained` of the `PeftModel`, or merge it first: `merge_and_unload()`."
)

logger = logging.get_logger(__name__)


class PeftFolder(NamedTuple):
    """A checkpoint with an adapter."""

    name: str  # its folder or Hub id
    base: str  # folder or Hub id of the model below it; its own name if it holds both
    hub: dict[str, Any]  # where the adapter's files are
    revision: str | None  # of the base

    def base_kwargs(self, load_kwargs: dict[str, Any]) -> dict[str, Any]:
        """The caller's keywords for loading the base: its own revision, and no subfolder."""
        if self.base == self.name:
            return load_kwargs
        apart = ("adapter_name", "adapter_kwargs", "revision", "subfolder")
        kept = {name: value for name, value in load_kwargs.items() if name not in apart}
        return kept if self.revision is None else {**kept, "revision": self.revision}


def find_peft(checkpoint: Any, load_kwargs: dict[str, Any]) -> PeftFolder | None:
    """Reads the configuration of an adapter, or returns None. Raises a `ValueError` if it is damaged."""
    if not isinstance(checkpoint, (str, os.PathLike)) or not is_peft_available():
        return None
    hub = given(FILE_KEYWORDS, load_kwargs)
    of_adapter = dict(load_kwargs.get("adapter_kwargs") or {})
    known = of_adapter.pop("_adapter_model_path", None)  # from an Auto class, which has replaced `checkpoint`
    name = os.fspath(checkpoint if known is None else known)
    if known is not None:
        hub.pop("subfolder", None)
    hub.update({key: value for key, value in of_adapter.items() if value is not None})
    file = find_adapter_config_file(name, **hub)
    if file is None:
        return None
    fields = read_json(Path(file))
    if os.path.isdir(name):
        check_inside(Path(name), Path(file))
    own = fields.get("revision")
    if own is not None and not isinstance(own, str):
        raise ValueError(f"{file}: expected `revision` to be a text, got {short(own)}.")
    if known is not None:
        return PeftFolder(name, os.fspath(checkpoint), hub, own or load_kwargs.get("revision"))
    if Path(name, hub.get("subfolder", ""), "config.json").is_file():
        return PeftFolder(name, name, hub, None)
    base = fields.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ValueError(f"{file}: expected `base_model_name_or_path` to be a folder or a Hub id, got {short(base)}.")
    # A folder has no revisions, so the caller's is the base's.
    asked = load_kwargs.get("revision") if os.path.isdir(name) else None
    return PeftFolder(name, base, hub, asked or own)


def check_adapter_folder(name: Any, hub: dict[str, Any]) -> None:
    """Checks an adapter before layers are added to a model. `hub` is as in [`PeftFolder`].

    Raises:
        ValueError: for a folder in which a save was cut off, pickled weights, a file that is not whole or leads out of
            the folder, a rank that no weight has, and whole modules that the installed transformers would not load.
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
    if not os.path.isdir(name):
        return
    weights, config = folder / PEFT_WEIGHTS, folder / PEFT_CONFIG
    if not weights.is_file():
        if any(path.stem == "adapter_model" for pattern in PICKLED for path in folder.glob(pattern)):
            refuse_pickled(folder, str(folder))
        return
    check_inside(folder, weights)
    headers = read_headers([weights], {}, where=str(folder))
    if not config.is_file():
        return
    check_inside(folder, config)
    fields = read_json(config)
    most = max((size for stored in headers.values() for size in stored.shape), default=0)
    pattern = fields.get("rank_pattern")
    for rank in (fields.get("r"), *(pattern.values() if isinstance(pattern, dict) else ())):
        if rank is None:
            continue
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank <= most:
            raise ValueError(
                f"{config}: expected `r` to be the rank of the weights, from 0 to {most}, got {short(rank)}."
            )


def refuse_adapter_layers(module: nn.Module, what: str, remedy: str) -> None:
    """Raises a `ValueError` for a module with layers of an adapter. `what` and `remedy` are parts of its message."""
    for layer, _ in adapter_layers(module):
        raise ValueError(
            f"{what} a model that holds LoRA layers or other layers of an adapter (PEFT): {layer} is one. {remedy}"
        )


def adapter_layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers with an adapter, or of `modules_to_save`, in a module, by name."""
    for name, part in module.named_modules():
        if isinstance(getattr(part, "_disable_adapters", None), bool):  # which both have, and no `PreTrainedModel`
            yield name, part


def warn_of_tower(model: Any) -> None:
    """Warns once of an adapter whose short names, such as `"q_proj"`, mean layers of the vision tower, too.

    PEFT calls nothing of a model when it adds layers. So this is called where training begins.
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
            f"The adapter trains {count} layers of the vision tower, too: its `target_modules` "
            f"({', '.join(sorted(names)[:3])}) are ends of names, which layers of the tower have as well. For the text "
            "model alone pass `target_modules=hf_xattn.lora_targets(model)`."
        )
