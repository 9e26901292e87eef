"""Text rows that share an image row in any number and any order: many questions about one picture, in training.

Images in a cache are shared in equal numbers: of `r` text rows for each image row, the first `r` look at image row 0.
The argument `image_rows` names the image row of every text row instead. Vision tower and K/V projections run once for
an image row, and gradients of all its text rows flow through that one copy.

Attention folds the text rows of an image row into one query axis (see `layers/attention.py`), which needs the same
number of slots for every image row: the largest number of text rows that one of them has. A slot that is left over
holds a text row a second time; its output is dropped, so it has no gradient.

    image_rows = [0, 1, 0, -1, 0]    slots of image row 0: text rows 0 2 4    slots       = [0, 2, 4, 1, 1, 1]
                                     slots of image row 1: text rows 1 1 1    slot_of_row = [0, 3, 1, 0, 2]

Letters: B text rows, R image rows, r slots for each image row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from ..cache.image_layout import ImageLayout
from ..utils.tensor_checks import check_integers
from .folded_mask import EVERYTHING, FoldedMask, fold_mask


# The image row of a text row that sees no image.
NO_IMAGE = -1


class Slots(NamedTuple):
    """What attention needs of [`ImageRows`]."""

    slots: torch.Tensor
    slot_of_row: torch.Tensor


@dataclass(frozen=True, eq=False)
class ImageRows:
    """Which image row each text row looks at."""

    index: torch.Tensor  # `(B,)`, -1 for a text row that sees no image
    slots: torch.Tensor  # `(R * r,)`, the text row in each slot
    slot_of_row: torch.Tensor  # `(B,)`, the slot of each text row; 0 for a text row that sees no image
    count: int  # R
    some_see_nothing: bool  # whether `index` holds a -1

    @classmethod
    def of(cls, image_rows: torch.Tensor, count: int) -> ImageRows | None:
        """Reads `image_rows` `(B,)` of `count` image rows. On a GPU this waits for it: the number of slots is a shape.

        Returns:
            [`ImageRows`], or None if all image rows have the same number of text rows, in order, as in a cache.

        Raises:
            ValueError: for a number that is no image row, and for an image row that no text row looks at.
        """
        wanted = image_rows.tolist()
        rows_of: list[list[int]] = [[] for _ in range(count)]
        for text_row, image_row in enumerate(wanted):
            if not NO_IMAGE <= image_row < count:
                raise ValueError(
                    f"Expected `image_rows` from 0 to {count - 1}, the rows of the images, or {NO_IMAGE} for a text "
                    f"row without an image, got {image_row} for text row {text_row}."
                )
            if image_row != NO_IMAGE:
                rows_of[image_row].append(text_row)
        unused = [image_row for image_row, text_rows in enumerate(rows_of) if not text_rows]
        if unused:
            raise ValueError(
                f"Expected `image_rows` to name each of the {count} rows of images, got none for {unused}: {wanted}. "
                "Leave out images that no text row looks at. A batch that was cut or joined after it was made "
                "(accelerate's `dispatch_batches`) needs new `image_rows`."
            )
        repeats = max(map(len, rows_of))
        slots: list[int] = []
        slot_of_row = [0] * len(wanted)
        for text_rows in rows_of:
            for slot, text_row in enumerate(text_rows, len(slots)):
                slot_of_row[text_row] = slot
            slots += text_rows + text_rows[:1] * (repeats - len(text_rows))
        if slots == list(range(len(wanted))):
            return None
        index, of_slots, of_rows = (
            torch.tensor(each, device=image_rows.device) for each in (wanted, slots, slot_of_row)
        )
        return cls(index, of_slots, of_rows, count, NO_IMAGE in wanted)

    def of_text(self, values: torch.Tensor) -> torch.Tensor:
        """`(R, ...)` to `(B, ...)`. Text rows without an image get the values of image row 0."""
        return _take(values, self.index.clamp(min=0))

    def counts_of_text(self, counts: torch.Tensor) -> torch.Tensor:
        """`(R, ...)` to `(B, ...)`, where text rows without an image get 0."""
        nothing = (self.index < 0).to(counts.device)
        return self.of_text(counts).masked_fill(nothing.view(-1, *[1] * (counts.dim() - 1)), 0)

    def layout_of_text(self, layout: ImageLayout) -> ImageLayout:
        """The layout with masks of one row for each text row."""
        images, tokens = layout.image_mask, layout.token_mask
        return replace(
            layout,
            image_mask=None if images is None else self.of_text(images),
            token_mask=None if tokens is None else self.of_text(tokens),
        )

    def fold(
        self, sees: torch.Tensor | None, *, by_image: bool, text_len: int, group: int, null_key: bool
    ) -> FoldedMask:
        """Folds a mask `(R, 1, N)` or `(B, T or 1, N)` into the slots (see `fold_mask`).

        `by_image`: whether `sees` has the rows of the images, where nothing but padding hides image tokens.
        """
        folded = EVERYTHING
        if sees is not None:
            folded = fold_mask(
                sees if by_image else _take(sees, self.slots),
                image_rows=self.count,
                text_rows=self.count if by_image else self.slots.shape[0],
                text_len=text_len,
                group=group,
                null_key=null_key,
            )
        visible = folded.visible
        if visible is not None:
            visible = self.of_text(visible) if by_image else _take(visible, self.slot_of_row)
        if self.some_see_nothing:
            has_image = (self.index >= 0)[:, None, None]
            visible = has_image if visible is None else visible & has_image.to(visible.device)
        return FoldedMask(folded.mask, visible)


def _take(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return values[rows.to(values.device)]


def check_image_rows(image_rows: torch.Tensor, has_images: bool, text_rows: int | None, cached_rows: int) -> None:
    """Checks what can be checked without reading the values.

    Args:
        image_rows (`torch.LongTensor`): `(B,)`.
        has_images (`bool`): whether the call brings images.
        text_rows (`int`, *optional*): B; None if there is no text.
        cached_rows (`int`): number of image rows in the cache; 0 if it holds no images.

    Raises:
        TypeError: for numbers that are not integers.
        ValueError: for another shape, without images, or beside images in a cache.
    """
    check_integers("image_rows", image_rows)
    if image_rows.dim() != 1 or (text_rows is not None and image_rows.shape[0] != text_rows):
        expected = "(batch,)" if text_rows is None else f"{(text_rows,)} (batch,)"
        raise ValueError(
            f"Expected `image_rows` of shape {expected}, one number for each text row, got {tuple(image_rows.shape)}."
        )
    if cached_rows:
        raise ValueError(
            f"Expected no `image_rows` beside images in `cache`: its {cached_rows} image rows are shared in "
            "equal numbers."
        )
    if not has_images:
        raise ValueError("`image_rows` was given without images. Pass `pixel_values` or `cross_attention_states`.")


def refuse_to_cache(what: str) -> None:
    """Raises the `ValueError` of a call with `image_rows` that wants a cache (`what`: by which argument or method)."""
    raise ValueError(
        f"Expected `image_rows` without a cache, as in training, got it with {what}. A cache shares images in equal "
        "numbers: call `encode_images` once and pass the result as `cache`, with the questions about the "
        "first image first, and as many about each image."
    )


def refuse_data_parallel(model: nn.Module) -> None:
    """Raises a `ValueError` in a replica of `DataParallel`.

    `DataParallel` gives the GPUs as many parts of a batch as its smallest tensor has rows.
    """
    if getattr(model, "_is_replica", False):
        raise ValueError(
            "Expected `image_rows` in a process for each GPU, got it under `torch.nn.DataParallel`, which `Trainer` "
            "uses with several GPUs in one process: it cuts text and images into parts that do not belong together, "
            "and drops text rows. Use `torchrun` or `accelerate launch`."
        )
