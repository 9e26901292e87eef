"""Stand-in images for ranks of a distributed run whose images differ: pixels on one rank, features or none on another.

DDP waits for the gradient of every weight that learns. FSDP gathers the weights of a module when the module runs, and
reduces its gradients afterwards. So if one rank runs a module, all ranks must run it:

- A rank without images gets a stand-in image that no text sees.
- If the images of a rank do not pass the vision tower, the connector or the projections of keys and values, the rank
  runs these on a stand-in image. It adds zero times the result to its image tokens, or to the keys that the first block
  reads. Stored outputs of the tower (`vision_features`) still pass the connector, so the tower must run before it (see
  [`ImageEncoder`]).
- Without gradients, only FSDP waits. When a text starts, it waits for all modules that encode images. In half
  precision it also waits for the parts of the blocks, at every step.

No rank waits for a frozen tower that is not sharded. It does not run for a stand-in image; the connector gets zeros
instead of its output.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from transformers.utils import logging

from ..cache.cross_cache import CrossCache, KeyValue
from ..cache.image_layout import ImageLayout
from ..decoders.insertion import BLOCKS
from ..images.conversation import ImagesOfCall, NewImages
from ..images.image_encoder import ImageEncoder, ModelBody
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


class TextRows(Protocol):
    """What a stand-in image depends on in a [`Call`]."""

    text: dict[str, Any]
    rows: int
    device: torch.device
    starts: bool
    trains: bool


class XAttnStandInMixin:
    """What [`XAttnModel`] runs only because other processes wait for it, or because the loss needs a gradient."""

    def images_of_nobody(self: Any, call: TextRows) -> ImagesOfCall | None:
        """Returns an image that no text sees, if other processes wait for the blocks or the loss needs a gradient."""
        waited_for, embeddings = is_distributed() and torch.is_grad_enabled(), call.text.get("inputs_embeds")
        text_learns = embeddings is not None and embeddings.requires_grad
        if waited_for or (call.trains and not text_learns and only_images_learn(self)):
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
        """Encodes a stand-in image in a distributed run, so that other processes do not wait for this one.

        It is used if the images of a call do not pass all modules that other processes may wait for.

        Args:
            starts (`bool`): whether the call starts a text. Without gradients, only such a call encodes the image.
            projects (`bool`, defaults to `False`): whether the call's own images pass the projections of keys and
                values, so that these need not run here.

        Returns:
            A zero that depends on the weights of the modules that have run. None if no gradients are recorded, or in a
            single process.
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


def stand_in_images(encoder: ImageEncoder, rows: int) -> NewImages:
    """Makes an image for each row that no text sees. The tower runs only if it learns or is sharded, on one image."""
    states = _states(encoder, *_device_and_dtype(encoder)).expand(rows, -1, -1)
    return NewImages(unseen_layout(rows, states.shape[1], states.device), states)


def blank_images(model: ModelBody, rows: int, device: torch.device) -> CrossCache:
    """Makes keys and values (zeros) of one image for each row, which no text on `device` sees. Nothing is computed."""
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
    """Returns the layout of one image for each row, which no text sees."""
    nothing = torch.zeros(rows, tokens, dtype=torch.bool, device=device)
    return ImageLayout.of((tokens,), device, token_mask=nothing)


def blocks_are_units(text_model: nn.Module) -> bool:
    """Whether FSDP gathers weights of a block when the block runs. If so, all processes must run the blocks.

    Only the first block is looked at, because every decode step without images asks this.
    """
    for module in text_model.modules():
        blocks = [module._modules[name] for name in BLOCKS if name in module._modules]
        if blocks:
            return any(map(has_units, blocks))
    return False


def _states(encoder: ImageEncoder, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Returns the image tokens of a stand-in image: `(1, tokens, context_size)`."""
    config, tower, connector = encoder.config, encoder.vision_tower, encoder.connector
    if tower is None or connector is None or config.vision_config is None:
        return torch.zeros(1, 1, config.cross_attention_config.context_size, device=device, dtype=dtype)
    pixels, tiles = blank_image(config.vision_config, device, dtype)
    # A connector of your own may need as many features as a real image has, so the tower runs for it.
    if encoder.tower_is_waited_for() or CONNECTORS.is_own(config.connector_type):
        return encoder.features(pixels, tiles).flatten(1, 2)
    # Two tokens, because the connector may drop the first one as the class token.
    shape = (1, 2) if tiles is None else (1, 1, 1, 2)
    nothing = torch.zeros(*shape, vision_feature_size(config), device=device, dtype=dtype)
    return encoder.connected(nothing, (1, 1), tiles).flatten(1, 2)


def _device_and_dtype(encoder: ImageEncoder) -> tuple[torch.device, torch.dtype]:
    like = encoder.find_like()
    return compute_device(like), like.dtype if like.is_floating_point() else torch.float32
