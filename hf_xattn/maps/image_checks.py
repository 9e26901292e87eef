"""Reports images with NaN or infinite values, on request."""

from __future__ import annotations

from typing import Any

from ..training.freezing import body_of


class ImageChecks:
    def __init__(self, body: Any, enabled: bool):
        self._body, self._before = body, body.checks_images
        body.checks_images = enabled

    def __enter__(self) -> ImageChecks:
        return self

    def __exit__(self, *error: object) -> None:
        self._body.checks_images = self._before


def check_images(model: Any, enabled: bool = True) -> ImageChecks:
    """Makes each call look for images with NaN or infinite values, from now on or in a `with` statement:

        with hf_xattn.check_images(model):
            trainer.train()

    One such image makes the gradients of all shared weights NaN, and the next step destroys these weights. With the
    check, `forward`, `generate` and `encode_images` raise an error before that. It names the row, the index of the
    image in the row, and where the value is: in `pixel_values`, in `cross_attention_states`, or in the output of the
    vision tower (float16 overflows) or of the connector. Padding, which no text sees, is not looked at: what
    `image_mask` hides, or a `cross_attention_mask` of shape `(batch, num_image_tokens)`.

    Off by default: a GPU has to wait for the answer. `torch.compile` breaks its graph for it, and with `fullgraph=True`
    refuses it. An image store is left aside. In a run of several processes the one with the image raises; `torchrun`
    and `accelerate launch` then end the others.

    Args:
        model ([`XAttnForConditionalGeneration`] or [`XAttnModel`]): the model, also inside PEFT's wrapper.
        enabled (`bool`, defaults to `True`): False turns the checks off.

    Returns:
        a context manager that restores what was set before.

    Raises:
        TypeError: for a model without blocks, another wrapper around one, or an `enabled` that is no bool.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"`enabled` must be True or False, got {enabled!r}.")
    return ImageChecks(body_of(model.get_base_model() if hasattr(model, "get_base_model") else model), enabled)


__all__ = ["check_images"]
