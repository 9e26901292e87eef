"""Ranks of a distributed run whose images differ: one has pixels, another features, encoded images, or no images at all.

Processes wait for each other. DDP waits for the gradient of every weight that learns. FSDP gathers the weights of a module when the
module runs, and reduces its gradients afterwards. So what one rank runs, all ranks must run:

- A rank without images gets a stand-in image that no text sees.
- A rank whose images do not pass vision tower and connector runs both on a stand-in image, and adds zero times the result. For encoded
  images, the blocks do the same with the projections of keys and values.
- Without gradients, only FSDP waits, and only for what it gathers.

A frozen tower that is not sharded runs for nobody's images: the connector gets zeros in the place of its output.
"""

from __future__ import annotations

import torch

from .distributed import compute_device, has_units, is_distributed
from .image_encoder import ImageEncoder, NewImages
from .image_layout import ImageLayout
from .sizes import vision_hidden_size
from .vision import blank_image, connect, is_tiled


def stand_in_images(encoder: ImageEncoder, rows: int) -> NewImages:
    """Makes one image for each row, which no text sees.

    Args:
        encoder ([`ImageEncoder`]): the model's. Its tower runs on one image, if the tower learns or is sharded.
        rows (`int`): rows of the text.
    """
    like = encoder.find_like()
    device, dtype = compute_device(like), like.dtype if like.is_floating_point() else torch.float32
    states = _states(encoder, device, dtype).expand(rows, -1, -1)
    nothing = torch.zeros(states.shape[:2], dtype=torch.bool, device=states.device)
    return NewImages(states, ImageLayout.of((states.shape[1],), states.device, token_mask=nothing))


def run_beside(encoder: ImageEncoder, starts: bool) -> torch.Tensor | None:
    """Runs vision tower and connector for a call whose own images do not pass them, if other processes may wait for that.

    Args:
        encoder ([`ImageEncoder`]): the model's.
        starts (`bool`): whether the call starts a text. Without gradients, later calls do not run the tower on any rank.

    Returns:
        `torch.Tensor`, *optional*: a zero that depends on the weights of both; None if no gradients are recorded, or in a single
        process.
    """
    if not is_distributed():
        return None
    if torch.is_grad_enabled():
        return stand_in_images(encoder, 1).states.flatten()[:0].sum()
    if starts and (has_units(encoder.vision_tower) or has_units(encoder.connector)):
        stand_in_images(encoder, 1)
    return None


def _states(encoder: ImageEncoder, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """`(1, tokens, context_size)`"""
    config, tower, connector = encoder.config, encoder.vision_tower, encoder.connector
    if tower is None or connector is None or config.vision_config is None:
        return torch.zeros(1, 1, config.cross_attention_config.context_size, device=device, dtype=dtype)
    learns = torch.is_grad_enabled() and any(weight.requires_grad for weight in tower.parameters())
    if learns or has_units(tower):
        return encoder.features(*blank_image(config.vision_config, device, dtype)).flatten(1, 2)
    tiled = is_tiled(config.vision_config)
    # Two tokens: the connector may drop the first one, the class token.
    shape = (1, 1, 1, 2) if tiled else (1, 2)
    nothing = torch.zeros(*shape, vision_hidden_size(config.vision_config), device=device, dtype=dtype)
    drop_first = config.vision_feature_select_strategy == "default"
    return connect(connector, nothing, (1, 1), tiled, drop_first).flatten(1, 2)
