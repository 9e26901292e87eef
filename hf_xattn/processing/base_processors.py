"""Builds a processor for a small checkpoint (`adapter_only=True`) that has none, from those of its bases."""

from __future__ import annotations

import os
from typing import Any

from transformers import AutoTokenizer
from transformers.utils import IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, logging

from ..checkpoints.adapters import SmallCheckpoint
from ..checkpoints.bases import BaseSource
from ..configuration_xattn import XAttnConfig
from ..utils.keywords import HUB_KEYWORDS, given
from ..utils.transformers_api import AutoImageProcessor


logger = logging.get_logger(__name__)

FILES = (PROCESSOR_NAME, IMAGE_PROCESSOR_NAME, "tokenizer_config.json")


def parts_of_bases(name: str | os.PathLike[str], load_kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Loads the tokenizer and the image processor of the bases of a small checkpoint, and warns that it does so.

    Args:
        name (`str` or `os.PathLike`): the checkpoint.
        load_kwargs (`dict`): arguments of `from_pretrained`.

    Returns:
        Arguments of [`XAttnProcessor`]. `image_processor` is None if the model has no vision tower. None for a folder
        that has a processor, and for any other checkpoint.

    Raises:
        ValueError: if a base has no such files, or if the tokenizer does not have the marker of the model.
    """
    saved = SmallCheckpoint.find(name, load_kwargs)
    text = None if saved is None else saved.recorded_base("text_base")
    if saved is None or text is None or any(saved.has(file) for file in FILES):
        return None
    hub = given((*HUB_KEYWORDS, "trust_remote_code"), load_kwargs)
    own: dict[str, Any] = {name: load_kwargs[name] for name in ("chat_template", "image_token") if name in load_kwargs}
    known = {*HUB_KEYWORDS, *own, "trust_remote_code", "code_revision", "subfolder"}
    settings = {name: value for name, value in load_kwargs.items() if name not in known and not name.startswith("_")}
    vision = saved.recorded_base("vision_base")
    tokenizer = _load(AutoTokenizer, text, saved.name, {**settings, **hub})
    image_processor = None if vision is None else _load(AutoImageProcessor, vision, saved.name, {**settings, **hub})
    token_id = XAttnConfig.from_pretrained(saved.name, **saved.hub).image_token_id
    if token_id is not None and token_id >= len(tokenizer):
        raise ValueError(
            f"{saved.name} holds no processor, and the tokenizer of its base {text} has no token {token_id}, which is "
            "the image marker of the model. Save the processor that the model was trained with into the folder."
        )
    logger.warning_once(
        f"{saved.name} holds no processor. A processor is made from the tokenizer of {text}"
        + ("." if vision is None else f" and the image processor of {vision}.")
        + " If it needs other settings, such as a chat template, save a processor into the folder."
    )
    token = None if token_id is None else tokenizer.convert_ids_to_tokens(token_id)
    return {"tokenizer": tokenizer, "image_processor": image_processor, "image_token": token, **own}


def _load(auto_class: Any, base: BaseSource, name: str, hub: dict[str, Any]) -> Any:
    try:
        return base.load(auto_class.from_pretrained, **hub)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name} holds no processor, and {auto_class.__name__} finds none in its base {base} ({error}). Save a "
            "processor into the folder."
        ) from error
