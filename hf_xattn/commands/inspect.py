"""`hf-xattn inspect`: what a model's blocks add, or which decoders are served."""

from __future__ import annotations

import argparse

from .loading import load_shapes
from .output import print_report


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("inspect", help="what a model's blocks add: parameters, K/V bytes, compute")
    parser.add_argument("model", metavar="DIR", nargs="?", help="a retrofitted model: a folder or a Hub id")
    parser.add_argument("--architectures", action="store_true", help="which decoders are served, how, or why not")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    if arguments.architectures == (arguments.model is not None):
        raise ValueError("give a model (DIR) or --architectures, one of the two.")
    if not arguments.architectures:
        print_report(load_shapes(arguments.model))
        return
    from ..architectures import markdown_table

    print(markdown_table())
