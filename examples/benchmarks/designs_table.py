"""Prints what `compare_designs.py` has measured as a table of Markdown: a column for each design, its seeds in a row.

python examples/benchmarks/designs_table.py designs.json blocks_0.json lora_0.json     # adds these runs, and prints all

`designs.json` keeps the runs without their losses. A run replaces an earlier one of the same design and seed. With
`--busy` the times of the added runs are left out: they were measured beside other work.
"""

import json
import sys
from pathlib import Path
from typing import Any


TIMES = ("seconds of a step", "first token", "decode step")
COSTS = {
    "trained parameters, million": ("parameters", lambda run: f"{run['parameters'] / 1e6:.1f}"),
    "learning rate": ("learning rate", lambda run: f"{run['learning rate']:g}"),
    "TFLOP of a step": ("FLOP of a step", lambda run: f"{run['FLOP of a step'] / 1e12:.2f}"),
    "seconds of a step": ("seconds of a step", lambda run: f"{run['seconds of a step']:.1f}"),
    "largest memory of the process, GB": (
        "largest memory, MB",
        lambda run: f"{run['largest memory, MB'] / 1024:.1f}",
    ),
    "time to first token, with the tower": ("first token", lambda run: f"{run['first token'] * 1000:.0f} ms"),
    "a decode step": ("decode step", lambda run: f"{run['decode step'] * 1000:.0f} ms"),
    "cache behind a question": ("cache", lambda run: f"{run['cache'] / 1e6:.2f} MB"),
}
Runs = dict[str, list[dict[str, Any]]]  # of each design, by seed


def table(runs: Runs) -> str:
    lines = [f"| | {' | '.join(runs)} |", f"|{'---|' * (len(runs) + 1)}"]

    def add(name: str, cell: Any) -> None:
        lines.append(f"| {name} | {' | '.join(', '.join(cell(run) for run in each) for each in runs.values())} |")

    first = next(iter(runs.values()))[0]
    for kind, share in first["right"].items():
        add(f"{kind}, of {share['of']}", lambda run, kind=kind: str(run["right"][kind]["right"]))
    every = sum(share["of"] for share in first["right"].values())
    add(f"**all, of {every}**", lambda run: f"**{sum(share['right'] for share in run['right'].values())}**")
    texts = first["texts"]
    for place in ("alone", "beside a picture"):
        name = f"{texts['of']} text questions {place} (the text model: {texts['right, text model']})"
        add(name, lambda run, place=place: str(run["texts"][f"right, {place}"]))
    for name, (needed, cell) in COSTS.items():
        if all(needed in run for each in runs.values() for run in each):
            add(name, cell)
    return "\n".join(lines)


if __name__ == "__main__":
    arguments = [each for each in sys.argv[1:] if each != "--busy"]
    file = Path(arguments[0])
    runs: Runs = json.loads(file.read_text()) if file.exists() else {}
    for each in arguments[1:]:
        run = json.loads(Path(each).read_text())
        for name in ("losses", *(TIMES if "--busy" in sys.argv else ())):
            del run[name]
        others = [known for known in runs.get(run["design"], []) if known["seed"] != run["seed"]]
        runs[run["design"]] = sorted([*others, run], key=lambda known: known["seed"])
    file.write_text(json.dumps(runs) + "\n")
    print(table(runs))
