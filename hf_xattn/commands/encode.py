"""`hf-xattn encode`: saves the keys and values of images in all blocks, to ask questions about them.
`hf-xattn encode-features`: saves what the frozen vision tower returns for training data, for `hf-xattn train`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .shared import (
    add_images,
    add_model,
    add_number,
    check_model,
    device_of,
    hub_options,
    images_alone,
    load_model_and_images,
    load_processor,
)


MIB = 2**20


def register_encode(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("encode", help="save keys and values of images to a file")
    add_model(parser)
    add_images(parser, required=True)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="a new .safetensors file")
    parser.set_defaults(run=_encode)


def _encode(arguments: argparse.Namespace) -> None:
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


def register_encode_features(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "encode-features",
        help="save the vision tower's outputs for training data to a folder",
        epilog="`hf-xattn train --features` reads the folder. A run that was stopped goes on where it was. Several "
        "processes (accelerate launch, torchrun) share the pictures.",
    )
    add_model(parser)
    data = "a source of pictures, as of `hf-xattn train`; several may be given"
    parser.add_argument("--data", action="append", required=True, metavar="SOURCE", help=data)
    pictures = "where names of pictures begin (default: the folder of the source)"
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help=pictures)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="folder of the features")
    add_number(parser, "--batch-size", 8, "pictures that the tower reads at once")
    add_number(parser, "--workers", 0, "processes that read pictures", least=0)
    add_number(parser, "--shard-size", 256.0, "size of a file of features", float, "MIB", least=1e-6)
    parser.set_defaults(run=_encode_features)


def _encode_features(arguments: argparse.Namespace) -> None:
    output: Path = arguments.output
    from ..data.loading import load_rows_once

    device = device_of(arguments.device)
    rows = load_rows_once("--data", arguments.data, arguments.pictures)
    hub = hub_options(arguments)
    check_model(arguments.model, **hub)
    processor = load_processor(arguments.model, **hub)
    if getattr(processor, "image_processor", None) is None:
        raise ValueError(f"Expected a model with an image processor, but {arguments.model} was saved without one.")
    from accelerate.utils import get_cpu_distributed_information
    from transformers import AutoModelForImageTextToText

    from ..training.vision_features import encode_pictures, tower_of

    process = get_cpu_distributed_information()  # what the launcher has set, also for GPUs
    model = AutoModelForImageTextToText.from_pretrained(arguments.model, dtype=arguments.dtype, **hub)
    tower_of(model).to(_own_device(device, process.local_rank, process.world_size))
    done = encode_pictures(
        model,
        images_alone(processor),
        rows,
        output,
        batch_size=arguments.batch_size,
        workers=arguments.workers,
        shard_bytes=int(arguments.shard_size * MIB),
        rank=process.rank,
        world_size=process.world_size,
    )
    who = "" if process.world_size == 1 else f"process {process.rank}: "
    print(f"{who}{done.new} picture(s) encoded, {done.known} known, {done.nbytes:,} bytes: {output}")
    if done.problems:
        lines = [f"\n  {name}: {reason}" for name, reason in done.problems.items()]
        raise ValueError(f"{len(lines)} picture(s) cannot be read. The others are encoded.{''.join(lines[:20])}")
    if not done.new + done.known and process.world_size == 1:
        raise ValueError(f"Expected `--data` to hold pictures, got no picture in {rows}.")


def _own_device(device: str, local_rank: int, world_size: int) -> str:
    return f"{device}:{local_rank}" if world_size > 1 and device != "cpu" and ":" not in device else device
