"""Which labels of a model count in the loss, also for those who count them first: a training loop, `Trainer`."""

from __future__ import annotations

from typing import Any

import torch

from .configuration_xattn import XAttnConfig
from .learning.loss import LabelMask
from .learning.trainer_labels import mask_labels_in_trainer
from .utils.tensor_checks import check_integers, check_tensor


class XAttnLabelsMixin:
    """What [`XAttnForConditionalGeneration`] does with labels."""

    config: XAttnConfig
    get_input_embeddings: Any

    def _label_mask(self) -> LabelMask:
        without_rows = self.config.additional_vocab_size and not self.config.additional_vocab_in_head
        vocab_size: Any = self.get_input_embeddings().num_embeddings if without_rows else None
        return LabelMask(self.config.image_token_id, vocab_size)

    def mask_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Returns labels with -100 in place of image markers and of ids without a row in the head. The loss ignores
        these.

        `forward` also does this. In your own training loop, call it before you count the labels for
        `num_items_in_batch`.

        Args:
            labels (`torch.LongTensor`): of any shape. The tensor is not changed.

        Raises:
            TypeError: for anything but a tensor of 64-bit integers.
        """
        check_tensor("labels", labels)
        check_integers("labels", labels, (torch.int64,))
        return self._label_mask()(labels)

    @property
    def accepts_loss_kwargs(self) -> bool:
        """True: `forward` takes `num_items_in_batch`. `Trainer` reads this when it is created, so this also corrects
        its counting.
        """
        mask_labels_in_trainer()
        return True
