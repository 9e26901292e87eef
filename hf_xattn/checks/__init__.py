"""Proves on a loaded model what the package promises: each check measures one promise. `hf-xattn check` prints them.

A check changes nothing in the model, except that weights which only a saving writes anew (bitsandbytes' 4-bit scales)
are saved once.
"""

from .results import BROKEN, FRESH, HOLDS, NOT_CHECKED, Result
from .run import NAMES, run_checks


__all__ = ["BROKEN", "FRESH", "HOLDS", "NAMES", "NOT_CHECKED", "Result", "run_checks"]
