"""Which text token may see which image token, as one mask a forward.

Unlike self-attention there is no causal order on the image axis: a text token sees all tokens of an image or none.
So visibility is decided from few facts (padding, image markers in the text) and laid out once for all blocks.

Letters: B text rows, R image rows (B = R * r, each image row serves r text rows), T text tokens, N image tokens,
G query heads that share a K/V head.

            image 1   image 2            "previous"            "latest"
    text    a a a     b b b              a a a  b b b          a a a  b b b
    The                                  . . .  . . .          . . .  . . .
    <image>                              x x x  . . .          x x x  . . .
    cat                                  x x x  . . .          x x x  . . .
    <image>                              x x x  x x x          . . .  x x x
    dog                                  x x x  x x x          . . .  x x x
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn


class Visibility(NamedTuple):
    """Masks in the layout that the blocks use.

    Attributes:
        mask (`torch.BoolTensor`, *optional*): `(R, 1, r * T * G or 1, N)`, True = attend, without an all-False row;
            None where everything may be attended.
        visible (`torch.BoolTensor`, *optional*): `(B or 1, T or 1, 1)`, whether a text position sees any image token;
            None where all do.
    """

    mask: torch.Tensor | None
    visible: torch.Tensor | None


EVERYTHING = Visibility(None, None)


def check_bool(name: str, tensor: torch.Tensor) -> None:
    """Raises a `TypeError` where a mask is not boolean."""
    if tensor.dtype != torch.bool:
        raise TypeError(
            f"`{name}` must be a boolean tensor (True = attend), got {tensor.dtype}. Use `{name}.bool()` for a 0/1 mask."
        )


def check_cross_attention_mask(mask: torch.Tensor, batch_size: int, text_len: int | None, num_tokens: int) -> None:
    """Raises where a `cross_attention_mask` is not `(batch, num_image_tokens)` or `(batch, text_len, num_image_tokens)`.

    Raises:
        TypeError: for a mask that is not boolean.
        ValueError: for a wrong rank or size.
    """
    check_bool("cross_attention_mask", mask)
    if mask.dim() not in (2, 3):
        raise ValueError(
            "`cross_attention_mask` must be (batch, num_image_tokens) or (batch, text_len, num_image_tokens), got "
            f"shape {tuple(mask.shape)}."
        )
    expected = (batch_size, num_tokens) if mask.dim() == 2 else (batch_size, text_len or mask.shape[1], num_tokens)
    if tuple(mask.shape) != expected:
        raise ValueError(f"`cross_attention_mask` must have shape {expected}, got {tuple(mask.shape)}.")


def expand_tile_mask(mask: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """A mask over tiles, as Mllama's processor makes it, as one over image tokens.

    Args:
        mask (`torch.Tensor`): `(batch, text_len, num_images, max_num_tiles)`, boolean or 0 and 1.
        num_tokens (`int`): tokens of all the images.

    Returns:
        `torch.BoolTensor`: `(batch, text_len, num_tokens)`.

    Raises:
        ValueError: where the tokens are not those of so many tiles.
    """
    tiles = mask.shape[2] * mask.shape[3]
    if not tiles or num_tokens % tiles:
        raise ValueError(
            f"`cross_attention_mask` of shape {tuple(mask.shape)} is for {mask.shape[2]} images of {mask.shape[3]} tiles, "
            f"which {num_tokens} image tokens are not."
        )
    return (mask != 0).flatten(2).repeat_interleave(num_tokens // tiles, dim=2)


def lay_out(
    sees: torch.Tensor | None, *, image_rows: int, text_rows: int, text_len: int, group: int, null_key: bool = False
) -> Visibility:
    """Brings a mask into the folded layout, and makes it safe to take a softmax over.

    A row that sees nothing would be a softmax over nothing, NaN in some kernels. It gets to see everything instead:
    the block discards what comes out at such positions (`visible`).

    Args:
        sees (`torch.BoolTensor`, *optional*): `(R or B, T or 1, N)`.
        image_rows, text_rows, text_len (`int`): R, B and T.
        group (`int`): G.
        null_key (`bool`): the keys start with a null key (quiet softmax), which is always visible.
    """
    if sees is None:
        return EVERYTHING
    visible = sees.any(dim=-1, keepdim=True)
    mask = torch.cat([torch.ones_like(visible), sees], dim=-1) if null_key else sees | ~visible
    repeats = text_rows // image_rows
    rows, steps, num_keys = mask.shape
    if rows == image_rows and steps == 1:
        mask = mask[:, None]
        visible = visible.repeat_interleave(repeats, dim=0) if repeats > 1 else visible
    else:
        if rows != text_rows:
            mask = mask.repeat_interleave(text_rows // rows, dim=0)
            visible = visible.repeat_interleave(text_rows // rows, dim=0)
        mask = mask.view(image_rows, repeats, steps, 1, num_keys)
        mask = mask.expand(-1, -1, text_len, group, -1).reshape(image_rows, 1, -1, num_keys)
    return Visibility(mask, visible)


def image_order(image_mask: torch.Tensor) -> torch.Tensor:
    """Number of each image among the real ones of its row, from 1 on; 0 for padding images.

    Args:
        image_mask (`torch.BoolTensor`): `(R, num_images)`.

    Returns:
        `torch.LongTensor`: `(R, num_images)`.
    """
    return image_mask.cumsum(dim=-1) * image_mask


def visible_images(
    order: torch.Tensor, markers_seen: torch.Tensor, before_group: torch.Tensor, image_visibility: str
) -> torch.Tensor:
    """Which images each text token sees, from the number of image markers up to and with it.

    As in Flamingo (Alayrac et al., 2022, section 2.3) a marker sees its own image. Markers beyond the number of images,
    as a model might generate, change nothing.

    Args:
        order (`torch.LongTensor`): `(B, num_images)`, from [`image_order`].
        markers_seen (`torch.LongTensor`): `(B, T)`.
        before_group (`torch.LongTensor`): `(B, T)`, markers before the latest run of markers without text in between.
        image_visibility (`str`): `"previous"`, `"latest"` or `"latest_group"`.

    Returns:
        `torch.BoolTensor`: `(B, T, num_images)`.
    """
    total = order.amax(dim=-1, keepdim=True)
    seen = torch.minimum(markers_seen, total)[:, :, None]
    order = order[:, None, :]
    if image_visibility == "latest":
        return (order == seen) & (order > 0)
    first = before_group[:, :, None] if image_visibility == "latest_group" else 0
    return (order <= seen) & (order > first)


@dataclass
class ImageTokens:
    """Where the image tokens of a batch come from: all that visibility depends on beside the text.

    Attributes:
        num_images (`int`): images a row, padding images counted.
        image_of_token (`torch.LongTensor`): `(N,)`, index of the image each token belongs to.
        token_mask (`torch.BoolTensor`, *optional*): `(R, N)`, False = padding; None where there is none.
        image_mask (`torch.BoolTensor`, *optional*): `(R, num_images)`, False = padding image.
        text_mask (`torch.BoolTensor`, *optional*): `(B, N)`, what the text after an explicit per-token mask may see: the
            same as that mask's last text token.
        markers_seen (`torch.LongTensor`, *optional*): `(B, 3)`, of the text so far: its image markers, those before the
            latest run of markers, and whether it ends with a marker.
        digest (`torch.LongTensor`, *optional*): `(R, num_images)` or `(R, N)`, see [`digest_images`].
        digest_of (`str`, *optional*): `"image"` (of pixels) or `"token"` (of features).
    """

    num_images: int
    image_of_token: torch.Tensor
    token_mask: torch.Tensor | None = None
    image_mask: torch.Tensor | None = None
    text_mask: torch.Tensor | None = None
    markers_seen: torch.Tensor | None = None
    digest: torch.Tensor | None = None
    digest_of: str | None = None

    @property
    def num_tokens(self) -> int:
        return self.image_of_token.shape[0]

    def append(self, later: ImageTokens) -> ImageTokens:
        """These images followed by `later` ones of the same rows."""
        if self.digest is None or later.digest is None or self.digest_of != later.digest_of:
            digest = None
        else:
            digest = torch.cat([self.digest, later.digest], dim=1)
        text_mask = self.text_mask
        if text_mask is not None:
            text_mask = torch.cat([text_mask, text_mask.new_ones(text_mask.shape[0], later.num_tokens)], dim=1)
        return ImageTokens(
            num_images=self.num_images + later.num_images,
            image_of_token=torch.cat([self.image_of_token, later.image_of_token + self.num_images]),
            token_mask=_append_masks(self.token_mask, self.num_tokens, later.token_mask, later.num_tokens),
            image_mask=_append_masks(self.image_mask, self.num_images, later.image_mask, later.num_images),
            text_mask=text_mask,
            markers_seen=self.markers_seen,
            digest=digest,
            digest_of=self.digest_of,
        )

    def select(self, rows: torch.Tensor) -> ImageTokens:
        """The image rows `rows`, each serving one text row."""

        def take(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor[rows.to(tensor.device)]

        return ImageTokens(
            self.num_images,
            self.image_of_token,
            take(self.token_mask),
            take(self.image_mask),
            take(self.text_mask),
            take(self.markers_seen),
            take(self.digest),
            self.digest_of,
        )

    def count_markers(self, markers: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Image markers up to and with each text token, and those before the latest run of markers that has an image,
        both `(B, T)`; remembers them for the text that follows.

        Args:
            markers (`torch.BoolTensor`): `(B, T)`, where the new text holds a marker.
            total (`torch.LongTensor`): `(B or 1, 1)`, number of images.
        """
        past = self.markers_seen
        if past is None:
            past = torch.zeros(markers.shape[0], 3, dtype=torch.long, device=markers.device)
        elif past.shape[0] != markers.shape[0]:
            past = past.repeat_interleave(markers.shape[0] // past.shape[0], dim=0)
        counts = markers.cumsum(dim=-1) + past[:, :1]
        counted = markers & (counts <= total)  # one too many, as a model may write, must not take a later image's place
        follows = torch.cat([past[:, 2:] > 0, counted[:, :-1]], dim=-1)
        starts = torch.where(counted & ~follows, counts - 1, past[:, 1:2])
        before_group = starts.cummax(dim=-1).values
        counts = torch.minimum(counts, total)
        self.markers_seen = torch.stack([counts[:, -1], before_group[:, -1], counted[:, -1].long()], dim=-1)
        return counts, before_group

    def sees(
        self, image_visibility: str, markers: torch.Tensor | None, text_mask: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Which image tokens each text token may attend to.

        Args:
            image_visibility (`str`): `"all"`, `"previous"`, `"latest"` or `"latest_group"`.
            markers (`torch.BoolTensor`, *optional*): `(B, T)`, image markers of this forward's text.
            text_mask (`torch.BoolTensor`, *optional*): `(B, T, N)`, the caller's own decision, which comes first.

        Returns:
            `torch.BoolTensor`, *optional*: `(B or R, T or 1, N)`; None where everything may be seen.
        """
        if text_mask is not None:
            self.text_mask = text_mask[:, -1]
            sees = text_mask
        elif self.text_mask is not None:
            sees = self.text_mask[:, None]
        elif image_visibility == "all" or markers is None:
            return None if self.token_mask is None else self.token_mask[:, None]
        else:
            order = image_order(markers.new_ones(1, self.num_images) if self.image_mask is None else self.image_mask)
            if order.shape[0] not in (1, markers.shape[0]):
                order = order.repeat_interleave(markers.shape[0] // order.shape[0], dim=0)
            counts, before_group = self.count_markers(markers, order.amax(dim=-1, keepdim=True))
            sees = visible_images(order, counts, before_group, image_visibility)[:, :, self.image_of_token]
        if self.token_mask is None:
            return sees
        repeats = sees.shape[0] // self.token_mask.shape[0]
        token_mask = self.token_mask.repeat_interleave(repeats, dim=0) if repeats > 1 else self.token_mask
        return sees & token_mask[:, None]


def _append_masks(
    first: torch.Tensor | None, first_size: int, second: torch.Tensor | None, second_size: int
) -> torch.Tensor | None:
    if first is None and second is None:
        return None
    if first is None:
        first = second.new_ones(second.shape[0], first_size)
    elif second is None:
        second = first.new_ones(first.shape[0], second_size)
    return torch.cat([first, second], dim=1)


def digest_images(images: torch.Tensor) -> torch.Tensor:
    """One number an image, to tell whether an image that comes with a filled cache is in it already.

    A sum of mixed words of 64 bits, modulo 2^64: exact and independent of the order of summation, so equal images have
    equal digests in every batch, and unequal ones differ but for one chance in about 2^60. Each word is multiplied by an odd
    number of its own, between two shifts that bring its high bits down: a flipped sign must not cancel another.

    Args:
        images (`torch.Tensor`): `(R, num_images, ...)`, pixels or features.

    Returns:
        `torch.LongTensor`: `(R, num_images)`.
    """
    data = images.detach().flatten(2).contiguous().view(torch.uint8)
    if data.shape[-1] % 8:
        data = nn.functional.pad(data, (0, -data.shape[-1] % 8))
    words = data.view(torch.int64)
    weights = torch.arange(1, words.shape[-1] + 1, device=words.device) * 6364136223846793005 + 1442695040888963407
    weights = (weights ^ (weights >> 29)) | 1
    mixed = ((words ^ (words >> 32)) + images[:1, :1].numel()) * weights  # black images of other sizes differ too
    return (mixed ^ (mixed >> 29)).sum(dim=-1)
