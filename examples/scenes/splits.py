"""The three splits: which seed, fonts and phrasings each has.

The sealed test stays closed until the end. Its seed, size, fonts and phrasings are in `sealed.json`, which was in the
repository before any model was trained on scenes to be measured (see the guide). Nothing else here reads that file.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import fonts
import phrasings


sys.path.append(str(Path(__file__).parents[1]))  # where sealed_list.py is
from sealed_list import check_open, check_phrasings, read_sealed


SEALED = Path(__file__).with_name("sealed.json")
FIELDS = {"seed": str, "rows": int, "fonts": list, "phrasings": dict}


@dataclass(frozen=True)
class Split:
    """Where the pictures and questions of a split come from.

    Attributes:
        name (`str`): `"train"`, `"development"` or `"sealed"`.
        seed (`str`): with the name and the number of a picture, it determines the picture and its questions.
        rows (`int`): number of rows, if the caller does not say.
        fonts (`tuple[str, ...]`): names in `fonts.py`.
        phrasings (`dict[str, tuple[str, ...]]`): of each kind of question.
    """

    name: str
    seed: str
    rows: int
    fonts: tuple[str, ...]
    phrasings: dict[str, tuple[str, ...]]


def open_split(name: str, seed: int, open_sealed: bool = False) -> Split:
    """Returns a split.

    Args:
        seed (`int`): not used by the sealed test, which has its own.
        open_sealed (`bool`): whether the sealed test may be opened.

    Raises:
        ValueError: if matplotlib is missing; for the sealed test, if it may not be opened, or its list was changed.
    """
    if name == "train":
        split = Split(name, str(seed), 20_000, fonts.TRAIN, phrasings.TRAIN)
    elif name == "development":
        split = Split(name, str(seed), 2_000, fonts.DEVELOPMENT, phrasings.DEVELOPMENT)
    else:
        check_open(open_sealed, "use --split development")
        split = sealed_split()
    fonts.check_fonts(split.fonts)
    return split


def sealed_split() -> Split:
    """The sealed test, of which nothing is drawn yet. Raises a `ValueError` for a list that other splits share."""
    fields = read_sealed(SEALED, FIELDS)
    if known := set(fields["fonts"]) & {*fonts.TRAIN, *fonts.DEVELOPMENT}:
        raise ValueError(f"Expected fonts that no other split has, got {sorted(known)}.")
    check_phrasings(fields["phrasings"], phrasings.TRAIN, phrasings.DEVELOPMENT)
    lists = {kind: tuple(each) for kind, each in fields["phrasings"].items()}
    return Split("sealed", fields["seed"], fields["rows"], tuple(fields["fonts"]), lists)
