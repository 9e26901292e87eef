"""Ranks of a distributed run whose images differ: pixels on one, features, encoded images or none on another.

DDP waits for the gradient of every weight that learns. FSDP gathers the weights of a module when it runs, and reduces
its gradients afterwards. So what one rank runs, all must run:

- A rank without images gets a stand-in image that no text sees.
- A rank whose images do not pass vision tower and connector runs both on a stand-in image, and adds zero times the
  result. For encoded images, the blocks do the same with the projections of keys and values. Outputs of the tower
  (`vision_features`) pass the connector alone, so the tower runs before (see [`ImageEncoder`]).
- Without gradients, only FSDP waits, and only for what it gathers: tower and connector, and in half precision the parts
  of the blocks.

A frozen tower that is not sharded runs for nobody's images: the connector gets zeros in the place of its output.
"""

from __future__ import annotations

import torch
from torch import nn

from ..cache.image_layout import ImageLayout
from ..decoders.insertion import BLOCKS
from ..images.image_encoder import ImageEncoder, NewImages
from ..images.vision import blank_image, connect, is_tiled
from ..utils.architectures import vision_feature_size
from ..utils.distributed import compute_device, has_units, is_distributed
from ..utils.parts import CONNECTORS


def stand_in_images(encoder: ImageEncoder, rows: int) -> NewImages:
    """Makes one image for each row, which no text sees. The tower runs on one image, if it learns or is sharded."""
    return _unseen(_states(encoder, *_device_and_dtype(encoder)).expand(rows, -1, -1))


def blank_states(encoder: ImageEncoder, rows: int) -> NewImages:
    """Makes one image of zeros for each row, which no text sees. Neither the tower nor the connector runs."""
    return _unseen(_zeros(encoder, *_device_and_dtype(encoder)).expand(rows, -1, -1))


def blocks_are_units(text_model: nn.Module) -> bool:
    """Whether FSDP gathers weights of a block when the block runs. All processes must then run the blocks.

    Looks at the first block only: a decode step without images asks, too.
    """
    for module in text_model.modules():
        blocks = [module._modules[name] for name in BLOCKS if name in module._modules]
        if blocks:
            return any(map(has_units, blocks))
    return False


def run_beside(encoder: ImageEncoder, starts: bool) -> torch.Tensor | None:
    """Runs vision tower and connector if a call's own images do not pass them and other processes may wait for them.

    Without gradients, only a call that starts a text runs them, on every rank. Returns a zero that depends on the
    weights of both; None if no gradients are recorded, or in a single process.
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
        return _zeros(encoder, device, dtype)
    # A connector of the caller's own may need as many features as an image has.
    if encoder.tower_is_waited_for() or CONNECTORS.is_own(config.connector_type):
        return encoder.features(*blank_image(config.vision_config, device, dtype)).flatten(1, 2)
    tiled = is_tiled(config.vision_config)
    # Two tokens: the connector may drop the first one, the class token.
    shape = (1, 1, 1, 2) if tiled else (1, 2)
    nothing = torch.zeros(*shape, vision_feature_size(config), device=device, dtype=dtype)
    drop_first = config.vision_feature_select_strategy == "default"
    return connect(connector, nothing, (1, 1), tiled, drop_first).flatten(1, 2)


def _zeros(encoder: ImageEncoder, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(1, 1, encoder.config.cross_attention_config.context_size, device=device, dtype=dtype)


def _device_and_dtype(encoder: ImageEncoder) -> tuple[torch.device, torch.dtype]:
    like = encoder.find_like()
    return compute_device(like), like.dtype if like.is_floating_point() else torch.float32


def _unseen(states: torch.Tensor) -> NewImages:
    nothing = torch.zeros(states.shape[:2], dtype=torch.bool, device=states.device)
    return NewImages(states, ImageLayout.of((states.shape[1],), states.device, token_mask=nothing))
