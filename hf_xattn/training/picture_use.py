"""Whether a model uses its images: the loss of rows with their own image, and with that of another row.

The loss of a run falls, too, where a model only learns how answers begin and which one is frequent. Such a model
answers as before beside any image. So the same rows are read twice, and the difference of a row counts.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers import TrainerCallback
from transformers.utils import logging

from ..decoders.loss import IGNORED
from .freezing import body_of


logger = logging.get_logger(__name__)

# Image inputs of a batch, which have its rows in front.
OF_IMAGES = ("pixel_values", "vision_features", "cross_attention_states")
BESIDE_IMAGES = ("image_mask", "cross_attention_mask", "aspect_ratio_ids", "aspect_ratio_mask")
MOST_ROWS = 64
SURE = 3.0  # standard errors
WHAT_HELPS = "More steps, a higher learning rate or more rows help; examples/training/README.md tells of each."


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """What each position predicts: the label of the next one, and nothing at the end. `(batch, text_len)`."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def keeps_logits(text_model: Any) -> bool:
    """Whether a text model computes logits at some positions alone."""
    return "logits_to_keep" in inspect.signature(text_model.forward).parameters


def at_labels(labels: torch.Tensor, keeps: bool) -> tuple[torch.Tensor, dict[str, Any]]:
    """The labels of the positions whose logits are computed `(batch, count)`, and what the model needs for that.

    These are positions that predict a label in one of the rows; all, if the model does not keep some (`keeps`).
    """
    targets = shifted(labels)
    places = (targets != IGNORED).any(0).nonzero().flatten()
    if not keeps or not len(places):
        return targets, {}
    return targets[:, places], {"logits_to_keep": places}


class PictureUse(NamedTuple):
    """What images do to the loss of rows.

    Attributes:
        own, another (`float`): mean loss of a label, in nats, with the image of the row, and with that of another.
        rows (`int`): how many were read.
        surely (`float`): by how many standard errors the mean difference of a row is above zero.
    """

    own: float
    another: float
    rows: int
    surely: float

    @property
    def uses(self) -> bool:
        """Whether the model uses its images: beside another one, answers are less likely than chance explains."""
        return self.surely > SURE

    def __str__(self) -> str:
        told = f"loss {self.own:.2f} with them, {self.another:.2f} with those of other rows ({self.rows} rows)"
        return f"The model uses its pictures: {told}" if self.uses else f"The model does not use its pictures: {told}"


@torch.no_grad()
def picture_use(
    model: Any,
    rows: Sequence[Any],
    collate: Callable[[list[Any]], Mapping[str, Any]],
    *,
    batch_size: int = 8,
    most_rows: int = MOST_ROWS,
) -> PictureUse | None:
    """Measures what the images of rows do to the loss of their answers.

    Args:
        model ([`XAttnForConditionalGeneration`]): also in a wrapper of PEFT. It is read in evaluation mode.
        rows (`Sequence`): what `collate` takes, such as rows for [`XAttnDataCollator`]. Of more than `most_rows`, some
            at equal distances are read.
        collate (`Callable`): makes a batch with `labels` of a list of rows, such as an [`XAttnDataCollator`].
        batch_size (`int`, defaults to 8): rows at a time, at least 2: a row gets the image of another one of them.

    Returns:
        [`PictureUse`], or None if no two rows have different images.
    """
    count = min(len(rows), most_rows)
    chosen = [number * len(rows) // count for number in range(count)] if count else []
    differences, sums = [], torch.zeros(3, dtype=torch.float64)  # own, another, labels
    taken = {*inspect.signature(body_of(model).forward).parameters, "labels"}
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
            own, labels = _losses(model, batch)
            images = [name for name in (*OF_IMAGES, *BESIDE_IMAGES) if name in batch]
            another, _ = _losses(model, {**batch, **{name: batch[name][others.clamp(min=0)] for name in images}})
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
    """For each row the number of another one with as many images, which differ; -1 where there is none."""
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


def _losses(model: Any, batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the loss over the labels of each row, and their number, `(rows,)`."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    targets, kept = at_labels(batch["labels"], keeps_logits(body_of(model).text_model))
    logits = model(**inputs, **kept, use_cache=False, return_dict=True)["logits"].float()
    loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
    return loss.sum(1), (targets != IGNORED).sum(1)


class PictureUseCallback(TrainerCallback):
    """Says at each evaluation, and at the end of a run of `Trainer`, whether the model uses its images.

    The log gets `loss_with_own_picture` and `loss_with_another`; a model that does not use its images yet is a
    warning at the end. `last` holds what was measured last.

    Args:
        rows (`Sequence`), collate (`Callable`), batch_size (`int`), most_rows (`int`): as of [`picture_use`]. Rows that
            are not trained on tell most.
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
                f"Expected `batch_size` of at least 2, because a row gets the picture of another one, got {batch_size}."
            )
        self.rows, self.collate, self.batch_size, self.most_rows = rows, collate, batch_size, most_rows
        self.last: PictureUse | None = None
        self._measured_at = -1

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._measure(args, state, model)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
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
        except Exception as error:  # a run of hours is not lost for this
            self.last = None
            logger.warning(f"Whether the model uses its pictures could not be measured: {error}")
        if self.last is not None:
            losses = {"loss_with_own_picture": self.last.own, "loss_with_another": self.last.another}
            state.log_history.append({**losses, "step": state.global_step})
