"""The commands that train a model.

`hf-xattn train` trains a retrofitted model on images with texts. `hf-xattn encode-features` runs the frozen vision
tower once over the images of the training data and saves its features, so that training does not run the tower.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from ..training.training_options import TrainingOptions
from .shared import (
    add_data,
    add_device,
    add_loading,
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


EPILOG = """SOURCE of --data, --eval-data and --align is one of these:
  a folder          images and a file metadata.jsonl with one example in each line; or a data set that `datasets` has
                    saved, or that is laid out as on the Hub
  .json, .jsonl     a file with an array of examples, or with one example in each line
  .parquet          a file with one example in each row, which holds the bytes of images or the names of their files
  .tar              shards of WebDataset, not compressed; shards-{000..127}.tar names many
  OWNER/NAME        a data set on the Hub; OWNER/NAME@CONFIG#SPLIT if it has several
All sources except .jsonl files and folders with a metadata.jsonl need `pip install "datasets>=4"`, which converts a
source once and keeps the result.

An example is a JSON object, or a row of a table, with one of these sets of fields:
  file_name, text               an image and its caption; --prompt is the question
  file_name, caption            the same
  file_name, question, answer   an image, a question and its answer; without file_name, a question without an image
  messages                      a chat; an image is {"type": "image", "path": FILE} in the content of a message
  prompt, completion            a chat of which only the completion is trained on
  conversations                 a chat of LLaVA or ShareGPT, with <image> where an image is
  texts                         a chat of The Cauldron or FineVision
In place of file_name you can write images, a list of files, or image. Other fields are not read.
Roles of messages: system, developer, user, assistant, tool, function, ipython.
examples/data/README.md shows an example of each source and each set of fields.

example: hf-xattn train fresh --data pictures --output seeing --epochs 3"""
# The groups of `--help`, in their order, with the fields of `TrainingOptions` that each shows.
GROUPS = {
    "data": "pictures prompt max_length features workers stream bad_rows bad_rows_limit",
    "length of the run": "epochs steps batch_size gradient_accumulation seed",
    "learning": "train_text train_vision learning_rate started_rate align warmup weight_decay",
    "what the text model could do before": "text_share text_prompts distill_text",
    "evaluation, log and checkpoints": "eval_share eval_data eval_steps log_steps report_to save_steps adapter_only",
    "loading": "dtype",
}


def register_train(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model on images with texts",
        description="Trains the blocks and the connector of a model on images with texts, and saves the trained model. "
        "The text\nmodel and the vision tower stay frozen. Without options, a run has one epoch.",
        usage="%(prog)s MODEL --data SOURCE --output DIR [options]",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser)
    data = (
        "what to train on (see below); repeat the option to read several sources together; SOURCE:0.3 reads 0.3 of the "
        "rows of a source in an epoch"
    )
    parser.add_argument("--data", action="append", required=True, metavar="SOURCE", help=data)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for the trained model")
    resume = "continue a run that was stopped, from its last complete checkpoint in DIR"
    parser.add_argument("--resume", action="store_true", help=resume)
    fields = {field.name: field for field in dataclasses.fields(TrainingOptions)}
    for title, names in GROUPS.items():
        group = parser.add_argument_group(title)
        excluding: dict[str, argparse._ActionsContainer] = {}
        for name in names.split():
            given = dict(fields[name].metadata["argument"])
            container: argparse._ActionsContainer = group
            if (kind := given.pop("group", None)) is not None:  # its options exclude one another
                container = excluding.get(kind) or excluding.setdefault(kind, group.add_mutually_exclusive_group())
            container.add_argument(f"--{name.replace('_', '-')}", default=fields[name].default, **given)
    add_device(group)  # the last group, `loading`
    add_trust(group)
    parser.set_defaults(run=run_train)


def run_train(arguments: argparse.Namespace) -> None:
    from ..training.launch import is_first_process, say

    # Only the first process checks the folder: it creates the folder, perhaps before the others come here.
    if not arguments.resume and is_first_process():
        new_folder(arguments.output)
    from ..training.run_folder import OPTIONS_FILE
    from ..training.training_run import train

    options = {name: value for name, value in vars(arguments).items() if name not in ("command", "run", "resume")}
    checked = TrainingOptions(**options)
    if ":" in device_of(arguments.device):
        raise ValueError(
            f"Expected `--device` without a number, got {arguments.device}: a run takes all GPUs that it sees. Choose "
            "the GPUs with CUDA_VISIBLE_DEVICES."
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
        help="run the vision tower once over training data, for `hf-xattn train --features`",
        description="Runs the vision tower once over the images of training data and saves its features to a folder. "
        "`hf-xattn train --features` reads the folder and does not run the tower.",
        usage="%(prog)s MODEL --data SOURCE --output DIR [options]",
        epilog="If the command was stopped, run it again: it continues where it was. In several processes (accelerate "
        "launch, torchrun) the rows are divided among them.",
    )
    add_model(parser)
    data = "source of images, in a form of `hf-xattn train --data`; repeat the option for several"
    add_data(parser, data, action="append")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for the features")
    add_number(parser, "--batch-size", 8, "number of images that the tower reads at once")
    workers = "number of processes that read images; 0 reads them in the main process"
    add_number(parser, "--workers", 0, workers, least=0)
    shard = "largest size of a file of features, in MiB"
    add_number(parser, "--shard-size", 256.0, shard, float, "MIB", least=1e-6)
    add_loading(parser)
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

    from ..training.feature_encoder import encode_pictures
    from ..training.vision_features import tower_of

    process = get_cpu_distributed_information()  # reads what the launcher has set, also on GPUs
    model: Any = AutoModelForImageTextToText.from_pretrained(arguments.model, dtype=arguments.dtype, **hub)
    of_process = f":{process.local_rank}" if process.world_size > 1 and device != "cpu" and ":" not in device else ""
    tower: Any = tower_of(model)
    tower.to(f"{device}{of_process}")
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
    print(f"{who}{done.new} image(s) encoded, {done.known} known, {done.nbytes:,} bytes: {arguments.output}")
    if done.problems:
        lines = [f"\n  {name}: {reason}" for name, reason in done.problems.items()]
        raise ValueError(f"{len(lines)} image(s) cannot be read. The others are encoded.{''.join(lines[:20])}")
    if not done.new + done.known and process.world_size == 1:
        raise ValueError(f"Expected `--data` to hold images, got no image in {rows}.")
