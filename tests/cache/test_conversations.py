"""The expected side of random conversations, against tables written by hand and against Mllama's own rule."""

import random

import pytest
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from helpers.conversations.bank import MARKER
from helpers.conversations.expected import Image, Row


def row(rule: str, *real: bool) -> Row:
    return Row(rule, images=[Image(number, 1, flag) for number, flag in enumerate(real)])


def seen(row: Row) -> list[str]:
    """One string a token, one digit an image."""
    return ["".join(str(int(flag[0])) for flag in sees.values()) for sees in row.sees]


def read(row: Row, text: str) -> Row:
    """`"m"` is a marker."""
    for letter in text:
        row.read(MARKER if letter == "m" else 9)
    return row


@pytest.mark.parametrize(
    "rule, expected",
    [
        ("all", ["101"] * 7),
        ("previous", ["000", "100", "100", "101", "101", "101", "101"]),
        ("latest", ["000", "100", "100", "001", "001", "001", "001"]),
        ("latest_group", ["000", "100", "100", "001", "001", "001", "001"]),
    ],
)
def test_each_rule_of_visibility_matches_a_table_by_hand(rule, expected):
    """Rules out padding images that count, and markers beyond the images that do."""
    assert seen(read(row(rule, True, False, True), "tmtmtmt")) == expected


@pytest.mark.parametrize("seed", range(5))
def test_latest_group_is_mllamas_rule(seed):
    """Rules out a group that starts or ends elsewhere than in the model it was taken from."""
    rng = random.Random(seed)
    ids = [7 if rng.random() < 0.4 else 1 for _ in range(12)]
    count = max(ids.count(7), 1)
    sparse = [get_cross_attention_token_mask(ids, 7)]
    dense = convert_sparse_cross_attention_mask_to_dense(sparse, [[1] * count], 1, len(ids))[0, :, :, 0]
    mine = read(
        row("latest_group", *[number < ids.count(7) for number in range(count)]), "".join(" m"[i == 7] for i in ids)
    )
    assert seen(mine) == ["".join(str(int(flag)) for flag in flags) for flags in dense]


def test_a_marker_counts_when_it_is_read():
    """Rules out a marker of text that was read before its image came, or one too many, that shows a later image."""
    text = read(row("latest", True), "mm")
    text.images.append(Image(1, 1))
    assert seen(read(text, "tmt")) == ["1", "1", "10", "01", "01"]


def test_a_mask_of_the_callers_holds_until_the_next_counted_marker():
    """Rules out a mask that is forgotten, that covers later images, or that outlives a marker."""
    text = row("previous", True, True)
    text.read(MARKER, {0: (False,), 1: (True,)})
    text.images.append(Image(2, 1))
    assert seen(read(text, "tmt")) == ["01", "010", "110", "110"]
    text = row("all", True, True)
    text.read(9, {0: (False,), 1: (True,)})
    text.images.append(Image(2, 1))
    assert seen(read(text, "tm")) == ["01", "011", "011"]


def test_crop_brings_the_state_back():
    """Rules out a marker, a run or a mask of removed text that decides about the text in its place."""
    text = read(row("latest_group", True, True, True), "mt")
    before = text.states[-1]
    text.read(MARKER, {0: (True,), 1: (False,), 2: (True,)})
    read(text, "mt")
    text.crop(3)
    assert text.states[-1] == before and seen(read(text, "mm")) == ["100", "100", "010", "011"]
