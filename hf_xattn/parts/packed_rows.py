"""Packed rows: several samples in one text row, whose `position_ids` start again (padding-free collators, TRL).

A packed row needs a call without an `attention_mask` and without a cache, and a decoder whose entry in
`utils/architectures.py` says that it keeps samples apart. In such a call, transformers begins a new sample at each
position that is not the position before it plus 1, and this file assigns the images to the same samples. In any other
call, rows whose positions start again are refused, because their samples would silently read each other.

Image `k` of a packed row belongs to the sample that contains marker `k`:

    position_ids          0 1 2 3   0 1   0 1 2
    markers               . 1 2 .   . .   . 3 .
    the sample's images   1 and 2   none  3

Letters in shapes: B text rows, T text tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from ..configuration_xattn import XAttnConfig
from ..decoders.decoder import DecoderInterface
from ..images.conversation import PreparedImages
from ..images.image_inputs import ImageInputs


# Arguments that tell FlashAttention where samples begin. From `position_ids` it finds samples only in a single row.
FLASH_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
REFUSED = (
    "Packed rows (`position_ids` that start again) need a forward without `attention_mask` and without a cache, and a "
    "decoder that is known to keep samples apart, got {}. Otherwise pass one sample a row, padded."
)


class XAttnPackingMixin:
    """The extra of [`XAttnModel`] for packed rows."""

    def find_samples(self: Any, text: Mapping[str, Any], *call: Any) -> PackedText | None:
        """See the function [`find_samples`]."""
        starts = find_samples(self._interface, self.config, text, *call)
        return None if starts is None else PackedText(starts)


def find_samples(
    decoder: DecoderInterface,
    config: XAttnConfig,
    text: Mapping[str, Any],
    cache: Cache | None,
    use_cache: bool | None,
    images: ImageInputs | PreparedImages,
    without_cache: bool,
) -> torch.Tensor | None:
    """Finds the samples of packed rows, before anything is computed.

    On a GPU, a call with `position_ids` waits for their values. Compiled code cannot branch on positions. So it treats
    each call that may have packed rows as if it had them; in other calls, packed rows raise a `RuntimeError`.

    Args:
        decoder ([`DecoderInterface`]): What the decoder can do.
        config ([`XAttnConfig`]): Configuration of the model.
        text (`Mapping`): Arguments of the text model itself.
        cache, use_cache, images: Arguments of the call.
        without_cache (`bool`): Whether the text model will run without a cache.

    Returns:
        `torch.BoolTensor`: `(B, T)`, True where a sample starts; None if no row is packed.

    Raises:
        ValueError: if rows are packed, and the text model would not keep the samples apart.
    """
    given, mask, positions = text.get("input_ids"), text.get("attention_mask"), text.get("position_ids")
    rows, length = (text["inputs_embeds"] if given is None else given).shape[:2]
    bounds = text.get("cu_seq_lens_q")
    named = 0 if bounds is None else len(bounds) - 1
    if positions is None:
        if named > rows:
            raise ValueError(REFUSED.format(f"`cu_seq_lens_q` of {named} samples and no `position_ids`"))
        return None
    shown = None if isinstance(images, ImageInputs) and images.images is None else images
    compiles, one_axis = torch.compiler.is_compiling(), positions.dim() == 2
    prepared = mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 2)
    if positions.device.type == "meta" or (compiles and (cache is not None or prepared or not one_axis)):
        return None
    if prepared and (cache is not None or shown is None):
        return None  # a mask with more axes already says what each text token reads

    steps = (positions if one_axis else positions[0]).diff(dim=-1)
    found = steps <= 0 if one_axis else steps < 0
    if shown is not None and without_cache and mask is None and decoder.packs and one_axis:
        found = steps != 1  # in such a call, transformers also begins a sample at a jump in the positions
    if mask is not None and not prepared:
        # Positions of padding are ignored. A mask covers all text so far, or only the new text (Mamba), or a whole
        # static cache (Bloom).
        past = mask.shape[1] - length if cache is None or decoder.only_states else int(cache.get_seq_length())
        first = past if mask.shape[1] >= past + length else mask.shape[1] - length
        read = mask[:, first : first + length].to(found.device).bool()
        found = found & read[:, 1:] & read[:, :-1]
    why = _why_refused(decoder, config, text, cache, use_cache, shown)
    starts = nn.functional.pad(steps != 1, (1, 0), value=True).expand(rows, -1)
    if compiles:
        if why is None:
            return starts
        said = "Packed rows are refused in this call. Run it without `torch.compile` to read why."
        torch._assert_async(~found.any(), said)
        return None
    if named <= rows and not bool(found.any()):
        return None
    why = _why_not_found(config, text, starts) if why is None else why
    if why is not None:
        raise ValueError(REFUSED.format(why))
    return starts


def _why_refused(
    decoder: DecoderInterface,
    config: XAttnConfig,
    text: Mapping[str, Any],
    cache: Cache | None,
    use_cache: bool | None,
    images: ImageInputs | PreparedImages | None,
) -> str | None:
    """Returns why a call cannot have packed rows, whatever the values of its tensors; None if it can."""
    mask, positions = text.get("attention_mask"), text["position_ids"]
    by_default = torch.compiler.is_compiling() and use_cache is None and not torch.is_grad_enabled()
    unmarked = config.image_token_id is None or text.get("input_ids") is None
    kernel = config.get_text_config(decoder=True)._attn_implementation or "eager"
    if isinstance(images, PreparedImages):
        return "`generate`"
    if cache is not None:
        return "`cache`"
    if use_cache or by_default:
        return "`use_cache=True`"
    if mask is not None:
        return f"an `attention_mask` of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else "masks"
    if positions.dim() != 2:
        return f"`position_ids` of shape {tuple(positions.shape)}"
    if not decoder.packs:
        return f"{decoder.name}, of which this is not known"
    if kernel not in ALL_MASK_ATTENTION_FUNCTIONS:
        return f"the attention implementation {kernel!r}, for which transformers makes no masks"
    if images is not None and config.cross_attention_config.position_bias:
        return "`position_bias`, which counts the image tokens of a row and not of a sample"
    if images is not None and images.text_mask is None and unmarked:
        missing = "`input_ids`" if text.get("input_ids") is None else "`image_token_id` in the configuration"
        return (
            f"images without markers (no {missing}), which tell the sample of each image. A `cross_attention_mask` of "
            "shape (batch, text_len, num_image_tokens) can do so in place of them"
        )
    return None


def _why_not_found(config: XAttnConfig, text: Mapping[str, Any], starts: torch.Tensor) -> str | None:
    """Returns why the text model's attention would not find the samples that begin at `starts` `(B, T)`, or None."""
    positions, bounds = text["position_ids"], text.get("cu_seq_lens_q")
    if bounds is not None:
        named = torch.as_tensor(bounds).tolist()
        found = [*starts.flatten().nonzero().flatten().tolist(), starts.numel()]
        if named != found:
            return (
                f"`cu_seq_lens_q` with samples that end at {named[1:]}, and positions whose samples end at {found[1:]}"
            )
    kernel = config.get_text_config(decoder=True)._attn_implementation or "eager"
    if "flash" not in kernel or all(text.get(argument) is not None for argument in FLASH_ARGUMENTS):
        return None
    if starts.shape[0] > 1 or not torch.equal(starts, positions == positions.min()):
        return (
            f"{starts.shape[0]} rows with {kernel!r}, which finds samples only in a batch of one row, and only those "
            f"that start at the same position. It needs {', '.join(f'`{argument}`' for argument in FLASH_ARGUMENTS)}"
        )
    return None


class PackedText(NamedTuple):
    """A text with packed rows. It implements the protocol [`Samples`] of the core."""

    starts: torch.Tensor  # `(B, T)`, True at the first token of each sample
    markers: torch.Tensor | None = None  # `(B, T)`, the image markers; None if they are unknown

    def with_markers(self, markers: torch.Tensor | None) -> PackedText:
        return self._replace(markers=markers)

    def check_images(self, config: XAttnConfig, images: torch.Tensor, markers: torch.Tensor) -> None:
        """Raises a `ValueError` if a packed row has more or fewer markers than images.

        Images would then belong to the wrong samples. In compiled code, the error is a `RuntimeError`. `images` and
        `markers` `(B,)` are the numbers of real images and of markers in each row.
        """
        differ = self.starts[:, 1:].any(dim=-1) & (images != markers)
        if torch.compiler.is_compiling():
            said = "Packed rows have not one image marker for each image. Run without `torch.compile` to read which."
            torch._assert_async(~differ.any(), said)
        elif bool(differ.any()):
            raise ValueError(
                f"Expected one image marker (token {config.image_token_id}) in `input_ids` for each image of packed "
                f"rows, because a marker tells the sample of its image: {images.tolist()} images a row, got "
                f"{markers.tolist()} markers."
            )

    def images_of_samples(self, order: torch.Tensor, counted: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Returns which images belong to the sample of each text token, `(B, T, num_images)`.

        If a row has only one sample, all images belong to it, also without markers.

        Args:
            order (`torch.LongTensor`): `(B or 1, num_images)`, number of each image in its row, from 1; 0 for padding.
            counted (`torch.BoolTensor`): `(B, T)`, the markers.
            seen (`torch.LongTensor`): `(B, T)`, number of markers up to and including each token.
        """
        starts = self.starts
        before = _before_sample(counted, seen, starts)
        ends = torch.cat([starts[:, 1:], torch.ones_like(starts[:, :1])], dim=-1)
        # The number of markers up to the end of each token's sample: the minimum over all ends from the token on.
        later = torch.where(ends, seen, torch.iinfo(seen.dtype).max).flip(-1).cummin(dim=-1).values.flip(-1)
        order = order[:, None]
        belongs = (order > before[..., None]) & (order <= later[..., None])
        alone = ~starts[:, 1:].any(dim=-1)
        return belongs | alone[:, None, None]


def places_in_samples(order: torch.Tensor, markers: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Returns the number of each image among the images of its sample, from 0, `(B, num_images)`; 0 for padding.

    Args:
        order (`torch.LongTensor`): `(B, num_images)`, number of each image in its row, from 1; 0 for padding.
        markers (`torch.BoolTensor`): `(B, T)`, the markers. A packed row has one for each image.
        starts (`torch.BoolTensor`): `(B, T)`, True at the first token of each sample.
    """
    seen = markers.cumsum(dim=-1)
    before = _before_sample(markers, seen, starts)
    # `before`, for each image by its number in the row. Tokens that are no markers write to number 0, which is unused.
    number = torch.where(markers, seen, 0).clamp(max=order.shape[1])
    before_image = order.new_zeros(order.shape[0], order.shape[1] + 1).scatter(1, number, before)
    return (order - 1 - before_image.gather(1, order)).clamp(min=0)


def _before_sample(counted: torch.Tensor, seen: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Returns the number of markers in front of each token's sample, `(B, T)`."""
    return torch.where(starts, seen - counted.long(), 0).cummax(dim=-1).values
