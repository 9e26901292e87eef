"""The options of `hf-xattn train`: names, defaults, help and checks, each option in one place.

The command line is made from the fields of [`TrainingOptions`]. In a usual script, `argparse` and the code that uses an
option each have their own copy of its default.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..data.forms import CAPTION_PROMPT
from ..data.loading import ORDER
from .launch import gpus_of_a_process, num_processes


STOP, SKIP = "stop", "skip"  # values of `--bad-rows`
NONE = "none"  # value of `--align`
TEXT_SHARE = 0.15
# Options that do not change the result. They may differ in a resumed run.
FREE_OPTIONS = (
    "output", "device", "workers", "log_steps", "adapter_only", "trust_remote_code", "report_to", "bad_rows",
    "bad_rows_limit"
)  # fmt: skip
TEACHES = "the text model is the teacher, and must not change"
# Options that exclude one another, with the reason.
EXCLUDING = (
    ("text_share", "train_text", TEACHES),
    ("text_prompts", "train_text", TEACHES),
    ("distill_text", "train_text", TEACHES),
    ("features", "train_vision", "features are stored outputs of a frozen vision tower"),
)


def _option(
    default: Any,
    told: str,
    kind: Any = int,
    least: float | None = None,
    above: float | None = None,
    below: float = math.inf,
    **more: Any,
) -> Any:
    """Makes a field with its help on the command line.

    Args:
        told (`str`): the help. The default of a number is added at its end.
        kind (`type`): type of the value on the command line. `bool` makes a flag.
        least, above, below (`float`, *optional*): bounds of a number: at least, above, and below these.
        more: further arguments of `add_argument`, and `group`, the name of options that exclude one another.
    """
    more = {"metavar": "X" if kind is float else "N", **more} if kind in (int, float) else more
    shown = "" if default is None or kind not in (int, float) else f" (default: {default})"
    given = {"action": "store_true"} if kind is bool else {"type": kind}
    bounds = {"least": least, "above": above, "below": below}
    return dataclasses.field(default=default, metadata={**bounds, "argument": {"help": told + shown, **given, **more}})


@dataclasses.dataclass
class TrainingOptions:
    """The options of `hf-xattn train`, with their defaults, bounds and help.

    The options without a help here have one in `commands/train.py`.
    """

    model: str
    data: list[str]
    output: Path
    pictures: Path | None = _option(
        None,
        "folder that the file names of images are relative to (default: the folder of SOURCE)",
        Path,
        metavar="FOLDER",
    )
    prompt: str | None = _option(
        None, f"question for images that have only a caption (default: {CAPTION_PROMPT})", str, metavar="TEXT"
    )
    epochs: float = _option(1.0, "number of passes through the data", float, above=0, metavar="N", group="length")
    steps: int | None = _option(None, "number of optimizer steps, in place of --epochs", least=1, group="length")
    batch_size: int = _option(8, "number of examples in a forward pass of each process", least=1)
    gradient_accumulation: int = _option(1, "number of forward passes for one optimizer step", least=1)
    learning_rate: float | None = _option(
        None,
        "highest learning rate (default: 0.003 for a fresh model that is started by words, see --align; 0.001 for a "
        "fresh model that starts at random, without --train-text and --train-vision; 0.0001 otherwise)",
        float,
        above=0,
    )
    started_rate: float | None = _option(
        None,
        "the output projections of the blocks and the gates of text tokens start at zero and learn at --learning-rate; "
        "all other weights learn at this share of it, so that they keep what --align gave them (default: 0.03 for a "
        "model that is started by words, 1 for others)",
        float,
        above=0,
    )
    align: str | None = _option(
        None,
        "before a fresh model is trained, its connector and blocks are started by words: image tokens are fitted to "
        "the text model's states of the words that belong to the images; SOURCE names rows with these words, and none "
        "leaves the model as it is (default: the rows of --data)",
        str,
        metavar="SOURCE",
    )
    warmup: float = _option(
        0.05, "share of the steps during which the learning rate rises to its highest value", float, 0, below=1
    )
    weight_decay: float = _option(
        0.0, "weight decay of AdamW; it applies to matrices, not to norms and biases", float, least=0
    )
    max_length: int | None = _option(None, "cut texts to N tokens (default: never)", least=1)
    eval_share: float | None = _option(
        None,
        "share of the examples to hold out and evaluate on, such as 0.1 (default: no evaluation)",
        float,
        above=0,
        below=1,
        group="evaluation",
    )
    eval_data: str | None = _option(
        None, "source of examples to evaluate on, in place of --eval-share", str, metavar="SOURCE", group="evaluation"
    )
    eval_steps: int | None = _option(None, "number of steps between two evaluations (default: one epoch)", least=1)
    save_steps: int | None = _option(
        None, "number of steps between two checkpoints (default: a tenth of all steps)", least=1
    )
    log_steps: int = _option(10, "number of steps between two lines of the log", least=1)
    workers: int = _option(0, "number of processes that read images; 0 reads them in the main process", least=0)
    seed: int = _option(0, "seed of the order of the examples and of dropout", least=0)
    stream: bool = _option(
        False,
        "begin at once, without the check of some rows that a run begins with; each row is checked when it is read",
        bool,
    )
    bad_rows: str = _option(
        STOP,
        "what to do with a row that cannot be trained on: stop ends the run with an error, and skip leaves the row out "
        "and names it in DIR/bad_rows.jsonl (default: stop)",
        str,
        choices=(STOP, SKIP),
    )
    bad_rows_limit: float = _option(0.01, "share of all rows that --bad-rows skip may leave out", float, 0, below=1)
    report_to: list[str] | None = _option(
        None,
        "where `Trainer` sends its log, such as tensorboard or wandb; you may name several (default: nowhere)",
        str,
        nargs="+",
        metavar="NAME",
    )
    train_text: bool = _option(False, "train the text model too (default: it stays frozen)", bool)
    train_vision: bool = _option(False, "train the vision tower too (default: it stays frozen)", bool)
    text_share: float | None = _option(
        None,
        "share of the rows of a run that are text prompts beside images of other rows; the model learns to answer them "
        "as the text model alone does, and so keeps its text ability when an image is in the chat; 0 turns this off "
        f"(default: {TEXT_SHARE}, and 0 with --train-text)",
        float,
        least=0,
        below=1,
    )
    text_prompts: Path | None = _option(
        None,
        "file with one prompt in each line; the text model writes the answers (default: prompts of this package)",
        Path,
        metavar="FILE",
    )
    distill_text: float | None = _option(
        None,
        "show each row without images beside an image of another row, and train its answer by WEIGHT times the KL "
        "divergence from the text model alone, in place of the cross-entropy, so that the image changes no answer "
        "(default: 1 if --text-share is above 0, else such rows are trained on as they are)",
        float,
        above=0,
        metavar="WEIGHT",
    )
    features: Path | None = _option(
        None,
        "folder of features that `hf-xattn encode-features` saved for the images; the vision tower does not run "
        "(default: the tower runs)",
        Path,
        metavar="FOLDER",
    )
    adapter_only: bool = _option(
        False,
        "save only what was added or has changed at the end; loading the model then fetches the rest from the "
        "checkpoints that MODEL was made of (checkpoints during the run hold the whole model)",
        bool,
    )
    dtype: str = _option(
        "auto",
        "dtype of the frozen weights; weights that train are float32 during training (default: auto, the dtype in "
        "which they were saved)",
        str,
        choices=("auto", "float32", "bfloat16"),
    )
    device: str = "auto"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            least, above, below = (field.metadata.get(name) for name in ("least", "above", "below"))
            number = getattr(self, field.name)
            if number is None or (least is None and above is None):
                continue
            if not ((number >= least if above is None else number > above) and number < below):
                bound = f"at least {least}" if above is None else f"above {above}"
                bound += "" if below == math.inf else f" and below {below}"
                raise ValueError(f"{option_of(field.name)} must be {bound}, got {number}.")
        for first, second, why in EXCLUDING:
            if getattr(self, first) and getattr(self, second):
                both = f"{option_of(first)} or {option_of(second)}"
                raise ValueError(f"Expected {both}, got both: {why}. Leave one of these options out.")
        if self.eval_steps is not None and self.eval_data is None and self.eval_share is None:
            raise ValueError(
                f"Expected `--eval-data` or `--eval-share` with `--eval-steps {self.eval_steps}`, got neither. Add "
                "one, or remove `--eval-steps`."
            )
        if self.text_prompts is not None and self.share_of_text == 0:
            raise ValueError("Expected `--text-share` above 0 with `--text-prompts`, got 0: no prompt would be read.")

    @property
    def share_of_text(self) -> float:
        """Share of the rows of a run that are text prompts beside images of other rows."""
        if self.text_share is None:
            return 0.0 if self.train_text else TEXT_SHARE
        return self.text_share

    @property
    def weight_of_text(self) -> float | None:
        """Weight of the KL for rows without an image. None: such rows are trained on as ordinary rows."""
        if self.distill_text is None and self.share_of_text:
            return 1.0
        return self.distill_text

    def saved(self, fingerprints: Sequence[str]) -> dict[str, Any]:
        """Returns what must be equal when the run is resumed: options, launch, and the `fingerprints` of the data."""
        options = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in dataclasses.asdict(self).items()
            if name not in FREE_OPTIONS
        }
        options["text_share"] = self.share_of_text
        launched = {"processes": num_processes(), "gpus": gpus_of_a_process(self.device)}
        return {**options, **launched, "order": ORDER, "fingerprints": list(fingerprints)}


def option_of(name: str) -> str:
    """Returns how a field is written on the command line, in backticks."""
    return f"`--{name.replace('_', '-')}`"
