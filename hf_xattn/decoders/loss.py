"""The loss: the mean over the labels that are not ignored. Labels of -100 and image markers are ignored.

A model should not learn to generate markers, and the head may have no row for them. `Trainer` counts the labels of an
optimizer step (`num_items_in_batch`) before the model gets them, and leaves out only -100. So a collator should replace
markers in the labels by -100, as [`XAttnDataCollator`] does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..utils.distributed import is_distributed
from .text_inputs import check_labels, check_side_by_side


IGNORED = -100
UNCLEAR = (
    "Expected `labels` with -100 in place of image markers, got image markers (or ids without a row in the head), and "
    "a `num_items_in_batch` over several batches or processes, which may count them. Mask the labels in the collator: "
    "`labels = model.mask_labels(labels)`. `XAttnDataCollator` does."
)


def mask_labels(model: PreTrainedModel, labels: torch.Tensor, ignored: int = IGNORED) -> torch.Tensor:
    """Returns labels with `ignored` in place of image markers and of ids without a row in the head.

    The caller's tensor is not changed.

    Args:
        model ([`XAttnForConditionalGeneration`]): Its configuration and its embedding say which labels these are.
        labels (`torch.LongTensor`): Labels of any shape.
        ignored (`int`, defaults to -100): The label that the loss ignores.
    """
    config = model.config
    if config.image_token_id is not None:
        labels = labels.masked_fill(labels == config.image_token_id, ignored)
    if config.additional_vocab_size and not config.additional_vocab_in_head:
        embedding: Any = model.get_input_embeddings()
        labels = labels.masked_fill(labels >= embedding.num_embeddings, ignored)
    return labels


class LossInputs(NamedTuple):
    """The arguments of a loss. Labels are `(batch, text_len)`."""

    labels: torch.Tensor | None  # the position before a token predicts the label of the token
    shift_labels: torch.Tensor | None  # labels that are already shifted, in place of `labels`
    num_items_in_batch: int | torch.Tensor | None  # the divisor of the sum; None for the mean of this call
    ignore_index: int | None  # the label that is ignored; None for -100

    @classmethod
    def take_from(
        cls,
        model: PreTrainedModel,
        text: torch.Tensor | None,
        labels: torch.Tensor | None,
        logits_to_keep: int | torch.Tensor,
        kwargs: dict[str, Any],
    ) -> LossInputs:
        """Removes the arguments of a loss from `kwargs`, checks the labels, and masks them.

        Args:
            model ([`XAttnForConditionalGeneration`]): The model.
            text: The ids or embeddings of the call.
            labels (`torch.LongTensor`, *optional*): The labels, if `kwargs` has no `shift_labels`.
            logits_to_keep: The argument of the call.
            kwargs (`dict`): Other arguments of the call.

        Raises:
            TypeError: for labels that are not integers.
            ValueError: for labels that do not fit the text or `logits_to_keep`, and for image markers in the labels
                and a `num_items_in_batch` that may count those of other calls.
        """
        given, items = kwargs.pop("shift_labels", None), kwargs.pop("num_items_in_batch", None)
        index: int | None = kwargs.pop("ignore_index", None)
        ignored = IGNORED if index is None else index
        if given is None:
            check_side_by_side(logits_to_keep)
        for name, each in (("labels", labels), ("shift_labels", given)):
            if each is not None:
                check_labels(name, each, text, logits_to_keep, ignored)
        # transformers' loss takes a view of shifted labels, which is not possible for every slice
        masked, shifted = (
            None if each is None else mask_labels(model, each, ignored).contiguous() for each in (labels, given)
        )
        if items is not None and given is not None and shifted is not None:
            items = _items_that_count(items, given, shifted, ignored)
        elif items is not None and labels is not None and masked is not None:
            items = _items_that_count(items, labels[..., 1:], masked[..., 1:], ignored)
        return cls(masked, shifted, items, index)

    def given(self) -> dict[str, Any]:
        """Returns the arguments that are not None."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def _items_that_count(
    items: int | torch.Tensor, given: torch.Tensor, masked: torch.Tensor, ignored: int
) -> int | torch.Tensor:
    """Returns `num_items_in_batch` without the image markers of this call, if it is the number of this call's labels.

    Another number may count markers in the labels of other calls. Then the labels of this call must have no markers.
    """
    counted, left = given.ne(ignored).sum(), masked.ne(ignored).sum()
    items = torch.as_tensor(items, device=counted.device)
    # Among several processes the number may also be an average over their labels.
    of_this_call = torch.zeros_like(items, dtype=torch.bool) if is_distributed() else items == counted
    unclear = ((counted != left) & ~of_this_call).any()
    if torch.compiler.is_compiling():
        torch._assert_async(~unclear, UNCLEAR)
    elif unclear:
        raise ValueError(UNCLEAR)
    return torch.where(of_this_call, left.clamp(min=1), items)


def loss_over_all_logits(
    text_model: PreTrainedModel, outputs: CausalLMOutputWithPast, inputs: LossInputs
) -> torch.Tensor:
    """Computes the loss over all logits, also those of added tokens, and adds the load-balancing loss of experts."""
    assert outputs.logits is not None
    loss = text_model.loss_function(
        outputs.logits, vocab_size=outputs.logits.shape[-1], **{"labels": None, **inputs.given()}
    )
    # JetMoE has another name for the weight of the load-balancing loss.
    weights = (getattr(text_model, name, None) for name in ("router_aux_loss_coef", "aux_loss_coef"))
    balance, weight = outputs.get("aux_loss"), next((each for each in weights if each is not None), None)
    return loss if balance is None or weight is None else loss + weight * balance.to(loss.device)
