"""Proves on a loaded model what the package promises: each check measures one promise. `hf-xattn check` prints them.

A check changes nothing in the model, except that weights which only a saving writes anew (bitsandbytes' 4-bit scales)
are saved once.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from .blocks import check_alive, check_rows_without_image
from .caches import KINDS, CacheChecks, check_projections
from .measures import BROKEN, FRESH, HOLDS, NOT_CHECKED, Result
from .weights import check_files, check_text_only, check_weights


NAMES = ("base-weights", "text-only", "image-less-rows", "blocks-alive", "projected-once", *KINDS, "save-load")


def run_checks(
    model: Any,
    reload: Callable[[Path], Any],
    base: Callable[[], PreTrainedModel] | None = None,
    skip: Collection[str] = (),
    adapter_only: bool = False,
) -> Iterator[Result]:
    """Makes all checks, in the order of `NAMES`. At most two models of this size are in memory at a time.

    Args:
        model ([`XAttnForConditionalGeneration`]): in evaluation mode.
        reload (`Callable`): loads a model from a folder.
        base (`Callable`, *optional*): loads the base of the text half.
        adapter_only (`bool`): save only what was added, to check saving and loading.

    Raises:
        ValueError: for an unknown name in `skip`, before anything is checked; and what `base` raises.
    """
    if unknown := sorted(set(skip) - set(NAMES)):
        raise ValueError(f"Expected `--skip` to be one of {', '.join(NAMES)}, got {unknown[0]!r}.")
    return _results(model, reload, base, skip, adapter_only)


def _results(
    model: Any,
    reload: Callable[[Path], Any],
    load_base: Callable[[], PreTrainedModel] | None,
    skip: Collection[str],
    adapter_only: bool,
) -> Iterator[Result]:
    caches = CacheChecks(model)
    base = None if load_base is None or {"base-weights", "text-only"} <= set(skip) else load_base()
    checks: dict[str, Callable[[], Result]] = {
        "base-weights": lambda: _no_base(model) if base is None else check_weights(model, base),
        "text-only": lambda: check_text_only(model, base),
        "image-less-rows": lambda: check_rows_without_image(model),
        "blocks-alive": lambda: check_alive(model),
        "projected-once": lambda: check_projections(model),
        **{kind: lambda kind=kind: caches.check(kind) for kind in KINDS},  # type: ignore[misc]  # binds each kind
        "save-load": lambda: check_files(model, reload, adapter_only),
    }
    for name in NAMES:
        yield Result(name, NOT_CHECKED, "skipped") if name in skip else _measured(name, checks[name])
        if name == "text-only":
            base = None  # its memory is for the saved model
            gc.collect()


def _measured(name: str, check: Callable[[], Result]) -> Result:
    """The result of a check. An error in the model breaks a promise, too."""
    try:
        return check()
    except (torch.OutOfMemoryError, MemoryError) as error:
        return Result(name, NOT_CHECKED, f"out of memory: {_first_line(error)}")
    except Exception as error:  # whatever a model raises is what was found
        return Result(name, BROKEN, f"raised {type(error).__name__}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _no_base(model: Any) -> Result:
    name = model.config.text_config.name_or_path
    hint = f" (the model names {name})" if name else ""
    return Result("base-weights", NOT_CHECKED, f"no --base{hint}")


__all__ = ["BROKEN", "FRESH", "HOLDS", "NAMES", "NOT_CHECKED", "Result", "run_checks"]
