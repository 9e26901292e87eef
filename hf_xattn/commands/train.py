"""`hf-xattn train`: trains a retrofitted model on a folder of pictures with texts."""

from __future__ import annotations

import argparse
from pathlib import Path

from .loading import check_model
from .options import add_device, add_trust, device_of, hub_options
from .output import new_folder


EPILOG = """each line of metadata.jsonl is a JSON object with one of these sets of fields:
  file_name, text               a picture and its caption; --prompt is the question
  file_name, question, answer   a picture, a question and its answer; file_name may be missing
  messages                      a chat; pictures are {"type": "image", "path": FILE} in the content of a message
  prompt, completion            a chat of which only the completion is trained on
images, a list of files, may stand in place of file_name. Paths are relative to the folder.
Roles of messages: system, developer, user, assistant, tool, function, ipython."""


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model on a folder of pictures with texts",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a retrofitted model: a folder or a Hub id")
    parser.add_argument(
        "--data", type=Path, required=True, metavar="FOLDER", help="pictures and metadata.jsonl, one example a line"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of the trained model")
    parser.add_argument("--resume", action="store_true", help="continue from the last complete checkpoint in DIR")
    parser.add_argument("--prompt", metavar="TEXT", help="the question for pictures that have only a caption")
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--epochs", type=float, default=1.0, metavar="N", help="times to go through the data (default: 1)"
    )
    length.add_argument("--steps", type=int, metavar="N", help="optimizer steps, instead of --epochs")
    parser.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="examples per forward pass of each process (default: 8)"
    )
    parser.add_argument(
        "--gradient-accumulation",
        type=int,
        default=1,
        metavar="N",
        help="forward passes per optimizer step (default: 1)",
    )
    parser.add_argument(
        "--learning-rate", type=float, default=1e-4, metavar="X", help="highest learning rate (default: 1e-4)"
    )
    parser.add_argument(
        "--warmup",
        type=float,
        default=0.05,
        metavar="X",
        help="share of the steps in which the learning rate rises (default: 0.05)",
    )
    parser.add_argument("--weight-decay", type=float, default=0.0, metavar="X")
    parser.add_argument("--max-length", type=int, metavar="N", help="cut texts to N tokens")
    evaluation = parser.add_mutually_exclusive_group()
    evaluation.add_argument(
        "--eval-share", type=float, metavar="X", help="share of the examples to evaluate on, such as 0.1"
    )
    evaluation.add_argument(
        "--eval-data", type=Path, metavar="FOLDER", help="examples to evaluate on, in a folder like --data"
    )
    parser.add_argument("--eval-steps", type=int, metavar="N", help="steps between evaluations (default: one epoch)")
    parser.add_argument(
        "--save-steps", type=int, metavar="N", help="steps between checkpoints (default: a tenth of all steps)"
    )
    parser.add_argument(
        "--log-steps", type=int, default=10, metavar="N", help="steps between lines of the log (default: 10)"
    )
    parser.add_argument("--train-text", action="store_true", help="train the text model too; it is frozen otherwise")
    parser.add_argument(
        "--train-vision", action="store_true", help="train the vision tower too; it is frozen otherwise"
    )
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
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16"),
        help="dtype of the frozen weights; trained weights are float32 during training",
    )
    add_device(parser, default="auto")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="processes that read pictures (default: 0)")
    parser.add_argument("--seed", type=int, default=0)
    add_trust(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from ..training.launch import is_first_process, say

    # The first process makes the folder, perhaps before the others come here.
    if not arguments.resume and is_first_process():
        new_folder(arguments.output)
    from ..training.training_run import OPTIONS_FILE, TrainingOptions, train

    options = {name: value for name, value in vars(arguments).items() if name not in ("command", "run", "resume")}
    checked = TrainingOptions(**options)
    if ":" in device_of(arguments.device):
        raise ValueError(
            f"Expected `--device` without a number, got {arguments.device}: a run takes all GPUs that it sees. Show it "
            "one with the environment variable CUDA_VISIBLE_DEVICES."
        )
    check_model(arguments.model, **hub_options(arguments))
    try:
        train(checked, resume=arguments.resume)
    except KeyboardInterrupt:
        if (arguments.output / OPTIONS_FILE).is_file():
            say(
                "\nStopped. Add --resume to the command to continue from the last complete checkpoint in "
                f"{arguments.output}."
            )
        raise SystemExit(130) from None
