"""`hf-xattn demo`: trains, retrofits and reads handwritten digits."""

from __future__ import annotations

import argparse
from pathlib import Path


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("demo", help="train, retrofit and read handwritten digits, in minutes, offline")
    parser.add_argument("--output", type=Path, default=Path("hf-xattn-demo"), metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from .. import demo

    demo.run(arguments.output, seed=arguments.seed)
