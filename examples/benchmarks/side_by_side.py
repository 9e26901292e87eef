"""The table of speed: this package beside its peers, in one run.

python examples/benchmarks/side_by_side.py [--repeats N] [--only NAME ...] [--images N ...] [--output FILE]
python examples/benchmarks/side_by_side.py --write FILE

The first command measures, prints the table and keeps the figures in a JSON file. The second one measures nothing: it
puts the table of such a file into `examples/benchmarks/README.md`.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


REPEATED, GQA = "K/V repeated", "`enable_gqa`"
SHAPE = "hidden 2048, 8 layers and 2 blocks, N 6404"
BEGIN, END = "<!-- speed -->\n", "<!-- /speed -->"


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Args:
        section (`str`): what `bench.py` calls the part that measures it.
        figure (`str`): its figure there.
        label (`str`): what the table says.
        ours (`str`): our name among the measured ones.
        peers (`dict[str, str]`): names of the peers among them, and what the table calls them.
    """

    section: str
    figure: str
    label: str
    ours: str
    peers: dict[str, str]


WAYS = {"repeat": REPEATED, "gqa": GQA}
ROWS = [
    Row(
        "attention",
        "decode attention, 1 beam(s), N 6404, against repeat_interleave",
        "attention of a decode step, N 6404",
        "folded",
        WAYS,
    ),
    Row(
        "attention",
        "decode attention, 4 beam(s), N 1601, against repeat_interleave",
        "the same, 4 beams, N 1601",
        "folded",
        WAYS,
    ),
    *(
        Row(
            "layer",
            f"cross-attention with projections, {rows} row(s), N 6404, against Mllama's",
            f"cross-attention of a decode step with its projections, {rows} text row{'s' * (rows > 1)}, N 6404",
            "ours",
            {"mllama": "Mllama"},
        )
        for rows in (1, 4)
    ),
    *(
        Row(
            "generate",
            f"generate 64 tokens, hidden 2048, 8 + 2 layers, N 6404, {beams} beam(s), against Mllama",
            f"`generate`, 64 tokens, {name}, {SHAPE}{beside}",
            "ours",
            peer,
        )
        for beams, name in ((1, "greedy"), (4, "4 beams"))
        for peer, beside in (
            ({"mllama": "Mllama"}, ""),
            ({"text": "text model"}, ", beside the text model without blocks"),
        )
    ),
    Row(
        "idefics",
        "generate 64 tokens, hidden 512, 8 + 2 layers, N 1601, against Idefics",
        "`generate`, 64 tokens, greedy, hidden 512, 8 layers and 2 blocks, N 1601, float32",
        "ours",
        {"idefics": "Idefics"},
    ),
    Row(
        "questions",
        "32 questions on one image (pixels), time, against 32 times",
        "32 questions on one image, hidden 512, float32",
        "once",
        {"every": "the image 32 times"},
    ),
    Row(
        "text_only",
        "text-only call, hidden 512, 8 layers, over its base",
        "call without an image, 128 tokens, hidden 512, 8 layers, float32",
        "ours",
        {"base": "text model"},
    ),
    Row(
        "training",
        "training step, frozen text model, time, over Mllama's",
        "training step, frozen text model, hidden 512, 8 layers and 2 blocks, N 1601, float32",
        "ours",
        {"mllama": "Mllama"},
    ),
    *(
        Row(
            "prefill",
            f"{kind}, {dtype}, {length} text tokens, N 1601: next best",
            f"attention, {kind}, {length} text tokens, N 1601, {dtype}",
            "folded",
            {"enable_gqa": GQA, "repeat_interleave": REPEATED},
        )
        for kind, dtype in (("prefill", "bfloat16"), ("training", "float32"))
        for length in (16, 512)
    ),
]


@dataclass(frozen=True)
class Line:
    """A measured line: values in seconds, or in bytes."""

    label: str
    ours: float
    peers: dict[str, float]
    unit: str = "s"

    @property
    def ratio(self) -> float:
        """The best peer's value over ours."""
        return min(self.peers.values()) / self.ours


def measure(repeats: int, sections: list[str], images: list[int]) -> dict[str, Any]:
    """All lines, the machine and the command."""
    import bench
    import torch

    torch.manual_seed(0)
    lines, measured = [], {}
    for row in (row for row in ROWS if row.section in sections):
        if row.section not in measured:
            measured[row.section] = bench.SECTIONS[row.section](repeats)
        values = measured[row.section][row.figure]["measured"]
        lines.append(Line(row.label, values[row.ours], {label: values[name] for name, label in row.peers.items()}))
        print(markdown_line(lines[-1]), file=sys.stderr, flush=True)
    for line in image_tokens(repeats, images):
        lines.append(line)
        print(markdown_line(line), file=sys.stderr, flush=True)
    command = shlex.join(["python", "examples/benchmarks/side_by_side.py", *sys.argv[1:]])
    return {"command": command, "machine": bench.machine(), "lines": [vars(line) for line in lines]}


def image_tokens(repeats: int, numbers: list[int]) -> Iterator[Line]:
    """Lines against image tokens in the prompt: transformers' Llava and InternVL with the same decoder and features."""
    import against_llava
    import torch

    if not numbers:
        return
    with torch.no_grad():
        ours, peers = against_llava.build(1024)
        against_llava.check(ours, peers)
        tower = against_llava.tower_seconds(ours, max(1, repeats // 3))
        for number in numbers:
            figures = against_llava.images(ours, peers, number, max(1, repeats // 5), tower)
            images = f"{number} image{'s' * (number > 1)}"
            shape = f"{images} of 576 tokens, hidden 1024, 16 layers and 4 blocks"
            for name, label in (
                ("first token", f"first token from features, {shape}"),
                ("first token, with the tower", f"first token from pixels (CLIP ViT-L/14-336), {images}"),
                ("decode step", f"decode step behind {images}"),
                ("decode step, static caches", f"decode step behind {images}, static caches"),
                ("cache", f"bytes of the cache, {images}"),
            ):
                figure = figures[f"{number} image(s): {name}"]
                unit, scale = {"ms": ("s", 1e-3), "MB": ("B", 1e6)}[figure["unit"]]
                values = {side: figure[side] * scale for side in ("ours", *peers)}
                yield Line(label, values.pop("ours"), values, unit)


def amount(value: float, unit: str) -> str:
    scale, name = (1e6, "MB") if unit == "B" else (1.0, "s") if value >= 1 else (1e-3, "ms")
    return f"{value / scale:.{3 if value / scale < 1000 else 4}g} {name}"


def markdown_line(line: Line) -> str:
    peers = ", ".join(f"{name} {amount(value, line.unit)}" for name, value in line.peers.items())
    ratio = f"{line.ratio:.2f}" if line.ratio < 9.95 else f"{line.ratio:.0f}"
    ratio = f"**{ratio}**" if line.ratio < 0.995 else ratio
    return f"| {line.label} | {amount(line.ours, line.unit)} | {peers} | {ratio} |"


def markdown(result: dict[str, Any]) -> str:
    """The part of the page between its two marks."""
    lines = [Line(**line) for line in result["lines"]]
    machine = result["machine"]
    native = {"yes": "with", "no": "without"}.get(machine["bfloat16 arithmetic"], "perhaps with")
    threads = f"{machine['threads']} thread{'s' * (machine['threads'] > 1)}"
    lost = sum(line.ratio < 0.995 for line in lines)
    return "\n".join(
        [
            f"This table comes from one run of `{result['command']}` on {machine['device']} ({native} bfloat16 "
            f"arithmetic, {threads}), with torch {machine['torch']} and transformers {machine['transformers']}. The "
            "dtype is bfloat16 unless a row says otherwise, and N is the number of image tokens. Each value is a "
            "median of runs that take turns. The last column is the value of the best peer over ours. Above 1, "
            f"hf_xattn is better. In **{lost} of {len(lines)}** rows it is worse, and the ratio is bold.",
            "",
            "| | hf_xattn | peers | times better |",
            "|---|---|---|---|",
            *map(markdown_line, lines),
            "",
        ]
    )


def write(page: Path, result: dict[str, Any]) -> None:
    text = page.read_text()
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise SystemExit(f"{page}: expected one `{BEGIN.strip()}` with an `{END}` behind it")
    page.write_text(pattern.sub(lambda _: BEGIN + markdown(result) + END, text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=11)
    sections = sorted({row.section for row in ROWS})
    parser.add_argument(
        "--only", nargs="+", choices=sections, default=sections, help="parts of bench.py (default: all)"
    )
    parser.add_argument(
        "--images", type=int, nargs="*", default=[1, 4, 16], help="images of a prompt (default: 1 4 16)"
    )
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    parser.add_argument("--write", type=Path, help="JSON file with figures; nothing is measured")
    parser.add_argument(
        "--page", type=Path, default=Path(__file__).with_name("README.md"), help="where --write puts the table"
    )
    arguments = parser.parse_args()
    if arguments.write:
        write(arguments.page, json.loads(arguments.write.read_text()))
        return
    result = measure(arguments.repeats, arguments.only, arguments.images)
    print(markdown(result))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
