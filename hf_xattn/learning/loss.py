"""The loss: the mean over the labels that count.

Two kinds of labels do not count: -100, as everywhere in transformers, and image markers. A model should not learn to generate markers, and
the head may have no row for them. `num_items_in_batch` is the number of labels that count, over all micro-batches of an optimizer step.
`Trainer` counts them before the model gets the labels (see `learning/trainer_labels.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.utils import logging


logger = logging.get_logger(__name__)

IGNORED = -100


class LabelMask(NamedTuple):
    """Which labels count.

    Attributes:
        image_token_id (`int`, *optional*): id of the image marker, which is ignored.
        vocab_size (`int`, *optional*): number of rows of the head. Ids without a row are ignored.
    """

    image_token_id: int | None
    vocab_size: int | None

    def __call__(self, labels: torch.Tensor, ignored: int = IGNORED) -> torch.Tensor:
        """Returns labels with `ignored` in place of those that do not count. The caller's tensor is not changed."""
        if self.image_token_id is not None:
            labels = labels.masked_fill(labels == self.image_token_id, ignored)
        if self.vocab_size is not None:
            labels = labels.masked_fill(labels >= self.vocab_size, ignored)
        return labels


class LossInputs(NamedTuple):
    """The arguments of a loss.

    Attributes:
        labels (`torch.LongTensor`, *optional*): `(batch, text_len)`. The position before a token predicts it.
        shift_labels (`torch.LongTensor`, *optional*): `(batch, text_len)`, labels that are already shifted; replaces `labels`.
        num_items_in_batch (`int` or `torch.Tensor`, *optional*): the loss is the sum divided by this number. None: the mean of this call.
        ignore_index (`int`, *optional*): the label that does not count. None: -100.
    """

    labels: torch.Tensor | None
    shift_labels: torch.Tensor | None
    num_items_in_batch: int | torch.Tensor | None
    ignore_index: int | None

    @classmethod
    def take_from(cls, mask: LabelMask, labels: torch.Tensor | None, kwargs: dict[str, Any]) -> LossInputs:
        """Removes the arguments of a loss from `kwargs`, and masks the labels."""
        given, items = kwargs.pop("shift_labels", None), kwargs.pop("num_items_in_batch", None)
        index: int | None = kwargs.pop("ignore_index", None)
        ignored = IGNORED if index is None else index
        masked, shifted = (None if each is None else mask(each, ignored) for each in (labels, given))
        if items is not None:
            if given is not None and shifted is not None:
                items = _items_that_count(items, given, shifted, ignored)
            elif labels is not None and masked is not None:
                items = _items_that_count(items, labels[..., 1:], masked[..., 1:], ignored)
        return cls(masked, shifted, items, index)

    @property
    def has_labels(self) -> bool:
        return self.labels is not None or self.shift_labels is not None

    @property
    def given(self) -> dict[str, Any]:
        """The arguments that are not None."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def _items_that_count(
    items: int | torch.Tensor, given: torch.Tensor, masked: torch.Tensor, ignored: int
) -> int | torch.Tensor:
    """Corrects `num_items_in_batch` if it counts the labels of this call, including image markers.

    A number that covers other micro-batches is returned unchanged, because their labels are not known here.
    """
    counted, left = given.ne(ignored).sum(), masked.ne(ignored).sum()
    items = torch.as_tensor(items, device=counted.device)
    of_this_call = items == counted
    if not torch.compiler.is_compiling() and bool(((counted != left) & ~of_this_call).any()):
        logger.warning_once(
            "`labels` hold image markers, which do not count in the loss. If `num_items_in_batch` counts them, the loss is too small. "
            "Mask the labels before you count them: `labels = model.mask_labels(labels)`."
        )
    return torch.where(of_this_call, left.clamp(min=1), items)


def loss_over_all_logits(text_model: PreTrainedModel, outputs: Any, inputs: LossInputs) -> torch.Tensor:
    """Computes the loss over all logits, including those of added tokens, and adds the decoder's load-balancing loss of experts."""
    loss = text_model.loss_function(
        outputs.logits, vocab_size=outputs.logits.shape[-1], **{"labels": None, **inputs.given}
    )
    balance, weight = outputs.get("aux_loss"), getattr(text_model, "router_aux_loss_coef", None)
    return loss if balance is None or weight is None else loss + weight * balance.to(loss.device)
