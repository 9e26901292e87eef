"""What commands read: a saved model, or its shapes alone, and with it a processor and images."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from PIL.Image import Image

    from ..modeling_xattn import XAttnForConditionalGeneration

DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_model_and_images(parser: argparse.ArgumentParser, images_required: bool) -> None:
    """The options that `load_model_and_images` reads."""
    parser.add_argument("model", metavar="DIR", help="a retrofitted model: a folder or a Hub id")
    parser.add_argument(
        "--image",
        action="append",
        type=Path,
        required=images_required,
        metavar="FILE",
        help="may be given several times",
    )
    parser.add_argument("--dtype", default="auto", choices=DTYPES)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")


def load_model_and_images(arguments: argparse.Namespace) -> tuple[XAttnForConditionalGeneration, Any, list[Image]]:
    """A model, its processor (of a model that was saved without one, its tokenizer) and the images of `--image`.

    Raises:
        ValueError: for a file that is missing, a model without blocks, or images without an image processor.
    """
    files: list[Path] = arguments.image or []
    for file in files:
        if not file.is_file():
            raise ValueError(f"`--image` ({file}) is not a file.")
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    check_model(arguments.model)
    processor = AutoProcessor.from_pretrained(arguments.model)
    images = [Image.open(file).convert("RGB") for file in files]
    model = AutoModelForImageTextToText.from_pretrained(arguments.model, dtype=arguments.dtype)
    model = model.to(arguments.device).eval()
    if images and getattr(processor, "image_processor", None) is None:
        raise ValueError(f"{arguments.model} has no image processor, so `--image` cannot be read.")
    return model, _with_images_at_markers(processor, model), images


def load_shapes(name: str) -> XAttnForConditionalGeneration:
    """A saved model on the meta device: nothing is read but its configuration.

    Raises:
        ValueError: for a model without blocks.
    """
    check_model(name)
    import torch

    from ..configuration_xattn import XAttnConfig
    from ..modeling_xattn import XAttnForConditionalGeneration

    config = XAttnConfig.from_pretrained(name)
    with torch.device("meta"):
        return XAttnForConditionalGeneration._from_config(config)


def check_model(name: str) -> None:
    """Raises a `ValueError` for a model without blocks."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(name)
    if config.model_type != "xattn":
        raise ValueError(
            f"{name} is a {config.model_type!r} model without cross-attention blocks: "
            f"run `hf-xattn retrofit {name}` first."
        )


def _with_images_at_markers(processor: Any, model: XAttnForConditionalGeneration) -> Any:
    """The processor itself; for Idefics', which puts images where it likes, one that follows the prompt's markers."""
    if type(processor).__name__ != "IdeficsProcessor":
        return processor
    from ..processing_xattn import XAttnProcessor

    marker = processor.tokenizer.convert_ids_to_tokens(model.config.image_token_id)
    return XAttnProcessor(processor.image_processor, processor.tokenizer, image_token=marker)
