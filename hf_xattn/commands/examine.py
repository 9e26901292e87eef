"""The commands that examine a model.

`hf-xattn inspect` prints what its blocks add. `hf-xattn check` measures the promises that depend on its decoder.
"""

from __future__ import annotations

import argparse
import json
import math
import sys

from .shared import add_loading, add_model, add_trust, check_model, device_of, hub_options, load_shapes, print_report


EPILOG = """The inputs are random, with a fixed seed. The exit status is 0 if all checks hold, 1 if a check is broken,
and 2 for wrong usage. A check that does not apply to the model is not checked."""


def register_check(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "check",
        help="measure on your model whether all caches, and rows without images, give the right logits",
        description="Measures on a model what depends on the code of its decoder: whether generation with each kind of "
        "cache gives the logits of generation without a cache, and whether a row without an image keeps its logits "
        "beside a row with one. Prints one line for each check.",
        usage="%(prog)s MODEL [options]",
        epilog=EPILOG,
    )
    add_model(parser)
    skip = "leave out the check with this name; repeat the option for several"
    parser.add_argument("--skip", action="append", default=[], metavar="NAME", help=skip)
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the lines")
    add_loading(parser, device="cpu")
    parser.set_defaults(run=run_check)


def run_check(arguments: argparse.Namespace) -> int:
    device = device_of(arguments.device)
    from transformers import AutoModelForImageTextToText

    from ..checkpoints.folders import find_peft
    from ..checks import BROKEN, NOT_CHECKED, run_checks
    from ..utils.transformers_api import installed

    hub, peft = hub_options(arguments), find_peft(arguments.model, {})
    check_model(arguments.model if peft is None else peft.base, **hub)
    model = AutoModelForImageTextToText.from_pretrained(arguments.model, dtype=arguments.dtype, **hub)
    if model.device.type != device.partition(":")[0]:  # unless a quantizer has put it on a GPU
        model = model.to(device)
    found, results = run_checks(model.eval(), arguments.skip), []
    about = {**installed(), "device": str(model.device), "dtype": str(model.dtype).removeprefix("torch.")}
    if not arguments.json:
        print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    for result in found:
        results.append(result)
        if not arguments.json:
            print(f"{result.status:<12} {result.name:<16} {result.line}", flush=True)
    broken = [result.name for result in results if result.status == BROKEN]
    if arguments.json:
        checks = [{**vars(result), "measured": _finite(result.measured)} for result in results]
        told = {"model": arguments.model, **about, "holds": not broken, "checks": checks}
        json.dump(told, sys.stdout, indent=2, allow_nan=False)
        print()
    elif broken:
        print(f"broken: {', '.join(broken)}")
    else:
        left = sum(result.status == NOT_CHECKED for result in results)
        print(f"all hold: {len(results) - left}, not checked: {left}")
    return 1 if broken else 0


def _finite(number: float | None) -> float | None:
    return number if number is None or math.isfinite(number) else None  # JSON has no infinity


def register_inspect(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "inspect",
        help="print what the blocks of a model add, or which text models and vision towers are supported",
        description="Prints what the blocks of a model add: parameters, bytes of keys and values, and compute. It "
        "reads the configuration alone, not the weights. Or prints which text models or vision towers are supported.",
        usage="%(prog)s (MODEL | --architectures | --towers) [options]",
    )
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("model", metavar="MODEL", nargs="?", help="a model with blocks: a folder or a Hub id")
    architectures = "print a table of the text models that are supported, with the reason why others are not"
    asked.add_argument("--architectures", action="store_true", help=architectures)
    towers = "print a table of the vision towers that are supported, with the reason why others are not"
    asked.add_argument("--towers", action="store_true", help=towers)
    add_trust(parser)
    parser.set_defaults(run=run_inspect)


def run_inspect(arguments: argparse.Namespace) -> None:
    if arguments.architectures:
        from ..utils.architectures import markdown_table

        print(markdown_table())
    elif arguments.towers:
        from ..parts.towers import markdown_table as table_of_towers

        print(table_of_towers())
    else:
        print_report(load_shapes(arguments.model, **hub_options(arguments)))
