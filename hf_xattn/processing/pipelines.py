"""The pipeline of transformers for images and text, where chats of a batch have different numbers of images.

transformers concatenates the images of the samples, which then must be equally many.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers.pipelines import SUPPORTED_TASKS, ImageTextToTextPipeline

from ..configuration_xattn import XAttnConfig
from .samples import lay_out


TASK = "image-text-to-text"
OF_IMAGES = ("pixel_values", "vision_features", "aspect_ratio_ids", "aspect_ratio_mask")


class XAttnImageTextToTextPipeline(ImageTextToTextPipeline):
    """transformers' own, whose batches may have different numbers of images, and whose texts are padded in front, where
    `generate` expects it, whatever the side of the tokenizer. Other models get transformers' batches.
    """

    def get_iterator(self, *args: Any, **kwargs: Any) -> Any:
        tokenizer: Any = self.tokenizer
        if self.model.config.model_type != XAttnConfig.model_type:
            return super().get_iterator(*args, **kwargs)
        side, tokenizer.padding_side = tokenizer.padding_side, "left"
        try:
            answers = super().get_iterator(*args, **kwargs)  # it notes the side
        finally:
            tokenizer.padding_side = side
        loader = answers.loader.loader  # answers are made of outputs, and outputs of batches
        if loader.batch_size > 1:
            loader.collate_fn = partial(_collate, loader.collate_fn)
        return answers


def _collate(collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    """Gives all samples equally many images, with an `image_mask` where some are padding, and calls `collate`."""
    names = [name for name in OF_IMAGES if any(name in sample for sample in samples)]
    if not names or any(sample["input_ids"].shape[0] != 1 for sample in samples):
        return collate(samples)
    images = [range(sample[names[0]].shape[1] if names[0] in sample else 0) for sample in samples]
    flat = {name: torch.cat([sample[name][0] for sample in samples if name in sample]) for name in names}
    laid_out = lay_out(flat, [list(each) for each in images])
    for row, sample in enumerate(samples):
        sample.update({name: tensor[row : row + 1] for name, tensor in laid_out.items()})
    return collate(samples)


def register_pipeline() -> None:
    """Makes `pipeline("image-text-to-text", ...)` take this class, unless somebody else has put theirs."""
    task: Any = SUPPORTED_TASKS[TASK]
    if task["impl"] in (ImageTextToTextPipeline, f"{ImageTextToTextPipeline.__module__}.ImageTextToTextPipeline"):
        task["impl"] = XAttnImageTextToTextPipeline
