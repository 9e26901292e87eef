"""Writes what commands produce: a new folder, a processor in the folder, a report on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from ..modeling_xattn import XAttnForConditionalGeneration


def new_folder(folder: Path) -> Path:
    """Checks that `folder` is new or empty, and returns it. What a killed process left there is removed.

    Raises:
        ValueError: if `folder` is a file or a folder that is not empty.
    """
    from ..whole_folder import clear_interrupted

    clear_interrupted(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"`--output` ({folder}) must be new or empty, but it exists and is not an empty folder.")
    return folder


def save_processor(
    text: str,
    vision: str | None,
    folder: Path,
    *,
    output: Path | None = None,
    image_token_id: int | None = None,
    **load_kwargs: Any,
) -> None:
    """Saves the tokenizer of a text model and the image processor of a vision model. Either of them may be missing.

    Args:
        text (`str`), vision (`str`, *optional*): folders or Hub ids. `text` may be the path of a GGUF file.
        folder (`Path`): where the files go.
        output (`Path`, *optional*): folder to name in messages, if `folder` is temporary and will be renamed to it.
        image_token_id (`int`, *optional*): id of the token that marks an image in a text.
        load_kwargs: keyword arguments of both `from_pretrained` calls: `revision`, `trust_remote_code`, ...; and `gguf_file`, for
            the tokenizer.
    """
    from transformers import AutoTokenizer

    from ..gguf_files import split_gguf
    from ..processing_xattn import XAttnProcessor
    from ..transformers_api import AutoImageProcessor

    source, text_kwargs = split_gguf("text", text, load_kwargs)
    load_kwargs.pop("gguf_file", None)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **text_kwargs)
    except (OSError, ValueError):
        print(f"No processor saved: {text} has no tokenizer.")
        return
    image_processor = None
    if vision is not None:
        try:
            image_processor = AutoImageProcessor.from_pretrained(vision, **load_kwargs)
        except (OSError, ValueError):
            print(f"Processor saved without images: {vision} has no image processor.")
    if image_processor is None:
        tokenizer.save_pretrained(folder)
        return
    image_token = _token(tokenizer, image_token_id)
    if image_token_id is not None and image_token is None:
        print(
            f"The tokenizer of {text} has no token {image_token_id}: add OpenFlamingo's tokens "
            f"(<|endofchunk|>, <image>) to the tokenizer in {output or folder} before you use it."
        )
    XAttnProcessor(image_processor, tokenizer, image_token=image_token).save_pretrained(folder)


def _token(tokenizer: Any, token_id: int | None) -> str | None:
    """Returns the token of an id. Returns None if the id is None or outside the vocabulary."""
    if token_id is None or token_id >= len(tokenizer):
        return None
    return tokenizer.convert_ids_to_tokens(token_id)


def print_report(model: XAttnForConditionalGeneration) -> None:
    """Prints what the model's blocks add, one figure a line."""
    from ..inspection import describe

    for name, value in describe(model).items():
        print(f"{name:<34} {value}")
