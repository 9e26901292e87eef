"""Loads a saved model (or only its shapes), its processor and images, for the commands."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .options import add_device, add_trust, device_of, hub_options


if TYPE_CHECKING:
    from PIL.Image import Image

    from ..modeling_xattn import XAttnForConditionalGeneration

DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_model_and_images(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `load_model_and_images` reads."""
    add_model(parser)
    add_images(parser)


def add_images(parser: argparse._ActionsContainer) -> None:
    """Adds the option of the images, which are not required."""
    parser.add_argument(
        "--image", action="append", metavar="FILE", help="an image; repeat the option for several images"
    )


def add_model(parser: argparse.ArgumentParser, device: str = "auto") -> None:
    """Adds the options that `load_model_and_images` reads, except the images. `device` is the default."""
    parser.add_argument("model", metavar="DIR", help="a retrofitted model: a folder or a Hub id")
    parser.add_argument("--dtype", default="auto", choices=DTYPES)
    add_device(parser, default=device)
    add_trust(parser)


def load_model_and_images(arguments: argparse.Namespace) -> tuple[XAttnForConditionalGeneration, Any, list[Image]]:
    """Loads a model, its processor, or its tokenizer if it has no processor, and the images of `--image`.

    Raises a `ValueError` for a missing file, a model without blocks, or images without an image processor.
    """
    files: list[str] = arguments.image or []
    for file in files:
        if not Path(file).is_file():
            kind = "a web address. Download it first" if "://" in file else "which is not a file"
            raise ValueError(f"Expected `--image` to be a file, got {file}, {kind}.")
    device = device_of(arguments.device)
    from transformers import AutoModelForImageTextToText

    from ..checkpoints.model_card import blindness
    from ..processing.image_reading import read_image

    hub = hub_options(arguments)
    check_model(arguments.model, **hub)
    processor = load_processor(arguments.model, **hub)
    images = [read_image(Path(file), "--image") for file in files]
    model = AutoModelForImageTextToText.from_pretrained(arguments.model, dtype=arguments.dtype, **hub)
    model = model.to(device).eval()
    if (why := blindness(model)) is not None:
        print(f"{arguments.model}: {why}", file=sys.stderr, flush=True)
    if images and getattr(processor, "image_processor", None) is None:
        raise ValueError(f"`--image` needs an image processor, but {arguments.model} was saved without one.")
    return model, _with_images_at_markers(processor, model), images


class DamagedError(ValueError):
    """A tokenizer or a processor is there, but cannot be read."""


@contextmanager
def undamaged(what: str, source: str) -> Iterator[None]:
    """Raises a `DamagedError` for a damaged file. For a missing one transformers' own error says so."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (OSError, ValueError, ImportError)) and not isinstance(error, json.JSONDecodeError):
            raise
        raise DamagedError(
            f"The {what} of {source} is damaged, or of a kind that transformers does not read: {type(error).__name__}: "
            f"{error}"
        ) from error


def load_processor(name: str, **hub: Any) -> Any:
    """Loads the processor of a model, or its tokenizer if the model was saved without an image processor."""
    from transformers import AutoProcessor, AutoTokenizer
    from transformers.utils import IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, cached_file

    from ..processing.base_processors import parts_of_bases

    parts = parts_of_bases(name, hub)
    if parts is not None and parts["image_processor"] is None:
        return parts["tokenizer"]
    absent_is_none = {f"_raise_exceptions_for_{case}": False for case in ("missing_entries", "connection_errors")}
    files = (cached_file(name, file, **absent_is_none) for file in (PROCESSOR_NAME, IMAGE_PROCESSOR_NAME))
    only_text = parts is None and all(file is None for file in files)
    with undamaged("processor", name):
        return (AutoTokenizer if only_text else AutoProcessor).from_pretrained(name, **hub)


def load_shapes(name: str, **hub: Any) -> XAttnForConditionalGeneration:
    """Builds a saved model on the meta device. Reads only the configuration. Errors as [`check_model`]."""
    check_model(name, **hub)
    import torch

    from ..configuration_xattn import XAttnConfig
    from ..modeling_xattn import XAttnForConditionalGeneration
    from ..utils.custom_code import trusting

    with trusting(name, hub), torch.device("meta"):
        return XAttnForConditionalGeneration._from_config(XAttnConfig.from_pretrained(name))


def check_model(name: str, **hub: Any) -> None:
    """Raises a `ValueError` for a model without blocks, and an error for a name that is no folder and no Hub id.

    `hub` is what `hub_options` returns, here and elsewhere.
    """
    from transformers import AutoConfig

    from ..checkpoints.gguf_files import is_gguf_path
    from ..utils.checkpoint_files import both_readings, check_source

    retrofit = f"`hf-xattn retrofit {name} --vision VISION_MODEL --output DIR`"
    if is_gguf_path(name):
        raise ValueError(
            f"Expected a model with cross-attention blocks, got {name}, a GGUF file. Run {retrofit} first."
        )
    check_source("model", name)
    with both_readings(name):
        config = AutoConfig.from_pretrained(name, **hub)
    if config.model_type != "xattn":
        raise ValueError(
            f"Expected a model with cross-attention blocks, got {name}, a {config.model_type!r} model without "
            f"cross-attention blocks. Run {retrofit} first."
        )


def _with_images_at_markers(processor: Any, model: XAttnForConditionalGeneration) -> Any:
    """Returns the processor. An `IdeficsProcessor` becomes an [`XAttnProcessor`], which follows markers."""
    if type(processor).__name__ != "IdeficsProcessor":
        return processor
    from ..processing_xattn import XAttnProcessor

    marker = processor.tokenizer.convert_ids_to_tokens(model.config.image_token_id)
    return XAttnProcessor(processor.image_processor, processor.tokenizer, image_token=marker)
