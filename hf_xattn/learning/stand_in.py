"""Ranks of a distributed run whose images differ: pixels on one, features, encoded images or none on another.

DDP waits for the gradient of every weight that learns. FSDP gathers the weights of a module when it runs, and reduces
its gradients afterwards. So what one rank runs, all must run:

- A rank without images gets a stand-in image that no text sees.
- A rank whose images do not pass vision tower, connector or projections of keys and values runs these on a stand-in
  image, and adds zero times the result to its image tokens, or to the keys that the first block reads. Outputs of the
  tower (`vision_features`) pass the connector, so the tower runs before (see [`ImageEncoder`]).
- Without gradients, only FSDP waits: where a text starts, for all that encodes images; in half precision also for the
  parts of the blocks, at every step.

A frozen tower that is not sharded runs for nobody's images: the connector gets zeros in the place of its output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ..cache.cross_cache import CrossCache, KeyValue
from ..cache.image_layout import ImageLayout
from ..decoders.insertion import BLOCKS
from ..images.conversation import ImagesOfCall, NewImages
from ..images.image_encoder import ImageEncoder
from ..images.tower import blank_image
from ..utils.architectures import vision_feature_size
from ..utils.distributed import compute_device, has_units, is_distributed
from ..utils.parts import CONNECTORS
from .frozen import only_images_learn


logger = logging.get_logger(__name__)

NOTHING_LEARNS = (
    "No row of this batch has an image, so it trains nothing: only weights that images pass require a gradient. This "
    "is as it should be if other batches have images."
)


class XAttnStandInMixin:
    """What [`XAttnModel`] runs for other processes, and for a loss that would have no gradient."""

    def images_of_nobody(self: Any, call: Any) -> ImagesOfCall | None:
        """An image that no text sees, where other processes wait for blocks, or a loss needs a gradient."""
        waited_for = is_distributed() and torch.is_grad_enabled()
        if waited_for or (call.trains and not _embeddings_learn(call) and only_images_learn(self)):
            if not waited_for and not torch.compiler.is_compiling():
                logger.warning_once(NOTHING_LEARNS)
            nobodys = stand_in_images(self.image_encoder, call.rows)
            return ImagesOfCall(nobodys, nobodys.layout, None, unseen=True)
        self.zero_of_others(call.starts)
        if not (is_distributed() and blocks_are_units(self.text_model)):
            return None
        cross = blank_images(self, call.rows, call.device)
        return ImagesOfCall(None, cross.layout, None, unseen=True, ready=cross)

    def zero_of_others(self: Any, starts: bool, projects: bool = False) -> torch.Tensor | None:
        """Encodes a stand-in image if a call's own images do not pass all parts, and other processes may wait for them.

        Without gradients, only a call that starts a text (`starts`) does so, on every rank.

        Args:
            projects (`bool`): the call's own images pass the projections of keys and values, so these do not run.

        Returns:
            a zero that depends on the weights of what has run; None if no gradients are recorded, or in a single
            process.
        """
        if not is_distributed():
            return None
        encoder, learns = self.image_encoder, torch.is_grad_enabled()
        parts = (encoder.vision_tower, encoder.connector, None if projects else self.text_model)
        if not learns and not (starts and any(map(has_units, parts))):
            return None
        states = stand_in_images(encoder, 1).states
        assert states is not None
        made = [states]
        if not projects:
            made = [each for pair in self.project_images(states, CrossCache()) for each in pair]
        if not learns:
            return None
        return torch.stack([each.flatten()[:0].sum().to(states.device) for each in made]).sum()


def _embeddings_learn(call: Any) -> bool:
    embeddings = call.text.get("inputs_embeds")
    return embeddings is not None and embeddings.requires_grad


def stand_in_images(encoder: ImageEncoder, rows: int) -> NewImages:
    """Makes one image for each row, which no text sees. The tower runs on one image, if it learns or is sharded."""
    states = _states(encoder, *_device_and_dtype(encoder)).expand(rows, -1, -1)
    return NewImages(unseen_layout(rows, states.shape[1], states.device), states)


def blank_images(model: Any, rows: int, device: torch.device) -> CrossCache:
    """Keys and values of one image for each row, which no text on `device` sees. Nothing is computed."""
    config = model.config.cross_attention_config
    _, dtype = _device_and_dtype(model.image_encoder)
    seen = CrossCache()
    pairs: list[KeyValue] = []
    for block in model.blocks:
        shape = (rows, block.attn.num_key_value_heads, 1 + config.quiet_softmax, config.head_dim)
        nothing = torch.zeros(shape, device=compute_device(block.attn.k_proj.weight), dtype=dtype)
        pairs.append((nothing, nothing))
    seen.fill(unseen_layout(rows, 1, device), pairs)
    return seen


def unseen_layout(rows: int, tokens: int, device: torch.device) -> ImageLayout:
    """The layout of one image for each row, which no text sees."""
    nothing = torch.zeros(rows, tokens, dtype=torch.bool, device=device)
    return ImageLayout.of((tokens,), device, token_mask=nothing)


def blocks_are_units(text_model: nn.Module) -> bool:
    """Whether FSDP gathers weights of a block when the block runs. All processes must then run the blocks.

    Looks at the first block only: a decode step without images asks, too.
    """
    for module in text_model.modules():
        blocks = [module._modules[name] for name in BLOCKS if name in module._modules]
        if blocks:
            return any(map(has_units, blocks))
    return False


def _states(encoder: ImageEncoder, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """`(1, tokens, context_size)`"""
    config, tower, connector = encoder.config, encoder.vision_tower, encoder.connector
    if tower is None or connector is None or config.vision_config is None:
        return torch.zeros(1, 1, config.cross_attention_config.context_size, device=device, dtype=dtype)
    pixels, tiles = blank_image(config.vision_config, device, dtype)
    # A connector of the caller's own may need as many features as an image has.
    if encoder.tower_is_waited_for() or CONNECTORS.is_own(config.connector_type):
        return encoder.features(pixels, tiles).flatten(1, 2)
    # Two tokens: the connector may drop the first one, the class token.
    shape = (1, 2) if tiles is None else (1, 1, 1, 2)
    nothing = torch.zeros(*shape, vision_feature_size(config), device=device, dtype=dtype)
    return encoder.connected(nothing, (1, 1), tiles).flatten(1, 2)


def _device_and_dtype(encoder: ImageEncoder) -> tuple[torch.device, torch.dtype]:
    like = encoder.find_like()
    return compute_device(like), like.dtype if like.is_floating_point() else torch.float32
