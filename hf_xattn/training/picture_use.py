"""Measures whether a model uses its images: the loss of rows with their own image, and with the image of another row.

The training loss also falls when a model only learns how answers begin and which answer is frequent. The answers of
such a model do not depend on the image. So the same rows are read twice, and the two losses of each row are compared.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.utils import logging

from ..decoders.loss import IGNORED
from ..modeling_xattn import XAttnForConditionalGeneration
from .freezing import body_of


if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, TrainerControl, TrainerState, TrainingArguments

logger = logging.get_logger(__name__)

# Image inputs of a batch. Their first axis is the row.
OF_IMAGES = ("pixel_values", "vision_features", "cross_attention_states")
BESIDE_IMAGES = ("image_mask", "cross_attention_mask", "aspect_ratio_ids", "aspect_ratio_mask")
MOST_ROWS = 64
SURE = 3.0  # the difference must be larger than this many standard errors
WHAT_HELPS = "More steps, a higher learning rate or more rows help; examples/training/README.md tells of each."


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """Returns what each position predicts `(batch, text_len)`: the label of the next position, and -100 at the end."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def keeps_logits(text_model: PreTrainedModel) -> bool:
    """Whether a text model can compute logits at chosen positions only."""
    return "logits_to_keep" in inspect.signature(text_model.forward).parameters


def at_labels(labels: torch.Tensor, keeps: bool) -> tuple[torch.Tensor, dict[str, Any]]:
    """Chooses the positions whose logits are computed: those that predict a label in at least one of the rows.

    Args:
        labels (`torch.LongTensor`): `(batch, text_len)`.
        keeps (`bool`): whether the model can compute logits at chosen positions. Otherwise all positions are chosen.

    Returns:
        What the chosen positions predict `(batch, count)`, and the arguments of the model that choose them.
    """
    targets = shifted(labels)
    places = (targets != IGNORED).any(0).nonzero().flatten()
    if not keeps or not len(places):
        return targets, {}
    return targets[:, places], {"logits_to_keep": places}


class PictureUse(NamedTuple):
    """How much the loss of rows depends on their images.

    Attributes:
        own (`float`): mean loss of a label, in nats, with the row's own image.
        another (`float`): the same with the image of another row.
        rows (`int`): number of rows that were read.
        surely (`float`): the mean difference of the two losses of a row, divided by its standard error.
    """

    own: float
    another: float
    rows: int
    surely: float

    @property
    def uses(self) -> bool:
        """Whether the model uses its images: the loss with another image is higher than chance explains."""
        return self.surely > SURE

    def __str__(self) -> str:
        told = f"loss {self.own:.2f} with them, {self.another:.2f} with those of other rows ({self.rows} rows)"
        return f"The model uses its images: {told}" if self.uses else f"The model does not use its images: {told}"


@torch.no_grad()
def picture_use(
    model: XAttnForConditionalGeneration | PeftModel,
    rows: Sequence[Any],
    collate: Callable[[list[Any]], Mapping[str, Any]],
    *,
    batch_size: int = 8,
    most_rows: int = MOST_ROWS,
) -> PictureUse | None:
    """Measures how much the loss of answers rises if each row gets the image of another row.

    Args:
        model ([`XAttnForConditionalGeneration`]): the model, which may be inside PEFT's wrapper. It is evaluated in
            evaluation mode.
        rows (`Sequence`): rows that `collate` takes, such as rows for [`XAttnDataCollator`].
        collate (`Callable`): makes a batch with `labels` from a list of rows, such as an [`XAttnDataCollator`].
        batch_size (`int`, defaults to 8): rows at a time. At least 2, because a row gets the image of another row of
            its batch.
        most_rows (`int`, defaults to 64): of more rows, this many are read, at equal distances.

    Returns:
        [`PictureUse`], or None if no two rows of a batch have different images.

    Example:

    ```python
    >>> import hf_xattn
    >>> from transformers import AutoModelForImageTextToText, AutoProcessor

    >>> model = AutoModelForImageTextToText.from_pretrained("seeing")  # a folder of `hf-xattn train`
    >>> processor = AutoProcessor.from_pretrained("seeing")
    >>> use = hf_xattn.picture_use(model, hf_xattn.load_rows("pictures"), hf_xattn.XAttnDataCollator(processor))
    >>> use.rows
    3
    ```
    """
    count = min(len(rows), most_rows)
    chosen = [number * len(rows) // count for number in range(count)] if count else []
    differences, sums = [], torch.zeros(3, dtype=torch.float64)  # own, another, labels
    given: Any = model
    body = body_of(given.get_base_model() if hasattr(model, "get_base_model") else model)  # PEFT's wrapper has it
    taken = {*inspect.signature(body.forward).parameters, "labels"}
    keeps = keeps_logits(body.text_model)
    was_training = model.training
    model.eval()
    try:
        for start in range(0, count, batch_size):
            batch = dict(collate([rows[index] for index in chosen[start : start + batch_size]]))
            batch = {name: value.to(model.device) for name, value in batch.items() if name in taken}
            others = _others(batch)
            if others is None:
                continue
            kept = (others >= 0).nonzero()[:, 0]
            own, labels = _losses(model, keeps, batch)
            images = [name for name in (*OF_IMAGES, *BESIDE_IMAGES) if name in batch]
            shown = {name: batch[name][others.clamp(min=0)] for name in images}
            another, _ = _losses(model, keeps, {**batch, **shown})
            for row in kept.tolist():
                if labels[row]:
                    differences.append(float(another[row] - own[row]))
                    sums += torch.stack([own[row], another[row], labels[row]]).double().cpu()
    finally:
        model.train(was_training)
    if len(differences) < 2:
        return None
    of_rows = torch.tensor(differences, dtype=torch.float64)
    error = float(of_rows.std() / len(of_rows) ** 0.5)
    mean = float(of_rows.mean())
    return PictureUse(
        float(sums[0] / sums[2]),
        float(sums[1] / sums[2]),
        len(differences),
        mean / error if error > 0 else float("inf") if mean > 0 else 0.0,
    )


def _others(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Finds for each row another row of the batch, with the same number of images but different ones `(batch,)`.

    The index is -1 where no such row exists. Returns None for a batch without images, and for
    a batch whose rows share images.
    """
    images = next((batch[name] for name in OF_IMAGES if name in batch), None)
    if images is None or len(images) != len(batch["labels"]):  # rows that share images
        return None
    mask = batch.get("image_mask")
    counts = [images.shape[1]] * len(images) if mask is None else mask.sum(-1).tolist()
    found = []
    for row, pictures in enumerate(counts):
        behind = [other % len(counts) for other in range(row + 1, row + len(counts))]
        alike = [other for other in behind if pictures and counts[other] == pictures]
        found.append(next((other for other in alike if not torch.equal(images[other], images[row])), -1))
    return torch.tensor(found, device=images.device)


def _losses(model: Any, keeps: bool, batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sum of the loss over the labels of each row `(rows,)`, and the number of these labels `(rows,)`."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    targets, kept = at_labels(batch["labels"], keeps)
    logits = model(**inputs, **kept, use_cache=False, return_dict=True)["logits"].float()
    loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
    return loss.sum(1), (targets != IGNORED).sum(1)


class PictureUseCallback(TrainerCallback):
    """Measures at each evaluation, and at the end of a run of `Trainer`, whether the model uses its images.

    The log gets `loss_with_own_picture` and `loss_with_another`. At the end of the run, a model that does not use its
    images causes a warning. The attribute `last` holds the last [`PictureUse`].

    Args:
        rows (`Sequence`), collate (`Callable`), batch_size (`int`), most_rows (`int`): the arguments of
            [`picture_use`]. Use rows that the model is not trained on if you have them.

    Raises:
        ValueError: for a `batch_size` below 2.

    Example:

    ```python
    >>> import hf_xattn
    >>> from transformers import AutoModelForImageTextToText, AutoProcessor, Trainer, TrainingArguments

    >>> model = hf_xattn.freeze_base(AutoModelForImageTextToText.from_pretrained("seeing", dtype="float32"))
    >>> collator = hf_xattn.XAttnDataCollator(AutoProcessor.from_pretrained("seeing"))
    >>> rows = hf_xattn.load_rows("pictures")
    >>> arguments = TrainingArguments("trainer", remove_unused_columns=False, report_to="none")
    >>> callback = hf_xattn.PictureUseCallback(rows, collator)
    >>> trainer = Trainer(model, arguments, data_collator=collator, train_dataset=rows, callbacks=[callback])
    ```
    """

    def __init__(
        self,
        rows: Sequence[Any],
        collate: Callable[[list[Any]], Mapping[str, Any]],
        batch_size: int = 8,
        most_rows: int = MOST_ROWS,
    ):
        if batch_size < 2:
            raise ValueError(
                f"Expected `batch_size` to be at least 2, because a row gets the image of another, got {batch_size}."
            )
        self.rows, self.collate, self.batch_size, self.most_rows = rows, collate, batch_size, most_rows
        self.last: PictureUse | None = None
        self._measured_at = -1

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        self._measure(args, state, model)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        self._measure(args, state, model)
        if self.last is None:
            return
        if self.last.uses:
            logger.info(str(self.last))
        else:
            logger.warning(f"{self.last}. {WHAT_HELPS}")

    def _measure(self, args: Any, state: Any, model: Any) -> None:
        if self._measured_at == state.global_step:
            return
        self._measured_at = state.global_step
        half = torch.autocast(model.device.type, torch.bfloat16) if args.bf16 else contextlib.nullcontext()
        options = {"batch_size": self.batch_size, "most_rows": self.most_rows}
        try:
            with half:
                self.last = picture_use(model, self.rows, self.collate, **options)
        except Exception as error:  # a failed measurement must not end a run of hours
            self.last = None
            logger.warning(f"Whether the model uses its images could not be measured: {error}")
        if self.last is not None:
            losses = {"loss_with_own_picture": self.last.own, "loss_with_another": self.last.another}
            state.log_history.append({**losses, "step": state.global_step})
