"""Parses the command line, runs a command, and turns the command's error into an exit status."""

from __future__ import annotations

import argparse
import dis
import json
import sys

from ..utils.versions import installed, naming_what_transformers_lacks
from .answer import register_chat, register_generate
from .demo import register_demo
from .encode import register_encode
from .encode_features import register_encode_features
from .evaluate import register_eval
from .examine import register_check, register_inspect
from .importing import register_export, register_import
from .retrofit import only_in_python, register_retrofit
from .servers import register_serve, register_web
from .train import register_train


# In the order of `--help`.
COMMANDS = (
    register_retrofit,
    register_train,
    register_eval,
    register_import,
    register_export,
    register_inspect,
    register_check,
    register_chat,
    register_generate,
    register_encode,
    register_encode_features,
    register_serve,
    register_web,
    register_demo,
)


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Without one, lists them all. A bug is raised, with its traceback.

    Returns:
        `int`: the exit status: the command's own, 0 by default, or 2 after an error, whose message goes to stderr.
    """
    parser = _parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        hint = only_in_python(unknown) if arguments.command == "retrofit" else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if arguments.command is None:
        parser.print_help()
        return 0
    try:
        with naming_what_transformers_lacks():
            status = arguments.run(arguments)
    except Exception as error:
        if not _is_message(error):
            raise
        print(f"hf-xattn {arguments.command}: error: {error}", file=sys.stderr)
        return 2
    return status or 0


def _is_message(error: Exception) -> bool:
    """Whether an error tells the user what is wrong. Any other is a bug, and needs its traceback."""
    if isinstance(error, (OSError, ImportError, UnicodeError, json.JSONDecodeError)):
        return True
    if type(error).__module__.startswith(("jinja2.", "huggingface_hub.")):  # of a chat template, or a field
        return True
    return isinstance(error, (ValueError, TypeError)) and _is_raised(error)


def _is_raised(error: Exception) -> bool:
    """Whether a `raise` statement has raised an error. Otherwise an operation failed, such as `None + 1`."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-xattn",
        description="Gated cross-attention for any text decoder of transformers.",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # leaves the lines of `--version` as they are
    )
    versions = "\n".join(f"{name} {version}" for name, version in installed().items())
    parser.add_argument("--version", action="version", version=versions, help="print the versions and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for register in COMMANDS:
        register(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
