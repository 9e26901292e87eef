"""Decoder layers that run a second time in the backward pass (activation checkpointing).

Layers are checkpointed by transformers, or by torch's activation wrappers (`checkpoint_wrapper`, `offload_wrapper`),
which accelerate's FSDP adds. transformers does not know of these wrappers, so two things are done here:

- A layer that runs twice must not write into a cache. `recomputes_layers` tells the model.
- Some decoders do not pass the images to their layers, so the layers read them from a channel (see
  `layers/context.py`). The channel is empty when the backward pass runs the layer again. So the wrapper gets the images
  as an argument, which it keeps for the second call.

Reentrant checkpointing (`use_reentrant=True`, `CheckpointImpl.REENTRANT`) gives gradients only to positional arguments.
The images are a keyword argument, so their gradients would be lost without notice. It is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..decoders.insertion import is_cross_attending
from ..layers.context import KEYWORD, carried_context


WRAPPED = "_checkpoint_wrapped_module"  # torch's name for the module inside a wrapper
FUNCTION = "_gradient_checkpointing_func"  # transformers' name for the function that checkpoints a layer
_READS = "_reads_cross_attention_context"


class XAttnRecomputingMixin:
    """Gradient checkpointing of [`XAttnModel`]."""

    def recomputes_layers(self: Any) -> bool:
        """Whether a backward pass will run the decoder's layers again, by transformers' checkpointing or in a wrapper.

        Wrappers around the layers are prepared for the second call.

        Raises:
            ValueError: for reentrant checkpointing, where gradients are recorded.
        """
        learns, checkpointed, wrapped = torch.is_grad_enabled(), False, []
        # Compiled code runs a layer again without its writes to the cache, so there is nothing to prepare.
        prepares = learns and not torch.compiler.is_compiling()
        for module in self.text_model.modules():
            # A frozen model is in evaluation mode, but its layers may checkpoint all the same, so each module is asked.
            if module.training and getattr(module, "gradient_checkpointing", False):
                checkpointed = True
                if learns:
                    refuse_reentrant(getattr(module, FUNCTION, None))
            elif prepares and WRAPPED in module._modules and is_cross_attending(unwrapped(module)):
                wrapped.append(module)
        if checkpointed:
            return True
        for layer in wrapped:
            if getattr(getattr(layer, "checkpoint_impl", None), "name", None) == "REENTRANT":
                raise ValueError(
                    "Expected checkpoint wrappers around the decoder's layers with `CheckpointImpl.NO_REENTRANT`, got "
                    "`REENTRANT`, which gives no gradients to images. Use `NO_REENTRANT`, or call "
                    "`model.gradient_checkpointing_enable()` instead of wrapping layers."
                )
            if not self._interface.receives_keywords and not layer.__dict__.get(_READS):
                layer.__dict__[_READS] = True  # it reads the images from the channel, and passes them to its layer
                layer.register_forward_pre_hook(_add_context, with_kwargs=True)
        return bool(wrapped)


def refuse_reentrant(function: object) -> None:
    """Raises a `ValueError` if a layer's checkpointing function of transformers is reentrant."""
    if function is not None and getattr(function, "keywords", {}).get("use_reentrant") is not False:
        raise ValueError(
            "Expected gradient checkpointing with `use_reentrant=False`, the default of transformers, got "
            '`use_reentrant=True`, which gives no gradients to images. Pass `{"use_reentrant": False}` to '
            "`gradient_checkpointing_enable`, or as `gradient_checkpointing_kwargs` to a trainer."
        )


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns the module inside activation wrappers, or `module` itself if it is not wrapped."""
    while (inner := module._modules.get(WRAPPED)) is not None:
        module = inner
    return module


def _add_context(wrapper: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    context = carried_context()  # the images of the running call, in this thread
    if context is None or KEYWORD in kwargs:
        return None
    return args, {**kwargs, KEYWORD: context}
