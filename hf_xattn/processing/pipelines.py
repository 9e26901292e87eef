"""transformers' pipeline for images and text, extended to batches of chats with different numbers of images.

transformers concatenates the images of the samples, so all samples must have the same number of images.
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
    """transformers' pipeline, with two differences for models of this package.

    The samples of a batch may have different numbers of images. Texts are padded on the left, where `generate` expects
    padding, whatever the tokenizer's `padding_side` is. Batches of other models stay as they are in transformers.
    """

    def get_iterator(self, *args: Any, **kwargs: Any) -> Any:
        tokenizer: Any = self.tokenizer
        if self.model.config.model_type != XAttnConfig.model_type:
            return super().get_iterator(*args, **kwargs)
        side, tokenizer.padding_side = tokenizer.padding_side, "left"
        try:
            answers = super().get_iterator(*args, **kwargs)  # This reads `padding_side` and keeps it.
        finally:
            tokenizer.padding_side = side
        loader = answers.loader.loader  # `answers` iterates over model outputs, and these over the batches.
        if loader.batch_size > 1:
            loader.collate_fn = partial(_collate, loader.collate_fn)
        return answers


def _collate(collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    """Pads all samples to the same number of images, with an `image_mask` if there is padding, and calls `collate`."""
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
    """Makes `pipeline("image-text-to-text", ...)` use this class, unless another package has set a class of its own."""
    task: Any = SUPPORTED_TASKS[TASK]
    if task["impl"] in (ImageTextToTextPipeline, f"{ImageTextToTextPipeline.__module__}.ImageTextToTextPipeline"):
        task["impl"] = XAttnImageTextToTextPipeline
