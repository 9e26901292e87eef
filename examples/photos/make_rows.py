"""Makes pictures of photographed things, with questions and answers, as `hf-xattn train` and `eval` read them.

python examples/photos/make_rows.py OUTPUT --stamps tuxpaint-stamps-default_*.deb --grounds mate-backgrounds_*.deb

OUTPUT gets the folders `train` (chats about new pictures of the trained photographs) and `held_out` (questions in
other words, about new pictures and about photographs that are not in `train`). `--languages de fr` adds chats in German
and French to `train`, a fifth of the pictures each, and the folders `held_out_de` and `held_out_fr`. The sealed test is
opened once, at the end: `--open-sealed` writes it, and nothing else, to OUTPUT/sealed.
"""

from __future__ import annotations

import argparse
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import languages

from hf_xattn.demo.photographs.pictures import INSTALLED, Pictures, Thing, read_table
from hf_xattn.demo.photographs.rows import (
    NEW_PHRASINGS,
    PHRASINGS,
    PICTURES,
    asked_rows,
    train_rows,
    write_held_out,
    write_rows,
)


sys.path.append(str(Path(__file__).parents[1]))  # where sealed_list.py is
from sealed_list import check_open, check_phrasings, digest_of, read_sealed


SEALED = Path(__file__).with_name("sealed.json")
FIELDS = {"seed": int, "each": int, "others": int, "phrasings": dict, "rows": str}


def sealed_list() -> dict[str, Any]:
    """The list of the sealed test, of which nothing is drawn yet. Raises a `ValueError` if it was changed."""
    fields = read_sealed(SEALED, FIELDS)
    check_phrasings(fields["phrasings"], PHRASINGS, NEW_PHRASINGS)
    return fields


def open_sealed(folder: Path, pictures: Pictures, things: list[Thing]) -> None:
    """Writes the sealed test. Raises a `ValueError` if its rows are not those of the list."""
    check_open(True, "")
    fields = sealed_list()
    counts = {"each": fields["each"], "others": fields["others"]}
    rows = asked_rows(pictures, things, "sealed", fields["seed"], fields["phrasings"], **counts)
    digest = write_rows(folder, rows)
    if digest != fields["rows"]:
        raise ValueError(f"Expected rows with the SHA-256 {fields['rows']}, got {digest}: the code has changed.")
    print(f"The sealed test ({digest_of(SEALED)}) is in {folder}.")


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    source = "a .deb file, the folder into which one was unpacked, or / where it is installed (default)"
    parser.add_argument("--stamps", type=Path, default=INSTALLED, help=f"tuxpaint-stamps-default: {source}")
    parser.add_argument("--grounds", type=Path, help="mate-backgrounds, in the same way; without it grounds are plain")
    parser.add_argument("--pictures", type=int, default=PICTURES, help="to train on")
    parser.add_argument("--languages", nargs="+", default=(), choices=languages.LANGUAGES, help="beside English")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--open-sealed", action="store_true", help="write the sealed test: once, at the end")
    arguments = parser.parse_args(given)
    things = read_table()
    try:
        captions = {code: languages.read_captions(arguments.stamps, things, code) for code in arguments.languages}
        pictures = Pictures(arguments.stamps, arguments.grounds, things)
        if arguments.open_sealed:
            open_sealed(arguments.output / "sealed", pictures, things)
            return
    except ValueError as error:
        parser.error(str(error))
    count, seed = arguments.pictures, arguments.seed
    others = [languages.train_rows(pictures, things, own, code, count // 5, seed) for code, own in captions.items()]
    write_rows(arguments.output / "train", chain(train_rows(pictures, things, count, seed), *others))
    write_held_out(arguments.output / "held_out", pictures, things, seed)
    for code, own in captions.items():
        write_rows(arguments.output / f"held_out_{code}", languages.asked_rows(pictures, things, own, code, seed))
    print(f"The rows are in {arguments.output}.")


if __name__ == "__main__":
    main()
