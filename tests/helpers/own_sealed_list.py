"""Lists of the tests' own in the place of the sealed ones, which no test opens."""

import hashlib
import json

import sealed_digits

from hf_xattn.demo.questions import PHRASINGS


def put_list(folder, fields):
    """Writes a list, and its SHA-256 beside it."""
    file = folder / "sealed.json"
    file.write_text(json.dumps(fields))
    file.with_suffix(".sha256").write_text(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n")
    return file


def seal_digits(folder, monkeypatch, **changes):
    """Sealed questions about digits: those of training, behind a word that tells them apart."""
    phrasings = {kind: [f"Sealed: {each[0]}"] for kind, each in PHRASINGS.items()}
    file = put_list(folder, {"seed": 11, "count": 5, "phrasings": phrasings, **changes})
    monkeypatch.setattr(sealed_digits, "SEALED", file)
    return file
