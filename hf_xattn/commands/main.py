"""Parses the command line, runs a command, and turns the command's error into an exit status."""

from __future__ import annotations

import argparse
import sys

from ..version import __version__
from . import chat, check, demo, encode, export, generate, import_, inspect, retrofit, serve, train, web


COMMANDS = (
    retrofit,
    train,
    import_,
    export,
    inspect,
    check,
    chat,
    generate,
    encode,
    serve,
    web,
    demo,
)  # in the order of `--help`


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Returns the exit status: the command's own, 0 by default, or 2 after an error, whose message goes to stderr."""
    arguments = _parser().parse_args(argv)
    try:
        status = arguments.run(arguments)
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"hf-xattn {arguments.command}: error: {error}", file=sys.stderr)
        return 2
    return status or 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-xattn", description="Gated cross-attention for any text decoder of transformers."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.register(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
