"""`hf-xattn encode`: saves the keys and values of images in all blocks, to ask questions about them."""

from __future__ import annotations

import argparse
from pathlib import Path

from .shared import add_images, add_model, images_alone, load_model_and_images


def register_encode(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("encode", help="save keys and values of images to a file")
    add_model(parser)
    add_images(parser, required=True)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="a new .safetensors file")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    output: Path = arguments.output
    if output.exists():
        raise ValueError(f"`--output` must be a new file, got {output}, which exists already.")
    model, processor, images = load_model_and_images(arguments)
    import torch

    from ..storage.image_files import save_image_cache

    inputs = images_alone(processor)(images=[images])
    with torch.no_grad():
        cache = model.encode_images(**{name: value.to(model.device) for name, value in inputs.items()})
    save_image_cache(cache, output, model)
    print(f"{len(images)} image(s), {output.stat().st_size:,} bytes: {output}")
