"""`hf-xattn encode`: runs the vision tower once, and saves what it gives.

Of images: the keys and values of all blocks, to ask questions about them. Of a folder of training data: the outputs of
the tower, to train connector and blocks.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from .shared import (
    add_images,
    add_model,
    add_number,
    check_model,
    device_of,
    hub_options,
    load_model_and_images,
    load_processor,
)


# Options that only go with `--features`, with their defaults.
OF_FEATURES = {"batch_size": 8, "workers": 0, "shard_size": 256.0}
MIB = 2**20


def register_encode(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "encode",
        help="save keys and values of images to a file, or the vision tower's outputs for training data to a folder",
    )
    add_model(parser)
    images = parser.add_mutually_exclusive_group(required=True)
    add_images(images)
    images.add_argument(
        "--features",
        metavar="SOURCE",
        action="append",
        help="run the frozen vision tower once over all pictures of a source (that of `hf-xattn train --data`); "
        "`hf-xattn train --features` reads what it returns. A run that was stopped goes on where it was. Several "
        "processes (accelerate launch, torchrun) share the pictures",
    )
    pictures = "with --features: where names of pictures begin (default: the folder of the source)"
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help=pictures)
    output = "a .safetensors file; with --features a folder"
    parser.add_argument("--output", type=Path, required=True, metavar="PATH", help=output)
    add_number(parser, "--batch-size", None, "pictures that the tower reads at once (default: 8)")
    add_number(parser, "--workers", None, "processes that read pictures (default: 0)")
    add_number(parser, "--shard-size", None, "size of a file of features (default: 256)", float, "MIB")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    (_encode_images if arguments.features is None else _encode_folder)(arguments)


def _encode_images(arguments: argparse.Namespace) -> None:
    for name in (*OF_FEATURES, "pictures"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"`--{name.replace('_', '-')}` goes with `--features`, got `--image`. Remove it.")
    output: Path = arguments.output
    if output.exists():
        raise ValueError(f"`--output` must be a new file, got {output}, which exists already.")
    model, processor, images = load_model_and_images(arguments)
    import torch

    from ..storage.image_files import save_image_cache

    inputs = _of_images(processor)(images=[images])
    with torch.no_grad():
        cache = model.encode_images(**{name: value.to(model.device) for name, value in inputs.items()})
    save_image_cache(cache, output, model)
    print(f"{len(images)} image(s), {output.stat().st_size:,} bytes: {output}")


def _encode_folder(arguments: argparse.Namespace) -> None:
    options = {name: getattr(arguments, name) for name in OF_FEATURES}
    options = {name: OF_FEATURES[name] if value is None else value for name, value in options.items()}
    for name, least in (("batch_size", 1), ("workers", 0), ("shard_size", 1e-6)):
        if not least <= options[name] < math.inf:
            raise ValueError(f"`--{name.replace('_', '-')}` must be at least {least:g}, got {options[name]}.")
    output: Path = arguments.output
    if output.is_file():
        raise ValueError(f"`--output` must be a folder with `--features`, got {output}, which is a file.")
    from ..data.loading import load_rows_once
    from ..training.bad_rows import list_problems, read_problems
    from ..training.run_data import STREAM_ROWS

    device = device_of(arguments.device)
    rows = load_rows_once("--features", arguments.features, arguments.pictures)
    if len(rows) <= STREAM_ROWS and (found := read_problems(rows)):
        raise ValueError(list_problems(rows, found))
    hub = hub_options(arguments)
    check_model(arguments.model, **hub)
    processor = load_processor(arguments.model, **hub)
    if getattr(processor, "image_processor", None) is None:
        raise ValueError(f"`--features` needs an image processor, but {arguments.model} was saved without one.")
    from accelerate.utils import get_cpu_distributed_information
    from transformers import AutoModelForImageTextToText

    from ..training.vision_features import encode_pictures, tower_of

    process = get_cpu_distributed_information()  # what the launcher has set, also for GPUs
    model = AutoModelForImageTextToText.from_pretrained(arguments.model, dtype=arguments.dtype, **hub)
    tower_of(model).to(_own_device(device, process.local_rank, process.world_size))
    done = encode_pictures(
        model,
        _of_images(processor),
        rows,
        output,
        batch_size=options["batch_size"],
        workers=options["workers"],
        shard_bytes=int(options["shard_size"] * MIB),
        rank=process.rank,
        world_size=process.world_size,
    )
    who = "" if process.world_size == 1 else f"process {process.rank}: "
    print(f"{who}{done.new} picture(s) encoded, {done.known} known, {done.nbytes:,} bytes: {output}")
    if done.problems:
        lines = [f"\n  {name}: {reason}" for name, reason in done.problems.items()]
        raise ValueError(f"{len(lines)} picture(s) cannot be read. The others are encoded.{''.join(lines[:20])}")
    if not done.new + done.known and process.world_size == 1:
        raise ValueError(f"Expected `--features` to hold pictures, got no picture in {rows}.")


def _own_device(device: str, local_rank: int, world_size: int) -> str:
    return f"{device}:{local_rank}" if world_size > 1 and device != "cpu" and ":" not in device else device


def _of_images(processor: Any) -> Any:
    """An [`XAttnProcessor`]: other processors make other inputs of images without text."""
    from ..processing_xattn import XAttnProcessor

    if isinstance(processor, XAttnProcessor):
        return processor
    return XAttnProcessor(processor.image_processor, processor.tokenizer)
