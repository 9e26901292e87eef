"""What the blocks after the first get, where image tokens have been dropped.

All blocks of a forward share one context. Here the blocks after the first get another one: its states, masks and positions are those of
the kept tokens. If a cache holds only some tokens, the model makes both contexts. If this call chooses the tokens, the first block makes
the second context ([`TokenChoice`]) and leaves it in the recorder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..cache.image_layout import ImageLayout, rows_to
from ..cache.kept_tokens import KeptTokens
from ..decoders.text_inputs import mask_of_new_text
from .context import CrossAttentionContext
from .folded_mask import FoldedMask, fold_mask
from .image_rows import ImageRows
from .image_token_selection import KeptShare, most_important, quota


@dataclass(eq=False)  # not frozen: see `cache/image_layout.py`
class TextView:
    """Which image tokens the text of a call sees, and how the mask is folded.

    Attributes:
        sees (`torch.BoolTensor`, *optional*): `(rows, T or 1, N)`; None if the text sees everything.
        by_image (`bool`): whether `sees` has the rows of the images, where nothing but padding hides image tokens.
        rows ([`ImageRows`], *optional*): None if image rows are shared in equal numbers, in order.
        image_rows, text_rows, text_len (`int`): R, B and T.
        group (`int`), null_key (`bool`): as in `fold_mask`.
    """

    sees: torch.Tensor | None
    by_image: bool
    rows: ImageRows | None
    image_rows: int
    text_rows: int
    text_len: int
    group: int
    null_key: bool

    def fold(self) -> FoldedMask:
        shape: dict[str, Any] = {"text_len": self.text_len, "group": self.group, "null_key": self.null_key}
        if self.rows is not None:
            return self.rows.fold(self.sees, by_image=self.by_image, **shape)
        return fold_mask(self.sees, image_rows=self.image_rows, text_rows=self.text_rows, **shape)

    def of_kept(self, kept: KeptTokens) -> TextView:
        """Which of the kept tokens the text sees."""
        if self.sees is None:
            return self._seeing(None if kept.mask is None else kept.mask[:, None], by_image=True)
        sees, mask, index = self.sees, kept.mask, kept.index
        if self.rows is not None and not self.by_image:
            index, mask = self.rows.of_text(index), None if mask is None else self.rows.of_text(mask)
        else:
            count = max(sees.shape[0], index.shape[0])
            sees, index = rows_to(sees, count), rows_to(index, count)
            mask = None if mask is None else rows_to(mask, count)
        sees = sees.take_along_dim(index[:, None].to(sees.device), dim=-1)
        return self._seeing(sees if mask is None else sees & mask[:, None].to(sees.device), self.by_image)

    def _seeing(self, sees: torch.Tensor | None, by_image: bool) -> TextView:
        shape = (self.image_rows, self.text_rows, self.text_len, self.group, self.null_key)
        return TextView(sees, by_image, self.rows, *shape)

    def seen_images(self, counted: torch.Tensor | None, sizes: tuple[int, ...]) -> torch.Tensor | None:
        """`(R, num_images)`, the images that some of the text sees; None for all.

        Args:
            counted (`torch.BoolTensor`, *optional*): `(B, T)`, the text that counts; None if all does.
            sizes (`tuple[int, ...]`): tokens of each image.
        """
        if self.sees is None or self.by_image:  # text sees all images, but a row may have no text: only padding
            if counted is None:
                return None
            has_text = rows_to(counted, self.text_rows).any(dim=-1)
            has_text = has_text if self.rows is None else has_text[self.rows.slots.to(has_text.device)]
            return has_text.view(self.image_rows, -1).any(dim=1)[:, None].expand(-1, len(sizes))
        sees = rows_to(self.sees, self.text_rows)
        if counted is not None:
            sees = sees & counted[..., None].to(sees.device)
        tokens = sees.any(dim=1)
        images = torch.stack([part.any(dim=-1) for part in tokens.split(sizes, dim=-1)], dim=-1)
        if self.rows is None:
            return images.unflatten(0, (self.image_rows, -1)).any(dim=1)
        return images[self.rows.slots.to(images.device)].unflatten(0, (self.image_rows, -1)).any(dim=1)

    def counted_positions(self, text: torch.Tensor | None, visible: torch.Tensor | None) -> torch.Tensor | None:
        """`(R, P)`, the folded text positions that choose: no padding, and none that sees no image. None for all.

        Args:
            text (`torch.BoolTensor`, *optional*): `(B, T)`, False = padding.
            visible (`torch.BoolTensor`, *optional*): `(B or 1, T or 1, 1)`, see [`FoldedMask`].
        """
        counted = text
        if visible is not None:
            counted = visible[..., 0] if text is None else visible[..., 0] & text.to(visible.device)
        if self.rows is not None and counted is not None:
            # A slot that is left over holds a text row a second time, which changes no largest weight.
            counted = self._wide(counted)[self.rows.slots.to(counted.device)]
        return None if counted is None else self._wide(counted).reshape(self.image_rows, -1)

    def _wide(self, counted: torch.Tensor) -> torch.Tensor:
        rows = self.text_rows if counted.shape[0] == 1 else counted.shape[0]
        return counted.expand(rows, self.text_len)

    def rows_of_text(self, tensor: torch.Tensor) -> torch.Tensor:
        """`(R, ...)` to rows that divide those of the text in order."""
        return tensor if self.rows is None else self.rows.of_text(tensor)


def context_of_kept(
    fields: dict[str, Any],
    view: TextView,
    kept: KeptTokens,
    num_tokens: int,
    key_positions: torch.Tensor | None,
) -> CrossAttentionContext:
    """Makes the context of later blocks.

    Args:
        fields (`dict`): the fields that do not depend on what is kept, with states of the kept tokens alone.
        view ([`TextView`]): of all image tokens.
        kept ([`KeptTokens`]): what later blocks keep.
        num_tokens (`int`): N.
        key_positions (`torch.LongTensor`, *optional*): of all image tokens, see [`CrossAttentionContext`].
    """
    mask, visible = view.of_kept(kept).fold()
    index = view.rows_of_text(kept.index)
    if fields["query_positions"] is None:
        positions = None
    elif key_positions is None:
        positions = index
    else:
        rows = max(key_positions.shape[0], index.shape[0])
        positions = rows_to(key_positions, rows).gather(-1, rows_to(index, rows).to(key_positions.device))
    if fields["output_attentions"]:
        fields = {**fields, "kept_index": index, "num_image_tokens": num_tokens}
    return CrossAttentionContext(**fields, mask=mask, visible=visible, key_positions=positions)


@dataclass(eq=False)  # not frozen: see `cache/image_layout.py`
class TokenChoice:
    """Chooses image tokens as soon as the first block has looked at them.

    Attributes:
        share (`float`): what an image keeps of its tokens.
        drops (`tuple[bool, ...]`): the images that lose tokens. The others stay as they are.
        decides (`torch.BoolTensor`, *optional*): `(R, num_images)`, which rows decide about an image: those whose text sees it, and that
            have not decided before. None: all. An image about which only some decide keeps a place for each token, and a mask.
        layout ([`ImageLayout`]): of all images, with the tokens that are kept so far.
        num_cached (`int`): number of images that are cached.
        view ([`TextView`]): of all image tokens.
        counted (`torch.BoolTensor`, *optional*): `(R, P)`, the text positions that choose; None if all do.
        text_length (`int`): of the text until its last token that chooses, with cached text.
    """

    share: float
    drops: tuple[bool, ...]
    decides: torch.Tensor | None
    layout: ImageLayout
    num_cached: int
    view: TextView
    counted: torch.Tensor | None
    text_length: int

    def to(self, *args: Any, **kwargs: Any) -> TokenChoice:
        return self

    @classmethod
    def of(
        cls,
        given: KeptShare,
        layout: ImageLayout,
        num_cached: int,
        view: TextView,
        text_mask: Any,
        visible: torch.Tensor | None,
        past: int,
    ) -> TokenChoice | None:
        """Finds out what there is to choose. Waits for a GPU if markers, a caller's mask or the text's padding may hide images.

        Args:
            given ([`KeptShare`]): the argument of the call.
            layout, num_cached, view: as above.
            text_mask (`torch.Tensor`, *optional*): the decoder's `attention_mask`.
            visible (`torch.BoolTensor`, *optional*): see [`FoldedMask`].
            past (`int`): number of cached text tokens.

        Returns:
            [`TokenChoice`], or None if there is nothing to drop: each image has been decided about, is too small, or is not seen.

        Raises:
            ValueError: in compiled code.
        """
        kept = layout.sizes if layout.kept is None else layout.kept.sizes
        drops = [left == size and quota(given.share, size) < size for left, size in zip(kept, layout.sizes)]
        if not any(drops):
            return None
        _check_eager()
        text = given.prompt
        length = view.text_len if given.length is None else min(given.length, view.text_len)
        if text is None and isinstance(text_mask, torch.Tensor) and text_mask.dim() == 2:
            text = mask_of_new_text(text_mask, past, view.text_len)[:, :length] != 0
        if length < view.text_len:
            text = torch.ones(1, length, dtype=torch.bool) if text is None else text
            text = torch.nn.functional.pad(text, (0, view.text_len - length))
        decides = view.seen_images(text, layout.sizes)
        if decides is not None:
            real = real_tokens(layout, view.image_rows)
            if real is not None:
                parts = [part.any(dim=-1) for part in real.split(layout.sizes, dim=-1)]
                decides = decides | ~torch.stack(parts, dim=-1).to(decides.device)
        if layout.kept is not None and layout.kept.decided is not None:
            open_ones = ~layout.kept.decided
            decides = open_ones if decides is None else decides & open_ones.to(decides.device)
        if decides is not None:
            decides = decides & torch.tensor(drops, device=decides.device)
            drops = decides.any(dim=0).tolist()
            if not any(drops):
                return None
            decides = None if bool(decides[:, drops].all()) else decides
        counted = view.counted_positions(text, visible)
        return cls(given.share, tuple(drops), decides, layout, num_cached, view, counted, past + length)

    def kept_by(self, weights: torch.Tensor) -> tuple[KeptTokens, torch.Tensor]:
        """The tokens that are kept now, and where they have been in later blocks until now: `(R, M)`.

        Args:
            weights (`torch.Tensor`): `(R, heads, N)`, from `importance`.
        """
        before, rows, device = self.layout.kept, weights.shape[0], weights.device
        real = real_tokens(self.layout, rows)
        decides = None if self.decides is None else self.decides.to(device)
        everywhere = self.drops if decides is None else decides.all(dim=0).tolist()
        sizes, index, filled, picked = [], [], [], []
        first = first_kept = 0  # of an image, among all tokens and among those that are kept until now
        for image, size in enumerate(self.layout.sizes):
            left = size if before is None else before.sizes[image]
            here = slice(first_kept, first_kept + left)
            places = torch.arange(left, device=device).expand(rows, -1)
            of_places = places + first if before is None else before.index[:, here].to(device)
            counts = torch.ones_like(places, dtype=torch.bool)
            if before is not None and before.mask is not None:
                counts = before.mask[:, here].to(device)
            if self.drops[image]:
                of_image = None if real is None else real[:, first : first + size].to(device)
                chosen, chosen_count = most_important(weights[..., first : first + size], of_image, self.share)
                if chosen_count is None:
                    chosen_count = torch.ones_like(chosen, dtype=torch.bool)
                if everywhere[image]:
                    places, of_places, counts = chosen, chosen + first, chosen_count
                elif decides is not None:
                    some = torch.zeros_like(counts).scatter(-1, chosen, chosen_count)
                    counts = torch.where(decides[:, image, None], some, counts)
            index.append(of_places)
            picked.append(places + first_kept)
            filled.append(counts)
            sizes.append(places.shape[1])
            first, first_kept = first + size, first_kept + left
        has_empty = real is not None or decides is not None or (before is not None and before.mask is not None)
        decided = None if before is None else before.decided
        if decides is not None:
            decided = decides if decided is None else decides | decided.to(device)
        mask = torch.cat(filled, dim=1) if has_empty else None
        return KeptTokens(tuple(sizes), torch.cat(index, dim=1), mask, decided), torch.cat(picked, dim=1)

    def decide(self, weights: torch.Tensor, context: CrossAttentionContext) -> tuple[CrossAttentionContext, KeptTokens]:
        """Returns the context of later blocks, without a recorder, and what they keep.

        Args:
            weights (`torch.Tensor`): `(R, heads, N)`, from `importance`.
            context ([`CrossAttentionContext`]): of the first block.
        """
        _check_eager()  # again: exporters trace the decoder alone
        kept, picked = self.kept_by(weights)
        before = self.layout.sizes if self.layout.kept is None else self.layout.kept.sizes
        num_cached = sum(kept.sizes[: self.num_cached])
        states, cached_index = context.cross_attention_states, None
        if any(self.drops[: self.num_cached]):
            cached_index = picked[:, :num_cached]
            if self.view.null_key:
                cached_index = torch.nn.functional.pad(cached_index + 1, (1, 0))
        if states is not None and any(self.drops[self.num_cached :]):
            new = picked[:, num_cached:] - sum(before[: self.num_cached])
            new = new.to(states.device)
            states = states[
                torch.arange(len(new), device=new.device)[:, None], new
            ]  # `gather` is 10 times slower on a CPU
        fields = {
            "cross_attention_states": states,
            "cache": context.cache,
            "slots": context.slots,
            "query_positions": context.query_positions,
            "output_attentions": context.output_attentions,
            "keep_keys_values": context.keep_keys_values,
            "unused": context.unused,
            "cached_index": cached_index,
        }
        return context_of_kept(fields, self.view, kept, self.layout.num_tokens, context.key_positions), kept


def _check_eager() -> None:
    """Raises a `ValueError` in compiled code."""
    if torch.compiler.is_compiling():
        raise ValueError(
            "Expected `keep_image_tokens` outside of compiled and exported code, because what is kept depends on the text. `generate` reads "
            "the prompt in eager mode and compiles the steps after it; or run the prompt without `torch.compile`."
        )


def real_tokens(layout: ImageLayout, rows: int) -> torch.Tensor | None:
    """`(rows, N)`, the tokens that are no padding for one of the text rows that look at an image row; None for all."""
    real = layout.token_mask
    if real is None:
        return None
    real = rows_to(real, max(rows, real.shape[0]))
    return real.unflatten(0, (rows, -1)).any(dim=1)
