"""Parses the command line, runs a command, and turns the command's error into an exit status."""

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
# What is wrong with the arguments and files of a person. Any other error is a bug, and needs its traceback.
ERRORS = (OSError, ImportError, ValueError, RuntimeError, UnpicklingError, TemplateError, StrictDataclassError)


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Without one, lists them all. A bug is raised, with its traceback.

    Returns:
        `int`: the exit status: the command's own, 0 by default, or 2 after an error, whose message goes to stderr.

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
