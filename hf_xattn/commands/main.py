"""Parses the command line, runs a command, and turns an error of the command into an exit status."""

from __future__ import annotations

import argparse
import sys
from pickle import UnpicklingError

from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError

from ..utils.transformers_api import installed
from .answer import register_chat, register_encode, register_generate
from .demo import register_demo
from .evaluate import register_eval
from .examine import register_check, register_inspect
from .retrofit import register_export, register_import, register_retrofit
from .servers import register_serve, register_web
from .train import register_encode_features, register_train


# `--help` lists the commands in this order.
COMMANDS = (
    register_demo,
    register_retrofit,
    register_encode_features,
    register_train,
    register_eval,
    register_chat,
    register_generate,
    register_encode,
    register_serve,
    register_web,
    register_import,
    register_export,
    register_inspect,
    register_check,
)
# Errors about the arguments and files of a user, of which the message is enough. Any other error is a bug, and its
# traceback is shown.
ERRORS = (OSError, ImportError, ValueError, RuntimeError, UnpicklingError, TemplateError, StrictDataclassError)

EPILOG = """\
the usual steps:
  hf-xattn retrofit Qwen/Qwen2.5-0.5B-Instruct --vision google/siglip-base-patch16-224 --output fresh
  hf-xattn train fresh --data pictures --output seeing
  hf-xattn chat seeing --image photo.png

`hf-xattn COMMAND --help` explains a command. `hf-xattn demo` shows all steps once, without downloads."""


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Without a command, prints the list of commands.

    An error about arguments or files is printed to stderr. Any other error is a bug and is raised.

    Args:
        argv (`list[str]`, *optional*): the words of the command line behind `hf-xattn`; by default those of `sys.argv`.

    Returns:
        `int`: the exit status: 2 after an error, else that of the command, 0 by default.

    Example:

    ```python
    >>> import hf_xattn

    >>> text, vision = "HuggingFaceTB/SmolLM2-135M-Instruct", "google/siglip-base-patch16-224"
    >>> status = hf_xattn.main(["retrofit", text, "--vision", vision, "--output", "fresh"])
    Loading HuggingFaceTB/SmolLM2-135M-Instruct and google/siglip-base-patch16-224
    ...
    Next: hf-xattn train fresh --data PICTURES --output TRAINED
    >>> status
    0
    ```
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    try:
        status = arguments.run(arguments)
    except ERRORS as error:
        print(f"hf-xattn {arguments.command}: error: {error}", file=sys.stderr)
        return 2
    return status or 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-xattn",
        description="Gives sight to a text model of transformers: puts gated cross-attention blocks into it, connects "
        "them\nto a vision tower, trains them, and serves the result.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,  # keeps the line breaks of `--version` and of EPILOG
    )
    versions = "\n".join(f"{name} {version}" for name, version in installed().items())
    parser.add_argument("--version", action="version", version=versions, help="print the installed versions and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for register in COMMANDS:
        register(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
