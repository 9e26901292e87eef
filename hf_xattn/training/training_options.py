"""The options of `hf-xattn train`: their names, their defaults, and what a value must be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .bad_rows import SKIP, STOP
from .launch import gpus_of_a_process, num_processes


# Options that do not change the result. They may be different in a resumed run.
FREE_OPTIONS = (
    "output", "device", "workers", "log_steps", "adapter_only", "trust_remote_code", "report_to", "bad_rows_limit"
)  # fmt: skip

COUNTS = ("batch_size", "gradient_accumulation", "log_steps", "steps", "eval_steps", "save_steps", "max_length")
TEXT_SHARE = 0.15
NONE = "none"  # value of `--align`
LEAST = {**dict.fromkeys(COUNTS, 1), **dict.fromkeys(("workers", "weight_decay", "seed"), 0)}


@dataclasses.dataclass
class TrainingOptions:
    """The options of `hf-xattn train`, with the same names; see its `--help`."""

    model: str
    data: list[str]
    output: Path
    pictures: Path | None = None
    stream: bool = False
    bad_rows: str = STOP
    bad_rows_limit: float = 0.01
    prompt: str | None = None
    epochs: float = 1.0
    steps: int | None = None
    batch_size: int = 8
    gradient_accumulation: int = 1
    learning_rate: float | None = None
    started_rate: float | None = None
    align: str | None = None
    warmup: float = 0.05
    weight_decay: float = 0.0
    max_length: int | None = None
    eval_share: float | None = None
    eval_data: str | None = None
    eval_steps: int | None = None
    save_steps: int | None = None
    log_steps: int = 10
    train_text: bool = False
    train_vision: bool = False
    text_share: float | None = None
    text_prompts: Path | None = None
    distill_text: float | None = None
    adapter_only: bool = False
    features: Path | None = None
    dtype: str = "auto"
    device: str = "auto"
    workers: int = 0
    seed: int = 0
    report_to: list[str] | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            number = getattr(self, name)
            if number is not None and not least <= number < math.inf:
                raise ValueError(f"{option_of(name)} must be at least {least}, got {number}.")
        for name in ("epochs", "learning_rate", "started_rate", "distill_text"):
            number = getattr(self, name)
            if number is not None and not (number > 0 and math.isfinite(number)):
                raise ValueError(f"{option_of(name)} must be above 0, got {number}.")
        shares = dict.fromkeys(("warmup", "bad_rows_limit", "text_share"), (0.0, "at least 0"))
        for name, (low, above) in {**shares, "eval_share": (1e-9, "above 0")}.items():
            share = getattr(self, name)
            if share is not None and not low <= share < 1:
                raise ValueError(f"{option_of(name)} must be a share, {above} and below 1, got {share}.")
        if self.eval_steps is not None and self.eval_data is None and self.eval_share is None:
            raise ValueError(
                f"Expected `--eval-data` or `--eval-share` with `--eval-steps {self.eval_steps}`, got neither. Add "
                "one, or remove `--eval-steps`."
            )
        if self.train_text and (self.text_share or self.text_prompts is not None):
            given = "--text-share" if self.text_share else "--text-prompts"
            raise ValueError(
                f"Expected `{given}` or `--train-text`, got both: the text model is the teacher of these rows, and "
                "must stay as it is. Put rows without a picture into the data."
            )
        if self.text_prompts is not None and self.share_of_text == 0:
            raise ValueError(
                "Expected `--text-share` above 0 with `--text-prompts`, got 0: no prompt would be read. Leave one of "
                "them out."
            )
        if self.distill_text is not None and self.train_text:
            raise ValueError(
                "Expected `--distill-text` or `--train-text`, got both: the text model without a picture is the "
                "teacher, and must stay as it is."
            )
        if self.features is not None and self.train_vision:
            raise ValueError("Expected `--features` or `--train-vision`, got both: features are of a frozen tower.")
        if self.prompt is not None and not self.prompt.strip():
            raise ValueError("`--prompt` must be a text that is not empty.")

        if self.bad_rows not in (STOP, SKIP):
            raise ValueError(f"`--bad-rows` must be one of {[STOP, SKIP]}, got {self.bad_rows!r}.")

    @property
    def share_of_text(self) -> float:
        """Share of the rows of a run that are text prompts beside pictures of other rows."""
        if self.text_share is None:
            return 0.0 if self.train_text else TEXT_SHARE
        return self.text_share

    @property
    def weight_of_text(self) -> float | None:
        """Weight of the KL of rows without a picture. None: they are read as they are."""
        if self.distill_text is None and self.share_of_text:
            return 1.0
        return self.distill_text

    def saved(self, fingerprints: Sequence[str]) -> dict[str, Any]:
        """Returns the values that must be the same when the run is resumed. `fingerprints`: of the data."""
        options = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in dataclasses.asdict(self).items()
            if name not in FREE_OPTIONS
        }
        options["text_share"] = self.share_of_text
        launched = {"processes": num_processes(), "gpus": gpus_of_a_process(self.device)}
        return {**options, **launched, "fingerprints": list(fingerprints)}


def option_of(name: str) -> str:
    return f"`--{name.replace('_', '-')}`"
