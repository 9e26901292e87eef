"""The three splits: which seed, fonts and phrasings each has.

The sealed test stays closed until the end. Its seed, size, fonts and phrasings are in a file that is not in the
repository. The SHA-256 of that file is, in `sealed.sha256`, since before the first training run. So nobody can fit a
model to the test, and nobody can choose the test after the models.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fonts
import phrasings


HERE = Path(__file__).parent
SEALED = HERE / "sealed.json"  # committed when the test is opened
DIGEST = HERE / "sealed.sha256"
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


def open_split(name: str, seed: int, sealed: Path = SEALED, digest: str | None = None) -> Split:
    """Returns a split.

    Args:
        seed (`int`): not used by the sealed test, which has its own.
        sealed (`Path`): the file of the sealed test.
        digest (`str`, *optional*): its SHA-256; that in `sealed.sha256` if not given.

    Raises:
        ValueError: if matplotlib is missing, or the file is missing or another one.
    """
    if name == "train":
        split = Split(name, str(seed), 20_000, fonts.TRAIN, phrasings.TRAIN)
    elif name == "development":
        split = Split(name, str(seed), 2_000, fonts.DEVELOPMENT, phrasings.DEVELOPMENT)
    else:
        split = _read_sealed(sealed, digest or DIGEST.read_text().split()[0])
    fonts.check_fonts(split.fonts)
    return split


def _read_sealed(file: Path, digest: str) -> Split:
    if not file.is_file():
        raise ValueError(
            f"Expected --sealed to be the file of the sealed test, got {file}, which does not exist. The test stays "
            "closed until the last training run: for all before, use --split development."
        )
    content = file.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != digest:
        raise ValueError(
            f"Expected --sealed to be the file with the SHA-256 {digest}, which {DIGEST.name} has had since before "
            f"the first training run, got {file} with {found}. Another file is another test: use the first one, "
            "byte for byte."
        )
    fields = json.loads(content)
    _check(fields)
    lists = {kind: tuple(each) for kind, each in fields["phrasings"].items()}
    return Split("sealed", fields["seed"], fields["rows"], tuple(fields["fonts"]), lists)


def _check(fields: dict[str, Any]) -> None:
    """Raises a `ValueError` for a list that holds what other splits hold, or that cannot be asked."""
    for name, type_ in FIELDS.items():
        if not isinstance(fields.get(name), type_):
            raise ValueError(f"Expected {name!r} of a sealed test to be a {type_.__name__}, got {fields.get(name)!r}.")
    if known := set(fields["fonts"]) & {*fonts.TRAIN, *fonts.DEVELOPMENT}:
        raise ValueError(f"Expected fonts that no other split has, got {sorted(known)}.")
    if set(fields["phrasings"]) != set(phrasings.TRAIN):
        raise ValueError(f"Expected phrasings of {sorted(phrasings.TRAIN)}, got {sorted(fields['phrasings'])}.")
    for kind, each in fields["phrasings"].items():
        if known := set(each) & {*phrasings.TRAIN[kind], *phrasings.DEVELOPMENT[kind]}:
            raise ValueError(f"Expected phrasings that no other split has, got {sorted(known)} of {kind!r}.")
        words = phrasings.placeholders(phrasings.TRAIN[kind][0])
        for phrasing in each:
            if phrasings.placeholders(phrasing) != words:
                raise ValueError(
                    f"Expected a phrasing of {kind!r} to have {sorted(words)} in braces, got {phrasing!r}."
                )
