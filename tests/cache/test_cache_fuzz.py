"""Random conversations with caches against one forward without.

Every seed is a conversation: a decoder, a rule of visibility, a kind of cache, and turns in which images and text are
added, repeated or taken back. What its text may see comes from `expected.py`, which knows no cache. One
seed alone: `pytest tests/cache/test_cache_fuzz.py -k seed_00123`; thousands more: `-m slow`.
"""

from __future__ import annotations

import pytest

from helpers.conversations.talk import THEMES, check


NUM_QUICK, NUM_SLOW = 120, 2880


def seeds(first: int, count: int) -> list:
    return [
        pytest.param(seed, id=f"seed_{seed:05d}-{THEMES[seed % len(THEMES)]}") for seed in range(first, first + count)
    ]


@pytest.mark.parametrize("seed", seeds(0, NUM_QUICK))
def test_a_cached_conversation_equals_one_forward(seed):
    """Text that sees another image, or an image at another time, because of how it was read: through which cache, in
    which pieces, with which images given again.
    """
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(NUM_QUICK, NUM_SLOW))
def test_many_cached_conversations_equal_one_forward(seed):
    """The same with thousands of conversations: what needs several rare things at once."""
    check(seed)
