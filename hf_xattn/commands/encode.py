"""`hf-xattn encode`: runs the vision tower and the K/V projections once, and saves keys and values to a file."""

from __future__ import annotations

import argparse
from pathlib import Path

from .loading import add_model_and_images, load_model_and_images


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("encode", help="save the keys and values of images to a file")
    add_model_and_images(parser, images_required=True)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="a .safetensors file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    output: Path = arguments.output
    if output.exists():
        raise ValueError(f"`--output` ({output}) must be a new file, but it exists already.")
    model, processor, images = load_model_and_images(arguments)
    import torch

    from ..image_cache import save_image_cache
    from ..processing_xattn import XAttnProcessor

    if not isinstance(processor, XAttnProcessor):  # other processors make other inputs of images without text
        processor = XAttnProcessor(processor.image_processor, processor.tokenizer)
    inputs = processor(images=[images])
    with torch.no_grad():
        cache = model.encode_images(**{name: value.to(model.device) for name, value in inputs.items()})
    save_image_cache(cache, output, model)
    print(f"{len(images)} image(s), {output.stat().st_size:,} bytes: {output}")
