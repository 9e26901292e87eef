"""Prints runs beside each other, as a table of Markdown: right answers by kind, in brackets with another picture.

hf-xattn eval out/model --data out/rows/held_out --by kind --json > one.json
python examples/photos/photos_table.py results.json one=one.json     # adds the run `one` to the file, and prints all
"""

import json
import sys
from pathlib import Path
from typing import Any


WAYS = {"own": "the model", "another": "with another picture", "frequent": "always the most frequent answer"}
Counts = dict[str, dict[str, list[int]]]  # of each kind and way: right ones, and all


def counts_of(evaluation: dict[str, Any]) -> Counts:
    """The whole answers that are right, as VQA compares them, of what `hf-xattn eval --json` has printed."""
    groups = {**evaluation["groups"], "all": evaluation["pictures"]}
    return {
        kind: {name: [ways[way]["normalised"][field] for field in ("count", "of")] for name, way in WAYS.items()}
        for kind, ways in groups.items()
    }


def table(runs: dict[str, Counts]) -> str:
    lines = [f"| | asked | {' | '.join(runs)} | most frequent |", f"|{'---|' * (len(runs) + 3)}"]
    for kind, first in next(iter(runs.values())).items():
        cells = [kind, str(first["own"][1])]
        cells += [f"{share(run[kind]['own'])} ({share(run[kind]['another'])})" for run in runs.values()]
        lines.append(f"| {' | '.join([*cells, share(first['frequent'])])} |")
    return "\n".join(lines)


def share(right: list[int]) -> str:
    return f"{right[0] / right[1]:.0%}"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    runs = json.loads(file.read_text()) if file.exists() else {}
    for each in sys.argv[2:]:
        name, _, source = each.partition("=")
        runs[name] = counts_of(json.loads(Path(source).read_text()))
    file.write_text(json.dumps(runs) + "\n")
    print(table(runs))
