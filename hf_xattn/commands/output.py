"""What commands produce: a new folder, the processor for it, a report on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .loading import DamagedError, undamaged


if TYPE_CHECKING:
    from ..modeling_xattn import XAttnForConditionalGeneration


def new_folder(folder: Path) -> Path:
    """Returns a folder that is new or empty. Raises a `ValueError` for any other."""
    from ..utils.whole_folder import is_free

    if not is_free(folder):
        raise ValueError(f"`--output` ({folder}) must be new or empty, but it exists and is not an empty folder.")
    return folder


def read_processor(
    text: str, vision: str | None, output: Path, *, image_token_id: int | None = None, **load_kwargs: Any
) -> Any:
    """Reads the tokenizer of a text model and the image processor of a vision model. Prints which of them is missing.

    Args:
        output (`Path`): the folder that the result goes to, for messages.
        load_kwargs: keyword arguments of both `from_pretrained` calls; and `gguf_file`, for the tokenizer.

    Returns:
        An [`XAttnProcessor`], the tokenizer if there is no image processor, or None if there is no tokenizer.
    """
    from transformers import AutoTokenizer

    from ..checkpoints.gguf_files import split_gguf
    from ..processing_xattn import XAttnProcessor
    from ..utils.transformers_api import AutoImageProcessor, check_tokenizer

    source, text_kwargs = split_gguf("text", text, load_kwargs)
    check_tokenizer(text_kwargs.get("gguf_file"))
    load_kwargs.pop("gguf_file", None)
    tokenizer = _read(AutoTokenizer, source, "tokenizer", text, text_kwargs)
    if tokenizer is None:
        print(f"No processor saved: {text} has no tokenizer.")
        return None
    if vision is None:
        return tokenizer
    image_processor = _read(AutoImageProcessor, vision, "image processor", vision, load_kwargs)
    if image_processor is None:
        print(f"Processor saved without images: {vision} has no image processor.")
        return tokenizer
    image_token: Any = None
    if image_token_id is not None and image_token_id < len(tokenizer):
        image_token = tokenizer.convert_ids_to_tokens(image_token_id)
    elif image_token_id is not None:
        print(
            f"The tokenizer of {text} has no token {image_token_id}: add OpenFlamingo's tokens "
            f"(<|endofchunk|>, <image>) to the tokenizer in {output} before you use it."
        )
    return XAttnProcessor(image_processor, tokenizer, image_token=image_token)


def _read(auto_class: Any, source: str, what: str, where: str, load_kwargs: dict[str, Any]) -> Any:
    """A tokenizer or an image processor. None if there is none."""
    try:
        with undamaged(what, where):
            return auto_class.from_pretrained(source, **load_kwargs)
    except DamagedError:
        raise
    except (OSError, ValueError):
        return None


def print_report(model: XAttnForConditionalGeneration) -> None:
    """Prints what the model's blocks add, one figure a line."""
    from ..checkpoints.model_card import describe

    for name, value in describe(model).items():
        print(f"{name:<34} {value}")
