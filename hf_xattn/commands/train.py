"""`hf-xattn train`: trains a retrofitted model on pictures with texts."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from ..training.training_options import TrainingOptions
from .shared import add_device, add_trust, check_model, device_of, hub_options, new_folder


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
