"""A sealed test: its list is committed before what it will measure, and it is opened once, at the end.

`sealed.json` holds what a test is drawn from, `sealed.sha256` beside it the SHA-256 of that file. The examples `scenes`
and `digits` have one each.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Formatter
from typing import Any


def check_open(opened: bool, before: str) -> None:
    """Raises a `ValueError` if nobody has asked to open the test. `before` says what to do until the end."""
    if not opened:
        raise ValueError(
            "Expected --open-sealed, because the sealed test is opened once: after the last training run and the last "
            f"choice of a setting. For all before, {before}."
        )


def digest_of(file: Path) -> str:
    """SHA-256 of a file as it is in the repository. Git may check it out with other ends of lines."""
    return hashlib.sha256(file.read_text(encoding="utf-8").encode()).hexdigest()


def read_sealed(file: Path, types: Mapping[str, type]) -> dict[str, Any]:
    """The fields of a list, which has the SHA-256 of the file beside it.

    Args:
        types (`Mapping[str, type]`): of each field. A number must be at least 1, all else not empty.

    Raises:
        ValueError: if a file is missing or has another hash, or a field is not of its type.
    """
    guard = file.with_suffix(".sha256")
    if missing := [each for each in (file, guard) if not each.is_file()]:
        raise ValueError(
            f"Expected the list of the sealed test and its SHA-256, got no {missing[0]}: take it from the repository."
        )
    expected, found = guard.read_text().split()[0], digest_of(file)
    if found != expected:
        raise ValueError(
            f"Expected {file.name} with the SHA-256 {expected}, which is in {guard.name}, got {file} with {found}. "
            "Another list is another test: take both files from the repository, as they were first committed."
        )
    fields = json.loads(file.read_text(encoding="utf-8"))
    for name, type_ in types.items():
        value = fields.get(name)
        if type(value) is not type_ or not value or (type_ is int and value < 1):
            kind = "at least 1" if type_ is int else f"a {type_.__name__}, not empty"
            raise ValueError(f"Expected {name!r} of a sealed test to be {kind}, got {value!r}.")
    if unknown := sorted(set(fields) - set(types)):
        raise ValueError(f"Expected a sealed test to have {sorted(types)}, got {unknown} too.")
    return fields


def check_phrasings(sealed: Mapping[str, Iterable[str]], *known: Mapping[str, Iterable[str]]) -> None:
    """Raises a `ValueError` for phrasings that cannot be asked, or that are known but for case and punctuation.

    Args:
        sealed, known: phrasings of each kind of question.
    """
    if set(sealed) != set(known[0]):
        raise ValueError(f"Expected phrasings of {sorted(known[0])}, got {sorted(sealed)}.")
    for kind, each in sealed.items():
        if not isinstance(each, list) or len({*map(plain, each)}) != len(each) or not each:
            raise ValueError(f"Expected a list of different phrasings of {kind!r}, got {each!r}.")
        taken = {plain(phrasing) for split in known for phrasing in split[kind]}
        if double := [phrasing for phrasing in each if plain(phrasing) in taken]:
            raise ValueError(f"Expected phrasings that no other split has, got {double} of {kind!r}.")
        words = placeholders(next(iter(known[0][kind])))
        if wrong := [phrasing for phrasing in each if placeholders(phrasing) != words]:
            raise ValueError(f"Expected a phrasing of {kind!r} to have {sorted(words)} in braces, got {wrong[0]!r}.")


def placeholders(phrasing: str) -> set[str]:
    """The words in braces."""
    return {name for _, name, _, _ in Formatter().parse(phrasing) if name is not None}


def plain(phrasing: str) -> str:
    """A phrasing without what makes no other one of it."""
    return re.sub(r"[^\w{}]+", " ", phrasing.lower()).strip()
