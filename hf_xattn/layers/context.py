"""What the model passes to its blocks: one keyword argument that goes through the decoder's own layers.

The context is a `ModelOutput`, that is a mapping and a pytree. So accelerate's device hooks move its tensors, FSDP
casts them, and activation checkpointing passes them to the recomputation. Nothing is stored on modules, in globals or
in hooks: under DDP, deepcopy and recomputation it would be missing, and gradients would silently be zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from transformers.utils import ModelOutput

from ..cache.cross_cache import CrossCache, KeyValue
from ..cache.image_layout import ImageLayout
from ..cache.real_tokens import RealTokens, real_tokens
from ..configuration_xattn import CrossAttentionConfig
from ..utils.tensor_checks import check_bool, check_tensor, type_name
from .folded_mask import fold_mask
from .image_rows import Slots
from .position_bias import token_positions
from .positions import places_in_images
from .row_groups import RowGroup


# Name of the keyword argument. No decoder of transformers has an argument of this name.
KEYWORD = "cross_attention_context"


class Ragged(NamedTuple):
    """Rows of different lengths, without their padding. A named tuple: device hooks and FSDP move the tensor in it."""

    real: RealTokens | None  # places of the new images' real tokens, which alone are given; None if all tokens are
    groups: tuple[RowGroup, ...] | None  # image rows that share a call of the kernel; None if all do


class Positions(NamedTuple):
    """For a relative position bias and codes of positions. A named tuple: device hooks and FSDP move the tensors."""

    query: torch.Tensor | None  # `(B or 1, T)`; None stands for 0 ... T - 1
    key: torch.Tensor | None  # `(rows, N)`, in the row, for the bias alone; None stands for 0 ... N - 1


class Recorder:
    """Collects attention weights, and keys and values of new images, from the blocks of one forward.

    When the forward has succeeded, the keys and values of all blocks go into a cache at once. Device hooks, FSDP and
    export copy the context, but all copies share one recorder: `to` returns the object itself, and as a pytree node it
    has no leaves.
    """

    def __init__(self, weights: bool = False, keys_values: bool = False) -> None:
        self.wants_weights, self.wants_keys_values = weights, keys_values
        self.weights: dict[int, torch.Tensor | None] = {}
        self.keys_values: dict[int, KeyValue] = {}

    def to(self, *args, **kwargs) -> Recorder:
        return self

    def collected(self) -> list[KeyValue]:
        """The keys and values in the order of the blocks."""
        return [self.keys_values[index] for index in sorted(self.keys_values)]


class _SameRecorder:
    """A recorder in a pytree. Instances with equal `wants` are equal, so that input structures are equal."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameRecorder) and self.wants() == other.wants()

    def __hash__(self) -> int:
        return hash(tuple(self.wants()))

    def wants(self) -> list[bool]:
        return [self.recorder.wants_weights, self.recorder.wants_keys_values]


pytree.register_pytree_node(
    Recorder,
    lambda recorder: ([], _SameRecorder(recorder)),
    lambda leaves, context: context.recorder,
    serialized_type_name="hf_xattn.context.Recorder",
    to_dumpable_context=lambda context: context.wants(),
    from_dumpable_context=lambda wants: _SameRecorder(Recorder(*wants)),
    flatten_with_keys_fn=lambda recorder: ([], _SameRecorder(recorder)),
)


@dataclass
class CrossAttentionContext(ModelOutput):
    """What the blocks of one forward share.

    Every default is None: accelerate rebuilds the context from one dict, which `ModelOutput` reads only if all other
    fields are None.
    """

    # the new images: `(R, N, context_size)`, or `(1, M, context_size)`, their real tokens alone (see `ragged`)
    cross_attention_states: torch.Tensor | None = None
    cache: CrossCache | None = None  # images of earlier forwards; blocks only read it
    mask: torch.Tensor | None = None  # see [`FoldedMask`]
    visible: torch.Tensor | None = None  # see [`FoldedMask`]
    ragged: Ragged | None = None  # what of the images is padding; None if nothing is, or if it is computed and masked
    slots: Slots | None = None  # see [`ImageRows`]; None if image rows are shared in equal numbers, in order
    positions: Positions | None = None  # of text and images; None for 0 ... T - 1 and 0 ... N - 1
    # `(1, N or M)`, of each new token in its image, for a code of positions; None for 0 ... N - 1
    places: torch.Tensor | None = None
    recorder: Recorder | None = None  # what blocks record to
    # a zero that a block adds to its output: a gradient of zero for weights that only other processes use (see
    # `learning/stand_in.py`)
    unused: torch.Tensor | None = None

    @property
    def cache_dtype(self) -> str | None:
        """The dtype of cached images, see `cache/int8_cache.py`."""
        return None if self.cache is None else self.cache.cache_dtype

    def cached(self, layer_idx: int) -> KeyValue | None:
        """A block's keys and values of cached images, or None if there are no cached images."""
        if self.cache is None or not self.cache.layers:
            return None
        return self.cache.layers[layer_idx].read()


def image_fields(
    config: CrossAttentionConfig,
    states: torch.Tensor | None,
    layout: ImageLayout | None,
    groups: tuple[RowGroup, ...] | None = None,
) -> dict[str, Any]:
    """The fields of a context that hold new images. Padding tokens are left out where that is possible.

    Args:
        states (`torch.Tensor`, *optional*): `(R, N, context_size)`; None if there are no new images.
        layout ([`ImageLayout`], *optional*): of the new images; None if there are none, or one without padding.
        groups (`tuple[RowGroup, ...]`, *optional*): image rows that share a call of the kernel.
    """
    if states is None or layout is None:
        return {"cross_attention_states": states, "ragged": None if groups is None else Ragged(None, groups)}
    real, places = real_tokens(layout, states.shape[0]), None
    if config.position != "none":
        places = places_in_images(layout.sizes, states.device)
    if real is None:
        ragged = None if groups is None else Ragged(None, groups)
        return {"cross_attention_states": states, "ragged": ragged, "places": places}
    places = None if places is None else places[:, real.places[1].to(places.device)]
    return {"cross_attention_states": real.take(states), "ragged": Ragged(real, groups), "places": places}


def no_context(given: Any) -> TypeError:
    return TypeError(
        f"Expected `cross_attention` to be a CrossAttentionContext, which only a model makes, got {type_name(given)}. "
        "Pass `cross_attention_states` and `cross_attention_mask` instead."
    )


def check_cross_attention_mask(mask: torch.Tensor, batch_size: int, text_len: int, num_tokens: int) -> None:
    """Raises if a mask is not boolean, or not `(batch, num_image_tokens)` or `(batch, text_len, num_image_tokens)`."""
    check_tensor("cross_attention_mask", mask)
    check_bool("cross_attention_mask", mask)
    shapes = {2: (batch_size, num_tokens), 3: (batch_size, text_len, num_tokens)}
    if tuple(mask.shape) != shapes.get(mask.dim()):
        raise ValueError(
            f"Expected `cross_attention_mask` of shape {shapes[2]} (batch, num_image_tokens) or {shapes[3]} (batch, "
            f"text_len, num_image_tokens), got {tuple(mask.shape)}."
        )


def plain_context(
    hidden_states: torch.Tensor,
    cross_attention_states: torch.Tensor,
    cross_attention_mask: torch.Tensor | None,
    config: CrossAttentionConfig,
    output_attentions: bool = False,
) -> CrossAttentionContext:
    """Makes the context of a layer that is used on its own, with one image row for each text row."""
    batch_size, text_len = hidden_states.shape[:2]
    sees = positions = None
    if cross_attention_mask is not None:
        check_cross_attention_mask(cross_attention_mask, batch_size, text_len, cross_attention_states.shape[1])
        sees = cross_attention_mask
        if sees.dim() == 2:
            positions = Positions(None, token_positions(sees)) if config.position_bias else None
            sees = sees[:, None]
    mask, visible = fold_mask(
        sees,
        image_rows=batch_size,
        text_rows=batch_size,
        text_len=text_len,
        group=config.num_attention_heads // config.num_key_value_heads,
        null_key=config.quiet_softmax,
    )
    return CrossAttentionContext(
        cross_attention_states=cross_attention_states,
        mask=mask,
        visible=visible,
        positions=positions,
        recorder=Recorder(weights=True) if output_attentions else None,
    )
