"""Which image tokens the blocks after the first keep, where a call has dropped some of them (`layers/image_token_selection.py`).

The layout of a cache holds this, so it follows its image rows: selection, beams and later images. Keys and values of the first block have
all N image tokens, those of later blocks have M of them, image by image and in their order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..utils.pytrees import dataclass_node


@dataclass_node
@dataclass(eq=False)  # not frozen: see `cache/image_layout.py`
class KeptTokens:
    """The image tokens that later blocks keep.

    Attributes:
        sizes (`tuple[int, ...]`): number of kept tokens of each image, with places that a row leaves empty.
        index (`torch.LongTensor`): `(R, M)`, which of the N image tokens stands at each place.
        mask (`torch.BoolTensor`, *optional*): `(R, M)`, False = an empty place, in a row that keeps fewer tokens of an image than
            another row; None if no place is empty.
        decided (`torch.BoolTensor`, *optional*): `(R, num_images)`, whether a row has dropped tokens of an image of which others keep all,
            because their text has not seen it; None if all rows have decided about the same images.
    """

    sizes: tuple[int, ...]
    index: torch.Tensor
    mask: torch.Tensor | None = None
    decided: torch.Tensor | None = None

    @classmethod
    def all_of(cls, sizes: tuple[int, ...], like: torch.Tensor) -> KeptTokens:
        """Keeps all tokens of images with `sizes` tokens, for the rows and on the device of `like`."""
        index = torch.arange(sum(sizes), device=like.device)
        return cls(sizes, index.expand(like.shape[0], -1))

    def append(self, later: KeptTokens, num_tokens: int) -> KeptTokens:
        """Returns these tokens, followed by those of `later` images. `num_tokens` is N before these."""
        mask = None
        if self.mask is not None or later.mask is not None:
            mask = torch.cat([self._filled(), later._filled().to(self.index.device)], dim=1)
        index = torch.cat([self.index, later.index.to(self.index.device) + num_tokens], dim=1)
        decided = self.decided
        if decided is not None:
            decided = torch.nn.functional.pad(decided, (0, len(later.sizes)))
        return KeptTokens((*self.sizes, *later.sizes), index, mask, decided)

    def select(self, rows: torch.Tensor) -> KeptTokens:
        """Returns the image rows `rows`."""
        rows = rows.to(self.index.device)
        mask, decided = (None if tensor is None else tensor[rows] for tensor in (self.mask, self.decided))
        return KeptTokens(self.sizes, self.index[rows], mask, decided)

    def _filled(self) -> torch.Tensor:
        return torch.ones_like(self.index, dtype=torch.bool) if self.mask is None else self.mask
