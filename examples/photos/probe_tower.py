"""What the tower alone can tell: a linear probe of its tokens, which knows where each thing is.

python examples/photos/probe_tower.py --stamps tuxpaint-stamps-default_*.deb --grounds mate-backgrounds_*.deb

For each size of a picture, a ridge regression maps tokens to the thing whose box they are in, on pictures like those to
train on. Then a thing is named by the mean of the tokens in its box, in new pictures. A model that has learned all that
is linear in the tower's tokens, and where to look, answers as this does: what it misses beyond that is not the tower's.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_xattn.demo.photographs.pictures import INSTALLED, SIDE, Pictures, Placed, Thing, read_table
from hf_xattn.demo.photographs.rows import choose
from hf_xattn.demo.photographs.tower import make_tower


PENALTY = 1e-2  # of the ridge regression, where features have a variance of about 1
BATCH = 16
Made = tuple[Any, list[Placed]]


def draw(pictures: Pictures, chosen: Iterable[list[tuple[Thing, str]]], name: str, trained: bool) -> list[Made]:
    """A picture of each choice of things, on grounds of training or of both kinds."""
    made = []
    for index, things in enumerate(chosen):
        rng = random.Random(f"probe {name} {index}")
        made.append(pictures.compose(rng, things, trained_ground=trained or rng.random() < 0.5))
    return made


def random_choices(known: list[Thing], name: str, count: int) -> Iterable[list[tuple[Thing, str]]]:
    return (choose(known, random.Random(f"things {name} {index}")) for index in range(count))


@torch.no_grad()
def tokens_of(made: Sequence[Made], tower: Any, processor: Any) -> torch.Tensor:
    """The tower's tokens `(pictures, tokens, width)`, row by row of each picture."""
    found = []
    for start in range(0, len(made), BATCH):
        batch = [picture for picture, _ in made[start : start + BATCH]]
        pixels = processor(batch, return_tensors="pt")["pixel_values"].to(tower.dtype)
        found.append(tower(pixels).last_hidden_state.flatten(2).transpose(1, 2))
    return torch.cat(found).float()


def inside(box: Sequence[int], side: int) -> torch.Tensor:
    """Which of `side * side` tokens have their middle in a box, and the nearest one if none has."""
    middle = (torch.arange(side) + 0.5) / side * SIDE
    across = (middle >= box[0]) & (middle <= box[2])
    down = (middle >= box[1]) & (middle <= box[3])
    across[(middle - (box[0] + box[2]) / 2).abs().argmin()] = True
    down[(middle - (box[1] + box[3]) / 2).abs().argmin()] = True
    return (down[:, None] & across[None]).flatten()


class Probe:
    """A ridge regression from tokens to the names of things."""

    def __init__(self, names: list[str], made: Sequence[Made], tokens: torch.Tensor):
        self.names, self.side = names, int(tokens.shape[1] ** 0.5)
        targets = torch.zeros(*tokens.shape[:2], len(names))
        for target, (_, placed) in zip(targets, made):
            for each in placed:
                target[inside(each.box, self.side), names.index(each.thing.name)] = 1
        flat, wanted = tokens.flatten(0, 1).double(), targets.flatten(0, 1).double()
        self.means = flat.mean(0), wanted.mean(0)
        flat, wanted = flat - self.means[0], wanted - self.means[1]
        penalty = PENALTY * torch.eye(flat.shape[1], dtype=flat.dtype)
        self.weight = torch.linalg.solve(flat.T @ flat / len(flat) + penalty, flat.T @ wanted / len(flat))

    def name(self, tokens: torch.Tensor, box: Sequence[int]) -> str:
        mean = tokens[inside(box, self.side)].double().mean(0)
        return self.names[int(((mean - self.means[0]) @ self.weight + self.means[1]).argmax())]


def shares(probe: Probe, made: Sequence[Made], tokens: torch.Tensor, kinds: dict[str, str]) -> str:
    """How many of the things are named right, and for how many the kind of the name is right."""
    found = [(probe.name(own, each.box), each.thing) for own, (_, placed) in zip(tokens, made) for each in placed]
    named = sum(name == thing.name for name, thing in found) / len(found)
    of_kind = sum(kinds[name] == thing.kind for name, thing in found) / len(found)
    return f"name {named:.0%}, kind {of_kind:.0%} of {len(found)}"


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stamps", type=Path, default=INSTALLED, help="as of make_rows.py")
    parser.add_argument("--grounds", type=Path, help="as of make_rows.py")
    parser.add_argument("--pictures", type=int, default=1500, help="to fit the probe")
    parser.add_argument("--sizes", type=int, nargs="+", default=[224, 320], help="pixels of a side")
    arguments = parser.parse_args(given)
    things = read_table()
    try:
        pictures = Pictures(arguments.stamps, arguments.grounds, things)
    except ValueError as error:
        parser.error(str(error))
    known = [thing for thing in things if thing.known]
    kinds = {thing.name: thing.kind for thing in known}
    trained = draw(pictures, random_choices(known, "train", arguments.pictures), "train", True)
    new = draw(pictures, random_choices(known, "new", arguments.pictures // 4), "new", False)
    asked = {f"of {count}": [each for each in new if len(each[1]) == count] for count in (1, 2, 3, 4)}
    for part, chosen in (
        ("another photograph", [(t, file) for t in known for file in t.others if "cartoon" not in file]),
        ("a drawing", [(t, file) for t in known for file in t.others if "cartoon" in file]),
        ("never seen", [(t, file) for t in things if not t.known for file in t.others]),
    ):
        asked[part] = draw(pictures, [[each] for each in chosen], part, False)
    for size in arguments.sizes:
        tower, processor = make_tower(size)
        probe = Probe(list(kinds), trained, tokens_of(trained, tower, processor))
        print(f"{size} pixels, {probe.side**2} tokens")
        for part, made in asked.items():
            if made:
                print(f"  {part}: {shares(probe, made, tokens_of(made, tower, processor), kinds)}", flush=True)


if __name__ == "__main__":
    main()
