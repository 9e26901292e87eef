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


def _option(
    default: Any,
    told: str,
    kind: Any = int,
    least: float | None = None,
    above: float | None = None,
    below: float = math.inf,
    **more: Any,
) -> Any:
    """Makes a field with its help on the command line and the bounds of its number.

    Args:
        default: the default value.
        told: the help.
        kind: the type of the value.
        least, above, below: the number must be at least `least`, above `above`, and below `below`.
        more: further arguments of `add_argument`.
    """
    more = {"metavar": "X" if kind is float else "N", **more} if kind in (int, float) else more
    shown = "" if default is None or kind not in (int, float) else f" (default: {default})"
    given = {"action": "store_true"} if kind is bool else {"type": kind}
    bounds = {"least": least, "above": above, "below": below}
    return dataclasses.field(default=default, metadata={**bounds, "argument": {"help": told + shown, **given, **more}})


@dataclasses.dataclass
class TrainingOptions:
    """The options of `hf-xattn train`. Options without a help here have it in `commands/train.py`.

    Raises:
        ValueError: for a number out of its bounds, and for options that exclude one another.
    """

    model: str
    data: list[str]
    output: Path
    pictures: Path | None = _option(
        None, "folder that names of images are relative to (default: the folder of the source)", Path, metavar="FOLDER"
    )
    prompt: str | None = _option(None, "the question for images that have only a caption", str, metavar="TEXT")
    epochs: float = _option(1.0, "times to go through the data", float, above=0, metavar="N", group="length")
    steps: int | None = _option(None, "optimizer steps, instead of --epochs", least=1, group="length")
    batch_size: int = _option(8, "examples per forward pass of each process", least=1)
    gradient_accumulation: int = _option(1, "forward passes per optimizer step", least=1)
    learning_rate: float | None = _option(
        None,
        "highest learning rate (default: 0.003 for a fresh model that is started by words, 0.001 for another fresh "
        "one, 0.0001 for a trained one)",
        float,
        above=0,
    )
    started_rate: float | None = _option(
        None,
        "share of the learning rate for all weights that do not start at zero. A small share keeps a start by words "
        "while the output projections of the blocks learn (default: 0.03 for a model that is started by words, 1 for "
        "others)",
        float,
        above=0,
    )
    align: str | None = _option(
        None,
        "start the connector and the blocks of a fresh model by the words of this source instead of those of --data; "
        "with none, they stay as they are, for example as align_connector has started them",
        str,
        metavar="SOURCE",
    )
    warmup: float = _option(0.05, "share of the steps in which the learning rate rises", float, 0, below=1)
    weight_decay: float = _option(0.0, "weight decay of AdamW, on matrices only", float, least=0)
    max_length: int | None = _option(None, "cut texts to N tokens", least=1)
    eval_share: float | None = _option(
        None, "share of the examples to keep for evaluation, such as 0.1", float, above=0, below=1, group="evaluation"
    )
    eval_data: str | None = _option(
        None, "examples to evaluate on, a source as for --data", str, metavar="SOURCE", group="evaluation"
    )
    eval_steps: int | None = _option(None, "steps between evaluations (default: one epoch)", least=1)
    save_steps: int | None = _option(None, "steps between checkpoints (default: a tenth of all steps)", least=1)
    log_steps: int = _option(10, "steps between lines of the log", least=1)
    workers: int = _option(0, "worker processes that read rows and images", least=0)
    seed: int = _option(0, "seed of the order of the examples and of dropout", least=0)
    stream: bool = _option(
        False,
        "do not check any rows to train on before the run; each row is checked when it is read",
        bool,
    )
    bad_rows: str = _option(
        STOP,
        "what to do with a row that cannot be trained on: end with an error (default), or leave it out and name it in "
        "DIR/bad_rows.jsonl",
        str,
        choices=(STOP, SKIP),
    )
    bad_rows_limit: float = _option(0.01, "largest share of all rows that may be left out", float, 0, below=1)
    report_to: list[str] | None = _option(
        None,
        "where `Trainer` sends its log, such as tensorboard or wandb; several may follow (default: nowhere)",
        str,
        nargs="+",
        metavar="NAME",
    )
    train_text: bool = _option(False, "train the text model too; it is frozen otherwise", bool)
    train_vision: bool = _option(False, "train the vision tower too; it is frozen otherwise", bool)
    text_share: float | None = _option(
        None,
        "share of the rows of the run that are text prompts, each shown with the image of another row. The run trains "
        "the model to answer them as without an image, so that it keeps its text ability in a chat that holds an "
        f"image. 0 turns this off (default: {TEXT_SHARE}, and 0 with --train-text)",
        float,
        least=0,
        below=1,
    )
    text_prompts: Path | None = _option(
        None,
        "a text file with one prompt a line, instead of the package's prompts; the text model answers them",
        Path,
        metavar="FILE",
    )
    distill_text: float | None = _option(
        None,
        "show rows without an image together with the image of another row, and train their answers to be those of the "
        "text model alone: WEIGHT times the KL divergence takes the place of their loss (default: 1 with a "
        "--text-share)",
        float,
        above=0,
        metavar="WEIGHT",
    )
    features: Path | None = _option(
        None,
        "folder of `hf-xattn encode-features`, with stored outputs of the frozen vision tower; the tower does not run",
        Path,
        metavar="FOLDER",
    )
    adapter_only: bool = _option(
        False,
        "save only the weights that were added or have changed; the rest is loaded from the checkpoints that MODEL was "
        "made of. Checkpoints during the run hold the whole model",
        bool,
    )
    dtype: str = _option(
        "auto",
        "dtype of the frozen weights; weights that train are float32 during the run",
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
        if self.eval_steps is not None and self.eval_data is None and self.eval_share is None:
            raise ValueError(
                f"Expected `--eval-data` or `--eval-share` with `--eval-steps {self.eval_steps}`, got neither. Add "
                "one, or remove `--eval-steps`."
            )
        if self.train_text and (self.text_share or self.text_prompts is not None):
            given = "--text-share" if self.text_share else "--text-prompts"
            raise ValueError(
                f"Expected `{given}` or `--train-text`, got both: the text model is the teacher of the text prompts, "
                "and must not change. With `--train-text`, put rows without an image into the data instead."
            )
        if self.text_prompts is not None and self.share_of_text == 0:
            raise ValueError(
                "Expected `--text-share` above 0 with `--text-prompts`, got 0: no prompt would be read. Leave one of "
                "these options out."
            )
        if self.distill_text is not None and self.train_text:
            raise ValueError(
                "Expected `--distill-text` or `--train-text`, got both: the text model is the teacher, and must not "
                "change. Leave one of these options out."
            )
        if self.features is not None and self.train_vision:
            raise ValueError(
                "Expected `--features` or `--train-vision`, got both: features are stored outputs of a frozen vision "
                "tower. Leave one of these options out."
            )

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
