"""`hf-xattn train`: trains a retrofitted model on pictures with texts.
`hf-xattn encode-features`: saves what the frozen vision tower returns for training data, for `hf-xattn train`.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from ..training.training_options import TrainingOptions
from .shared import (
    add_data,
    add_device,
    add_model,
    add_number,
    add_trust,
    check_images,
    check_model,
    device_of,
    hub_options,
    images_alone,
    load_processor,
    new_folder,
)


EPILOG = """SOURCE is one of these; examples/data/README.md has examples:
  a folder          pictures and metadata.jsonl, an example a line; or a data set saved by `datasets`, or laid out as
                    on the Hub
  .json, .jsonl     an array of examples, or one a line
  .parquet          a row an example, with the bytes of pictures or names of files
  .tar              shards of WebDataset, also as shards-{000..127}.tar; not compressed
  OWNER/NAME        a data set on the Hub; OWNER/NAME@CONFIG#SPLIT where it has several
all but lines need `pip install "datasets>=4"`, which keeps what is converted once
each example is a JSON object, or a row, with one of these sets of fields:
  file_name, text               a picture and its caption; --prompt is the question
  file_name, caption            the same
  file_name, question, answer   a picture, a question and its answer; file_name may be missing
  messages                      a chat; pictures are {"type": "image", "path": FILE} in the content of a message
  prompt, completion            a chat of which only the completion is trained on
  conversations                 LLaVA's and ShareGPT's chats, with <image> where a picture is
  texts                         chats of The Cauldron and FineVision
images, a list of files, or image may stand in place of file_name. Other fields are not read.
Roles of messages: system, developer, user, assistant, tool, function, ipython."""


def register_train(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model on pictures with texts",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a retrofitted model: a folder or a Hub id")
    data = "what to train on (see below). Several are read together; NAME:0.3 reads 0.3 of its rows in an epoch"
    parser.add_argument("--data", action="append", required=True, metavar="SOURCE", help=data)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of the trained model")
    parser.add_argument("--resume", action="store_true", help="continue from the last complete checkpoint in DIR")
    groups: dict[str | None, argparse._ActionsContainer] = {None: parser}
    for field in dataclasses.fields(TrainingOptions):
        if "argument" in field.metadata:
            given = dict(field.metadata["argument"])
            name = given.pop("group", None)  # whose options exclude one another
            group = groups.get(name) or groups.setdefault(name, parser.add_mutually_exclusive_group())
            group.add_argument(f"--{field.name.replace('_', '-')}", default=field.default, **given)
    add_device(parser)
    add_trust(parser)
    parser.set_defaults(run=run_train)


def run_train(arguments: argparse.Namespace) -> None:
    from ..training.launch import is_first_process, say

    # The first process makes the folder, perhaps before the others come here.
    if not arguments.resume and is_first_process():
        new_folder(arguments.output)
    from ..training.run_folder import OPTIONS_FILE
    from ..training.training_run import train

    options = {name: value for name, value in vars(arguments).items() if name not in ("command", "run", "resume")}
    checked = TrainingOptions(**options)
    if ":" in device_of(arguments.device):
        raise ValueError(
            f"Expected `--device` without a number, got {arguments.device}: a run takes all GPUs that it sees. Choose "
            "some with CUDA_VISIBLE_DEVICES."
        )
    check_model(arguments.model, **hub_options(arguments))
    try:
        train(checked, resume=arguments.resume)
    except KeyboardInterrupt:
        if (arguments.output / OPTIONS_FILE).is_file():
            again = "Add --resume to the command to continue from the last complete checkpoint in"
            say(f"\nStopped. {again} {arguments.output}.")
        raise SystemExit(130) from None


def register_encode_features(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "encode-features",
        help="save the vision tower's outputs for training data to a folder",
        epilog="`hf-xattn train --features` reads the folder. A run that was stopped goes on where it was. Several "
        "processes (accelerate launch, torchrun) share the pictures.",
    )
    add_model(parser)
    add_data(parser, "a source of pictures, as of `hf-xattn train`; several may be given", action="append")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="folder of the features")
    add_number(parser, "--batch-size", 8, "pictures that the tower reads at once")
    add_number(parser, "--workers", 0, "processes that read pictures", least=0)
    add_number(parser, "--shard-size", 256.0, "size of a file of features", float, "MIB", least=1e-6)
    parser.set_defaults(run=run_encode_features)


def run_encode_features(arguments: argparse.Namespace) -> None:
    from ..data.loading import load_rows_once

    device = device_of(arguments.device)
    rows = load_rows_once("--data", arguments.data, arguments.pictures)
    hub = hub_options(arguments)
    check_model(arguments.model, **hub)
    processor = load_processor(arguments.model, **hub)
    check_images(arguments.model, processor)
    from accelerate.utils import get_cpu_distributed_information
    from transformers import AutoModelForImageTextToText

    from ..training.vision_features import encode_pictures, tower_of

    process = get_cpu_distributed_information()  # what the launcher has set, also for GPUs
    model = AutoModelForImageTextToText.from_pretrained(arguments.model, dtype=arguments.dtype, **hub)
    of_process = f":{process.local_rank}" if process.world_size > 1 and device != "cpu" and ":" not in device else ""
    tower_of(model).to(f"{device}{of_process}")
    done = encode_pictures(
        model,
        images_alone(processor),
        rows,
        arguments.output,
        batch_size=arguments.batch_size,
        workers=arguments.workers,
        shard_bytes=int(arguments.shard_size * 2**20),
        rank=process.rank,
        world_size=process.world_size,
    )
    who = "" if process.world_size == 1 else f"process {process.rank}: "
    print(f"{who}{done.new} picture(s) encoded, {done.known} known, {done.nbytes:,} bytes: {arguments.output}")
    if done.problems:
        lines = [f"\n  {name}: {reason}" for name, reason in done.problems.items()]
        raise ValueError(f"{len(lines)} picture(s) cannot be read. The others are encoded.{''.join(lines[:20])}")
    if not done.new + done.known and process.world_size == 1:
        raise ValueError(f"Expected `--data` to hold pictures, got no picture in {rows}.")
