"""`hf-xattn inspect`: prints what a model's blocks add, or which decoders are supported."""

from __future__ import annotations

import argparse

from .loading import load_shapes
from .options import add_trust, hub_options
from .output import print_report


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("inspect", help="print what a model's blocks add: parameters, K/V bytes, compute")
    parser.add_argument("model", metavar="DIR", nargs="?", help="a retrofitted model: a folder or a Hub id")
    parser.add_argument(
        "--architectures", action="store_true", help="print which decoders are supported, and why others are not"
    )
    add_trust(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    if arguments.architectures == (arguments.model is not None):
        raise ValueError(
            f"Expected either a model (DIR) or --architectures, got {'both' if arguments.architectures else 'neither'}."
        )
    if arguments.architectures:
        from ..utils.architectures import markdown_table

        print(markdown_table())
    else:
        print_report(load_shapes(arguments.model, **hub_options(arguments)))
