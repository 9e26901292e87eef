"""Random conversations whose cached images are padding, against one forward without a cache (see
`test_cache_fuzz.py`).
"""

from dataclasses import replace

import pytest
import torch

from helpers.conversations.cached_talk import Talk
from helpers.conversations.conversations import mask_inputs
from helpers.conversations.random_talks import CHAT, add_text, cached, check


def bring_back_padding(talk: Talk) -> None:
    """Padding of the cache that is given without `image_mask`, named a real image, or shown by a mask for each text
    token.
    """
    rng = talk.rng
    if talk.own_masks or talk.cache is talk.original:
        return
    places = [
        (row, n) for row in range(len(talk.rows)) for n, image in enumerate(talk.rows[row].images) if not image.real
    ]
    if not places:
        return
    pending, (row, slot) = [list(tokens) for tokens in talk.pending], rng.choice(places)
    add_text(talk, 2, [0] * len(talk.rows))
    length = len(talk.pending[0])
    if rng.random() < 0.5:
        own = talk.explicit(None, "all", length)
        own.rows[row][rng.randrange(length)][slot] = (True,) * talk.rows[row].images[slot].size
        what = mask_inputs(own.rows, "tokens")
    elif rng.random() < 0.5:
        real = [[image.real for image in each.images] for each in talk.rows]
        real[row][slot] = True
        what = {"image_mask": torch.tensor(real)}
    else:
        what = {name: value for name, value in talk.image_inputs(cached(talk)).items() if name != "image_mask"}
    talk.forward(length, extra=what, refuse=f"image {slot} of row {row}, which is padding, in {list(what)}")
    talk.pending = pending


PADDING = replace(
    CHAT,
    decoders=("llama", "mistral", "bloom"),
    caches=("returned", "callers", "encoded"),
    kinds=("pixels", "states"),
    modes=("forward", "forward", "greedy", "new_only"),
    partial=0.0,
    faulty=0.0,
    late=0.3,
    uncached=0.0,
    hidden=0.5,
    refused=bring_back_padding,
)


@pytest.mark.parametrize("seed", range(40))
def test_padding_in_the_cache_stays_padding(seed):
    """A cached padding image that a mask shows, or that comes back as a real one, and takes the marker of
    a new image.
    """
    check(seed, PADDING)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40, 1000))
def test_padding_in_many_caches_stays_padding(seed):
    """The same with hundreds of conversations."""
    check(seed, PADDING)
