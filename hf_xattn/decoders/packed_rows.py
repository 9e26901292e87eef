"""Packed rows: several samples in one text row, whose `position_ids` start again (padding-free collators, TRL).

transformers keeps the samples of a row apart in self-attention: a sample begins where the position is not the one
before plus 1. It does so only without `attention_mask` and without a cache, and only in decoders that hand
`position_ids` to their masks. Everywhere else the samples of a row would silently read each other. So here a row whose
positions start again is kept apart or refused. Where positions only leave some out, the images follow the text: in
calls in which transformers begins a sample there.

The images of a packed row stand in the order of their markers (see `cache/packed_samples.py`).
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from ..cache.xattn_cache import XAttnCache
from ..configuration_xattn import XAttnConfig
from ..images.conversation import PreparedImages
from ..images.image_inputs import ImageInputs
from ..images.image_positions import counts_images
from ..utils import memoized
from .text_inputs import mask_of_new_text


# What FlashAttention needs to know of the samples. From `position_ids` it finds them only in a batch of one row.
FLASH_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
# Kinds of layers in `config.layer_types` that carry a state over the text.
RECURRENT = ("conv", "linear_attention", "hybrid", "hybrid_sliding")
PACKED = "Packed rows (`position_ids` that start again)"
JUMPS = (
    "Packed rows (`position_ids` that leave some out, which are samples in a call without `attention_mask` and cache)"
)


def find_samples(
    config: XAttnConfig,
    not_packed: str | None,
    text: Mapping[str, Any],
    cache: Cache | None,
    use_cache: bool | None,
    images: ImageInputs | PreparedImages,
    without_cache: bool,
) -> torch.Tensor | None:
    """Finds the samples of packed rows, before anything is computed. On a GPU a call with `position_ids` waits for it.

    Text that continues a cache is looked at only if images or labels come with it.

    Args:
        not_packed (`str`, *optional*): why the decoder does not keep samples apart; None if it does.
        text (`Mapping`): the decoder's own arguments.
        without_cache (`bool`): whether the decoder will run without a cache.

    Returns:
        `torch.BoolTensor`: `(B, T)`, True where a sample starts; None if no row is packed.

    Raises:
        ValueError: if rows are packed, and the samples would not be kept apart.
    """
    positions, bounds = text.get("position_ids"), text.get("cu_seq_lens_q")
    mask = text.get("attention_mask")
    if positions is None:
        _check_bounds_alone(bounds, text, "there are no `position_ids`")
        return None
    if positions.shape[-1] == 1 or positions.device.type == "meta":
        return None
    if isinstance(mask, torch.Tensor) and mask.device != positions.device:
        return None  # the decoder says so
    prepared = mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 2)
    of_generate = isinstance(images, PreparedImages)
    has_images = isinstance(images, PreparedImages) or images.images is not None
    bias = config.cross_attention_config.position_bias
    brings = has_images or text.get("labels") is not None or text.get("shift_labels") is not None
    if cache is not None and (prepared or (_holds_text(cache) and not brings)):
        return None
    if torch.compiler.is_compiling():
        no_markers = config.image_token_id is None or text.get("input_ids") is None
        unmarked = no_markers and getattr(images, "text_mask", None) is None
        joined = has_images and (of_generate or bias or unmarked)
        return _compiled(not_packed, joined, text, cache, use_cache, without_cache)
    read = None
    if isinstance(mask, torch.Tensor) and not prepared:
        past = 0 if cache is None or not _holds_text(cache) else int(cache.get_seq_length())
        read = mask_of_new_text(mask, past, positions.shape[-1]).bool()
    if positions.dim() == 3:
        if bool(_in_text(positions[0].diff(dim=-1) < 0, read).any()):
            raise ValueError(
                f"{PACKED} are read from `position_ids` of shape (batch, text_len), got {tuple(positions.shape)}."
            )
        return None
    again, what = _starts_again(positions, read), PACKED
    if not bool(again.any()):
        split = without_cache and mask is None and not_packed is None and (has_images or bounds is not None)
        if not split or not bool((positions.diff(dim=-1) != 1).any()):
            _check_bounds_alone(bounds, text, "`position_ids` do not start again")
            return None
        if not has_images:
            return None
        what = JUMPS
    if of_generate:
        raise ValueError(f"{what} do not work with `generate`. Pass one sample a row.")
    if has_images and bias:
        raise ValueError(
            f"{what} do not work with `position_bias`, which counts the image tokens of a row and not of a sample. Pad "
            "the samples."
        )
    if prepared:
        if has_images:
            _check_beside_prepared(config, images)  # type: ignore[arg-type]  # has_images says which of the two it is
        return None
    if not_packed is not None:
        raise ValueError(f"{PACKED} do not work with {not_packed}. Pad the samples, one a row.")
    _check_can_be_kept_apart(mask, cache, use_cache)
    starts = _starts(positions, text)
    _check_kernel(config, positions, starts, text)
    return starts


def _holds_text(cache: Cache) -> bool:
    if isinstance(cache, XAttnCache):
        return cache.text_rows is not None
    half = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    return len(half.layers) > 0 and bool(getattr(half.layers[0], "is_initialized", True))


def _starts_again(positions: torch.Tensor, read: torch.Tensor | None) -> torch.Tensor:
    """`(B, T - 1)`, True where a position is not above the previous token's. Positions of padding do not count."""
    return _in_text(positions.diff(dim=-1) <= 0, read)


def _in_text(found: torch.Tensor, read: torch.Tensor | None) -> torch.Tensor:
    """`(B, T - 1)`, what was found between two tokens of which none is padding (`read` `(B, T)`: False)."""
    return found if read is None else found & read[:, 1:] & read[:, :-1]


def _starts(positions: torch.Tensor, text: Mapping[str, Any]) -> torch.Tensor:
    """`(B, T)`, True where transformers' masks begin a sample."""
    starts = positions.diff(dim=-1) != 1
    starts = torch.cat([torch.ones_like(starts[:, :1]), starts], dim=-1)
    given = text.get("input_ids")
    rows = (given if given is not None else text["inputs_embeds"]).shape[0]
    return starts.expand(rows, -1)


def _check_bounds_alone(bounds: Any, text: Mapping[str, Any], positions: str) -> None:
    """Raises a `ValueError` for samples that only `cu_seq_lens_q` names: masks and images do not follow it."""
    if bounds is None:
        return
    given = text.get("input_ids")
    rows = (given if given is not None else text["inputs_embeds"]).shape[0]
    if len(bounds) - 1 > rows:
        raise ValueError(
            f"`cu_seq_lens_q` names {len(bounds) - 1} samples in {rows} rows, but {positions}. Pass `position_ids` "
            "that start again at each sample."
        )


def _check_can_be_kept_apart(mask: torch.Tensor | None, cache: Cache | None, use_cache: bool | None) -> None:
    if cache is not None or use_cache:
        what = "`use_cache=True`" if cache is None else "`cache`"
        raise ValueError(
            f"{PACKED} are kept apart only without a cache, got {what}. Leave it out, or pass one sample a row."
        )
    if mask is not None:
        raise ValueError(
            f"{PACKED} are kept apart only without `attention_mask`, got one of shape {tuple(mask.shape)}. Leave it "
            "out: packed rows need no padding. To pad, give the padding at the end a sample of its own."
        )


def _check_beside_prepared(config: XAttnConfig, images: ImageInputs) -> None:
    """Raises a `ValueError` if an `attention_mask` keeps samples apart that the images cannot find."""
    what = f"{PACKED} with an `attention_mask` of shape (batch, 1, text_len, text_len)"
    if images.text_mask is None:
        raise ValueError(
            f"{what} need a `cross_attention_mask` of shape (batch, text_len, num_image_tokens), which decides the "
            "images of each sample. Or leave `attention_mask` out."
        )
    if counts_images(config, images):
        raise ValueError(
            f"{what} do not work with `perceiver_config.num_image_positions`, the places of images in their samples. "
            "Leave `attention_mask` out."
        )


def _check_kernel(config: XAttnConfig, positions: torch.Tensor, starts: torch.Tensor, text: Mapping[str, Any]) -> None:
    """Raises a `ValueError` if the decoder's attention would not find the samples, or find others."""
    bounds = text.get("cu_seq_lens_q")
    if bounds is not None:
        found = starts.flatten().nonzero().flatten().tolist()
        named = torch.as_tensor(bounds).tolist()
        if named != [*found, starts.numel()]:
            raise ValueError(
                f"`cu_seq_lens_q` and `position_ids` name different samples: samples end at {named[1:]}, got positions "
                f"that end them at {[*found[1:], starts.numel()]}."
            )
    name = config.get_text_config(decoder=True)._attn_implementation or "eager"
    if name not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise ValueError(
            f"{PACKED} do not work with the attention implementation {name!r}, for which transformers makes no masks. "
            "Call `model.set_attn_implementation('sdpa')`."
        )
    if "flash" not in name or all(text.get(argument) is not None for argument in FLASH_ARGUMENTS):
        return
    if starts.shape[0] > 1 or not torch.equal(starts, positions == positions.min()):
        raise ValueError(
            f"{PACKED} need a batch of one row, whose samples all start at the same position, with {name!r}; got "
            f"{starts.shape[0]} rows. Pass {', '.join(f'`{argument}`' for argument in FLASH_ARGUMENTS)}, as "
            "padding-free collators do."
        )


def _compiled(
    not_packed: str | None,
    joined: bool,
    text: Mapping[str, Any],
    cache: Cache | None,
    use_cache: bool | None,
    without_cache: bool,
) -> torch.Tensor | None:
    """In compiled code, which cannot branch on positions: the samples of a training step, packed or not.

    In other calls, rows that would not be kept apart end in a `RuntimeError`; also if only the images are `joined`.
    """
    positions, mask = text["position_ids"], text.get("attention_mask")
    if cache is not None or positions.dim() == 3 or (mask is not None and mask.dim() != 2):
        return None
    again = _starts_again(positions, None if mask is None else mask.bool())
    alone = mask is None and not use_cache and (use_cache is not None or torch.is_grad_enabled())
    if alone and not_packed is None:
        if not joined:
            return _starts(positions, text)
        again = positions.diff(dim=-1) != 1 if without_cache else again
    torch._assert_async(
        ~again.any(), f"{PACKED} are not kept apart in this call. Run it without `torch.compile` to read why."
    )
    return None


def why_not_packed(text_model: PreTrainedModel, modules: Sequence[nn.Module]) -> str | None:
    """Says why packed rows do not work with a decoder; None if they do. Its source code tells, without a run.

    `modules`: the causal language model, the models inside it and the decoder: one of these makes the masks.
    """
    config = text_model.config
    who = f"{type(text_model).__name__} (model_type {config.model_type!r})"
    kinds = {*(getattr(config, "layer_types", None) or ())}
    if text_model._is_stateful or kinds & {*RECURRENT}:
        return f"{who}, which has recurrent layers: their state passes from one sample to the next"
    if "position_ids" not in inspect.signature(text_model.forward).parameters:
        return f"{who}, which takes no `position_ids`"
    if not any(_masks_follow_positions(type(module)) for module in modules):
        return f"{who}, whose attention mask does not depend on `position_ids`"
    return None


@memoized
def _masks_follow_positions(decoder_class: type[nn.Module]) -> bool:
    """Whether `forward` hands `position_ids` to what makes its masks: as a keyword, or in a dict of keywords."""
    forward = inspect.unwrap(decoder_class.forward)
    try:
        function = ast.parse(textwrap.dedent(inspect.getsource(forward))).body[0]
    except (OSError, TypeError, SyntaxError, IndentationError):
        return False
    nodes = list(ast.walk(function))
    chosen = {  # mask_function = create_causal_mask if ... else create_sliding_window_causal_mask
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.IfExp)
        if _makes_masks(node.value.body) and _makes_masks(node.value.orelse)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    makers = [node for node in nodes if isinstance(node, ast.Call) and _makes_masks(node.func, chosen)]
    in_dicts = any(
        isinstance(node, ast.Dict)
        and {"attention_mask", "position_ids"} <= {key.value for key in node.keys if isinstance(key, ast.Constant)}
        for node in nodes
    )
    return any(
        keyword.arg == "position_ids" or (keyword.arg is None and in_dicts)
        for call in makers
        for keyword in call.keywords
    )


def _makes_masks(called: ast.expr, others: Collection[str] = ()) -> bool:
    """Whether an expression names a mask function of transformers (`create_causal_mask`), or one of `others`."""
    name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
    return name in others or (name.startswith("create_") and "mask" in name)
