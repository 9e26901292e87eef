"""`hf-xattn train`: trains a retrofitted model on pictures with texts."""

from __future__ import annotations

import argparse
from pathlib import Path

from .shared import add_device, add_number, add_trust, check_model, device_of, hub_options, new_folder


EPILOG = """SOURCE is one of these; examples/data/README.md has examples:
  a folder          pictures and metadata.jsonl, an example a line; or a data set saved by `datasets`, or laid out as
                    on the Hub
  .json, .jsonl     an array of examples, or one a line
  .parquet          a row an example, with the bytes of pictures or names of files
  .tar              shards of WebDataset, also as shards-{000..127}.tar; not compressed
  OWNER/NAME        a data set on the Hub; OWNER/NAME@CONFIG#SPLIT where it has several (pip install "datasets>=4")
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
    pictures = "where names of pictures begin (default: the folder of the source)"
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help=pictures)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of the trained model")
    parser.add_argument("--resume", action="store_true", help="continue from the last complete checkpoint in DIR")
    parser.add_argument("--prompt", metavar="TEXT", help="the question for pictures that have only a caption")
    _add_numbers(parser)
    _add_reading(parser)
    parser.add_argument("--train-text", action="store_true", help="train the text model too; it is frozen otherwise")
    vision = "train the vision tower too; it is frozen otherwise"
    parser.add_argument("--train-vision", action="store_true", help=vision)
    _add_text(parser)
    parser.add_argument(
        "--features",
        type=Path,
        metavar="FOLDER",
        help="what the frozen vision tower has returned for the pictures, from `hf-xattn encode-features`: the tower "
        "does not run",
    )
    parser.add_argument(
        "--adapter-only",
        action="store_true",
        help="save only what was added or has changed, and fetch the rest from the checkpoints that MODEL was made of; "
        "checkpoints during the run hold the whole model",
    )
    dtype = "dtype of the frozen weights; trained weights are float32 during training"
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help=dtype)
    add_device(parser)
    add_trust(parser)
    parser.set_defaults(run=run_train)


def _add_numbers(parser: argparse.ArgumentParser) -> None:
    length, evaluation = parser.add_mutually_exclusive_group(), parser.add_mutually_exclusive_group()
    add_number(length, "--epochs", 1.0, "times to go through the data", float)
    add_number(length, "--steps", None, "optimizer steps, instead of --epochs")
    add_number(parser, "--batch-size", 8, "examples per forward pass of each process")
    add_number(parser, "--gradient-accumulation", 1, "forward passes per optimizer step")
    rates = "highest learning rate (default: 0.003 for a fresh model that is started by words, 0.001 for another fresh "
    add_number(parser, "--learning-rate", None, rates + "one, 0.0001 for a trained one)", float, "X")
    started = (
        "share of it for all weights that do not start at zero, so that what was started by words is kept while the "
        "output projections of the blocks learn (default: 0.03 for a model that is started by words, 1 for others)"
    )
    add_number(parser, "--started-rate", None, started, float, "X")
    align = (
        "start the connector and the blocks of a fresh model by the words of this source, in place of those of --data; "
        "with none, the connector and the blocks stay as they are, such as those that align_connector has started"
    )
    parser.add_argument("--align", metavar="SOURCE", help=align)
    add_number(parser, "--warmup", 0.05, "share of the steps in which the learning rate rises", float, "X")
    add_number(parser, "--weight-decay", 0.0, "of AdamW, on matrices", float, "X")
    add_number(parser, "--max-length", None, "cut texts to N tokens")
    add_number(evaluation, "--eval-share", None, "share of the examples to evaluate on, such as 0.1", float, "X")
    evaluation.add_argument("--eval-data", metavar="SOURCE", help="examples to evaluate on, as of --data")
    add_number(parser, "--eval-steps", None, "steps between evaluations (default: one epoch)")
    add_number(parser, "--save-steps", None, "steps between checkpoints (default: a tenth of all steps)")
    add_number(parser, "--log-steps", 10, "steps between lines of the log")
    add_number(parser, "--workers", 0, "processes that read pictures")
    add_number(parser, "--seed", 0, "of the order of the examples and of dropout")


def _add_text(parser: argparse.ArgumentParser) -> None:
    share = (
        "share of the rows of the run that are text prompts, shown beside pictures of other rows; their answers stay "
        "those of the text model alone, so that it keeps its text ability beside a picture. 0: none (default: 0.15, "
        "and 0 with --train-text)"
    )
    add_number(parser, "--text-share", None, share, float, "X")
    prompts = "a text file, one prompt a line, in place of the package's prompts; the text model answers them"
    parser.add_argument("--text-prompts", type=Path, metavar="FILE", help=prompts)
    distill = (
        "show rows without a picture beside one of another row, and keep their answers those of the text model alone: "
        "WEIGHT times the KL divergence is added to the loss (default: 1 with a --text-share)"
    )
    add_number(parser, "--distill-text", None, distill, float, "WEIGHT")


def _add_reading(parser: argparse.ArgumentParser) -> None:
    stream = "read the rows to train on as they come, without a check before the run; by itself above 20,000 rows"
    parser.add_argument("--stream", action="store_true", help=stream)
    bad = (
        "what to do with a row that cannot be trained on: end with an error (default), or leave it out and name it in "
    )
    parser.add_argument("--bad-rows", default="stop", choices=("stop", "skip"), help=bad + "DIR/bad_rows.jsonl")
    add_number(parser, "--bad-rows-limit", 0.01, "share of all rows that may be left out", float, "X")
    reports = "where `Trainer` sends its log, such as tensorboard or wandb; several may follow (default: nowhere)"
    parser.add_argument("--report-to", nargs="+", metavar="NAME", help=reports)


def run_train(arguments: argparse.Namespace) -> None:
    from ..training.launch import is_first_process, say

    # The first process makes the folder, perhaps before the others come here.
    if not arguments.resume and is_first_process():
        new_folder(arguments.output)
    from ..training.run_folder import OPTIONS_FILE
    from ..training.training_options import TrainingOptions
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
