"""`hf-xattn export`: writes a model of Llama 3.2 Vision's shape, imported or retrofitted, in its checkpoint format."""

from __future__ import annotations

import argparse
from pathlib import Path

from .output import new_folder


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("export", help="write a model of Llama 3.2 Vision's shape in its format")
    parser.add_argument(
        "model", metavar="DIR", help="an imported model, or a retrofit of the same shape: a folder or a Hub id"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="where the checkpoint goes")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    output = new_folder(arguments.output)
    from ..importers import export_checkpoint

    export_checkpoint(arguments.model, output)
    print(f"Written: {output}")
