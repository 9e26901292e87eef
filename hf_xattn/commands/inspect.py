"""`hf-xattn inspect`: prints what a model's blocks add, what training it needs, or which decoders are supported."""

from __future__ import annotations

import argparse
from typing import Any

from .loading import DTYPES, has_blocks, load_shapes, plan_shapes, quantization_of
from .options import add_blocks, add_trust, hub_options
from .output import print_report


# Options that need `--training`. They are arguments of `training_memory`, except `dtype`.
SIZES = {
    "batch": "rows of text of each rank (default: 1)",
    "text_length": "text tokens of a row (default: 2048)",
    "images": "images of a row, or feature tokens without a vision tower (default: 1)",
    "ranks": "processes that share weights, gradients and optimizer, with FSDP2 (default: 1)",
}
PARTS = {"train_text": "the text model trains too", "train_vision": "the vision tower trains too"}


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "inspect", help="print what a model's blocks add: parameters, K/V bytes, compute; or what training needs"
    )
    parser.add_argument("model", metavar="DIR", nargs="?", help="a retrofitted model: a folder or a Hub id")
    parser.add_argument(
        "--architectures", action="store_true", help="print which decoders are supported, and why others are not"
    )
    add_trust(parser)
    training = parser.add_argument_group(
        "memory for training",
        "Only configurations are read. What trains is in float32 and computes in the dtype of the frozen weights.",
        argument_default=argparse.SUPPRESS,  # only those that were given
    )
    training.add_argument(
        "--training",
        action="store_true",
        default=False,
        help="print the memory that training needs; DIR may also be a text model, see below",
    )
    for name, what in SIZES.items():
        training.add_argument(_option(name), type=int, metavar="N", help=what)
    for name, what in PARTS.items():
        training.add_argument(_option(name), action="store_true", default=argparse.SUPPRESS, help=what)
    training.add_argument("--dtype", choices=DTYPES, help="dtype of the frozen weights (default: auto)")
    add_blocks(parser.add_argument_group("memory for training a text model, after `hf-xattn retrofit DIR` with"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    if arguments.architectures == (arguments.model is not None):
        raise ValueError(
            f"Expected either a model (DIR) or --architectures, got {'both' if arguments.architectures else 'neither'}."
        )
    given = {name: value for name, value in vars(arguments).items() if name in (*SIZES, *PARTS, "dtype")}
    blocks = {"vision": arguments.vision, "layers": arguments.layers, "every": arguments.every}
    others = {**given, **{name: value for name, value in blocks.items() if value not in (None, 4)}}
    if others and not arguments.training:
        raise ValueError(f"`{_option(next(iter(others)))}` is an option of `--training`: add it.")
    if arguments.architectures:
        if arguments.training:
            raise ValueError("Expected a model (DIR) with `--training`, got --architectures.")
        from ..utils.architectures import markdown_table

        print(markdown_table())
    elif arguments.training:
        _print_training(arguments.model, blocks, hub_options(arguments), **given)
    else:
        print_report(load_shapes(arguments.model, **hub_options(arguments)))


def _print_training(name: str, blocks: dict[str, Any], hub: dict[str, Any], dtype: str = "auto", **given: Any) -> None:
    from ..training.training_memory import training_memory, training_memory_table

    if has_blocks(name, **hub):
        for option, value in blocks.items():
            if value not in (None, 4):
                raise ValueError(f"`--{option}` is for a text model, but {name} has cross-attention blocks already.")
        model = load_shapes(name, dtype, **hub)
    else:
        model = plan_shapes(name, dtype=dtype, **blocks, **hub)
    memory = training_memory(model, **given)
    print(training_memory_table(memory, given.get("ranks", 1)))
    if method := quantization_of(name, **hub):
        counted = str(memory.dtype).removeprefix("torch.")
        print(
            f"{name} is quantized ({method}): its frozen weights need less than the table says, which counts them in {counted}."
        )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
