"""How a random conversation goes: plans of what happens in it, and each of its steps."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from helpers.conversations.cached_talk import PART, Slots, Talk
from helpers.conversations.conversations import (
    DECODERS,
    MARKER,
    NUM_PICTURES,
    STATE_SPACE,
    STATE_TOKENS,
    STEPWISE,
    Image,
    Over,
    draw_text,
)


RULES = ("all", "previous", "latest", "latest_group")


@dataclass(frozen=True)
class Plan:
    """How likely each thing is in a conversation.

    Attributes:
        partial: images that are in the cache in part are given, and must be refused.
        faulty: a call fails once, and is made again.
        explicit: a mask of the caller's own for each text token.
        whole: that mask covers the text in the cache too.
        wrong: a mask of a wrong length, which must be refused.
        late: padding is named beside a cache of images that were encoded without it.
        relaid: images that are given again lie in other slots, with the padding of a row at its end, and must be
            refused.
        few: markers that are fewer than the images.
        take: text or rows are taken away or moved after a turn.
        uncached: the same question with `use_cache=False`.
        hidden: all images that come in a turn are padding.
        refused: makes a call before each turn but the first, which must be refused.
    """

    decoders: tuple[str, ...] = DECODERS
    rules: tuple[str, ...] = RULES
    caches: tuple[str, ...] = ("returned", "callers", "static", "encoded")
    kinds: tuple[str, ...] = ("pixels", "states", "states", "states3")
    modes: tuple[str, ...] = ("forward", "forward", "greedy", "chunks", "new_only", "sample", "lookup", "beams")
    takes: tuple[str, ...] = ("crop", "crop", "select", "reorder", "repeat", "reset")
    partial: float = 0.1
    faulty: float = 0.05
    explicit: float = 0.25
    whole: float = 0.4
    wrong: float = 0.05
    late: float = 0.15
    relaid: float = 0.3
    few: float = 0.3
    take: float = 0.4
    uncached: float = 0.15
    hidden: float = 0.0
    refused: Callable[[Talk], None] | None = None


CHAT = Plan()
DENSE = tuple(name for name in DECODERS if name not in STATE_SPACE)

PLANS = {
    "chat": CHAT,
    "mask_of_whole_chat": replace(
        CHAT, kinds=("pixels", "states"), modes=("greedy", "greedy", "forward"), explicit=0.9, whole=1.0, take=0.1
    ),
    "mask_on_encoded_images": replace(
        CHAT, caches=("encoded", "encoded", "callers"), late=1.0, explicit=0.1, partial=0.0
    ),
    "wrong_mask": replace(CHAT, modes=("greedy", "beams", "lookup", "forward"), wrong=0.9, explicit=0.5, partial=0.0),
    "failing_call": replace(CHAT, caches=("returned", "callers", "static"), faulty=0.6, partial=0.0, take=0.2),
    "part_of_the_images": replace(CHAT, partial=0.9),
    "more_images_than_markers": replace(
        CHAT,
        decoders=DENSE,
        rules=("previous", "latest", "latest_group"),
        caches=("encoded", "encoded", "returned", "callers"),
        modes=("beams", "beams", "lookup", "lookup", "greedy", "forward"),
        takes=("crop",),
        explicit=0.05,
        wrong=0.0,
        partial=0.0,
        faulty=0.0,
        late=0.0,
        few=1.0,
        take=0.6,
    ),
    "rows": replace(CHAT, modes=("forward", "greedy", "sample"), takes=("select", "reorder", "repeat"), take=0.9),
}

THEMES = tuple(PLANS)
# Refusals that depend on which pictures come twice by chance: what the caller means is not clear, and the error asks.
UNCLEAR = ("these count as the same.", "a part of the text that came with the images")


def start(rng: random.Random, plan: Plan) -> Talk:
    """A conversation before its first turn."""
    decoder = rng.choice(plan.decoders)
    caches = plan.caches
    if decoder in STATE_SPACE:  # whose states have no place in a plain `DynamicCache()`
        caches = tuple(kind for kind in caches if kind in ("returned", "encoded"))
    cache_kind = rng.choice(caches)
    alone = rng.random() < (0.6 if plan.modes.count("lookup") > 1 else 0.25)
    image_rows = 1 if alone else rng.randint(1, 3)
    repeats = rng.choice([1, 2]) if cache_kind == "encoded" and not alone else 1
    return Talk(rng, decoder, rng.choice(plan.rules), rng.choice(plan.kinds), cache_kind, image_rows, repeats)


def hold(talk: Talk, plan: Plan) -> None:
    """The whole conversation."""
    rng = talk.rng
    padding = rng.choice(["none", "none", "images", "images", "tokens", "both"])
    turns = rng.randint(1, 3) if plan.whole < 1 else rng.randint(2, 3)
    for number in range(turns):
        if plan.refused is not None and talk.length:
            plan.refused(talk)
        turn(talk, plan, padding, last=number == turns - 1)
        if talk.cache is not None and rng.random() < plan.take:
            take_away(talk, plan)
    if talk.cache is not None:
        add_text(talk, rng.randint(1, 2), [rng.randint(0, 1) for _ in talk.rows])
        read_pieces(talk, None, plan, False)


def turn(talk: Talk, plan: Plan, padding: str, last: bool) -> None:
    """Images, text, and one way to read them."""
    rng = talk.rng
    if talk.cache is not None and talk.num_slots and rng.random() < plan.partial:
        part_of_the_images(talk)
    late = talk.cache_kind in ("encoded", "callers") and not talk.num_slots and rng.random() < plan.late
    given, new = draw_given(talk, plan, "none" if late else padding)
    fresh = talk.cache is None or not (talk.num_slots or talk.length or talk.cache_kind == "encoded")
    if given is not None and (talk.cache_kind == "encoded" and talk.cache is None or late or rng.random() < 0.1):
        talk.encode(given, rng.random() < plan.faulty)
        given, fresh = None, False
    modes = [mode for mode in plan.modes if possible(talk, mode, last, given)]
    mode = rng.choice(modes)

    markers = [count for count in new for _ in range(talk.repeats)]
    if not fresh or mode == "forward" or talk.rule == "all":
        if rng.random() < plan.few:
            markers = [rng.randint(0, count) for count in markers]
        else:
            markers = [max(0, count + rng.choice([0, 0, 0, -1, 1])) for count in markers]
    add_text(talk, max([*markers, rng.randint(2, 8)]) + 1, markers)
    fixed = talk.bank.name == "bloom" and talk.cache_kind == "static"  # whose `forward` takes no padding
    if not talk.length and (talk.bank.name not in STATE_SPACE or last) and not fixed and rng.random() < 0.4:
        pad_left(talk)

    if talk.length and talk.num_slots and rng.random() < plan.wrong:
        other_padding(talk)
    extra = padding_given(talk, late, given)
    if mode == "forward":
        read_pieces(talk, given, plan, extra)
    else:
        ask(talk, mode, given, plan, extra)
        if talk.original is not None and rng.random() < 0.5:
            ask_again(talk)


def possible(talk: Talk, mode: str, last: bool, given: Slots | None) -> bool:
    """Whether transformers can decode so, and whether there is anything to see."""
    if mode == "forward":
        return True
    if given is None and not talk.num_slots:
        return False
    if mode == "beams":
        return last
    if talk.bank.name in STATE_SPACE:
        return mode in ("greedy", "sample")
    if mode == "lookup":
        # With text in the cache transformers reads that text again.
        return len(talk.rows) == 1 and talk.cache_kind != "static" and not talk.length
    return mode != "new_only" or talk.length > 0


def draw_given(talk: Talk, plan: Plan, padding: str) -> tuple[Slots | None, list[int]]:
    """The images of a turn, and how many of each row are new."""
    rng = talk.rng
    if not talk.num_slots and talk.cache_kind != "encoded":
        talk.repeats = 1  # the first images decide who shares them
    nothing = [0] * len(talk.image_rows)
    hidden = bool(plan.hidden) and padding != "none" and rng.random() < plan.hidden
    if not talk.num_slots:
        if rng.random() < 0.1 and talk.cache_kind != "encoded":
            return None, nothing
        given = talk.draw_images(rng.randint(1, 3), padding, hidden=hidden)
        return given, [sum(image.real for image in images) for images in given]
    if talk.own_masks or talk.num_slots > 5 or rng.random() < 0.25 or talk.length <= talk.images_at:
        return None, nothing
    there = cached(talk)
    if talk.kind == "states3":
        if talk.num_slots == 1 and rng.random() < 0.3:
            return there, nothing
        there = [[] for _ in there]
    elif rng.random() < 0.2:
        return there, nothing
    again = talk.kind != "states3" and rng.random() < 0.6
    new = talk.draw_images(rng.randint(1, 2), padding, not again or rng.random() < 0.7, hidden)
    given = [old + images for old, images in zip(there, new)] if again else new
    if again and rng.random() < plan.relaid:
        refuse(talk, talk.relaid(given))
    return given, [sum(image.real for image in images) for images in new]


def cached(talk: Talk) -> Slots:
    """The images of the cache, to be given again."""
    return [list(row.images) for row in talk.image_rows]


def add_text(talk: Talk, length: int, markers: list[int]) -> None:
    for row, count in zip(talk.pending, markers):
        row += draw_text(talk.rng, length, count)


def pad_left(talk: Talk) -> None:
    """Shorter prompts, padded at their start, where they hold no marker."""
    for row, tokens in zip(talk.rows, talk.pending):
        before = tokens.index(MARKER) if MARKER in tokens else len(tokens) - 1
        row.left = talk.rng.randint(0, min(before, 3))
        tokens[: row.left] = [0] * row.left


def padding_given(talk: Talk, late: bool, given: Slots | None) -> dict[str, torch.Tensor] | None:
    """`image_mask` or a 2-D mask without images: padding that is named now, or that is in the cache already."""
    rng = talk.rng
    if given is not None or not talk.num_slots:
        return None
    if talk.length:
        late = False
        if rng.random() < 0.85:
            return None
    elif not late:
        return None
    what = rng.choice(["image_mask", "cross_attention_mask"])
    rows = talk.rows if talk.own_masks or rng.random() < 0.5 else talk.image_rows
    if late:
        same = len(rows) != len(talk.rows)
        talk.own_masks = not same and talk.repeats > 1
        for number, row in enumerate(talk.rows):
            if same and number % talk.repeats:
                row.images = list(talk.rows[number - 1].images)
                continue
            for index, image in enumerate(row.images):
                flags = tuple(rng.random() < 0.6 for _ in range(image.size))
                change = {"real": flags[0]} if what == "image_mask" else {"tokens": flags}
                row.images[index] = replace(image, **change)
    return talk.padding_inputs(rows, what)


def other_padding(talk: Talk) -> None:
    """Padding that is not what the text in the cache was read with."""
    rows = [row.copy() for row in talk.rows]
    row = talk.rng.choice(rows)
    index = talk.rng.randrange(talk.num_slots)
    image = row.images[index]
    row.images[index] = replace(image, real=not image.real, tokens=None)
    same = row.images[index].visible == image.visible
    what = "image_mask" if same or not image.real else talk.rng.choice(["image_mask", "cross_attention_mask"])
    inputs = talk.padding_inputs(rows, what)
    if talk.bank.name in STEPWISE or talk.rng.random() < 0.5:
        talk.forward(1, extra=inputs, refuse="a changed mask of images that were read, in `forward`")
    else:
        talk.generate("greedy", 2, extra=inputs, refuse="a changed mask of images that were read, in `generate`")


def read_pieces(talk: Talk, given: Slots | None, plan: Plan, extra: dict[str, torch.Tensor] | None = None) -> None:
    """The pending text through `forward`, in pieces."""
    rng = talk.rng
    while talk.pending[0]:
        left = 0 if talk.length else max(row.left for row in talk.rows)
        length = max(rng.randint(1, len(talk.pending[0])), left + 1)  # no piece of padding alone
        if talk.bank.name in STEPWISE and talk.length:
            length = 1
        if given is None and extra is None and not talk.own_masks and rng.random() < 0.1:
            if talk.num_slots and (talk.kind != "states3" or talk.num_slots == 1):
                given = cached(talk)
        own, axis, form = None, rng.choice(["all", "all", "given"]), rng.choice(["tokens", "images", "tiles"])
        if talk.can_be_explicit(given, axis) and extra is None:
            if rng.random() < plan.wrong:
                wrong = talk.explicit(given, axis, length + rng.choice([1, 2]), form=form)
                talk.forward(length, given, wrong, refuse="a mask longer than the text of the call")
            if rng.random() < plan.explicit:
                own = talk.explicit(given, axis, length, form=form)
        if talk.cache is talk.original:
            talk.original = None  # `forward` writes into the cache that it gets
        talk.forward(length, given, own, extra, faulty=rng.random() < plan.faulty)
        given = extra = None


def ask(talk: Talk, mode: str, given: Slots | None, plan: Plan, extra: dict[str, torch.Tensor] | None) -> None:
    """The pending text through `generate`, with all that may come along."""
    rng = talk.rng
    if rng.random() < plan.uncached:
        ask_uncached(talk, given, plan)
    past, new = talk.length, len(talk.pending[0])
    own, axis, form = None, rng.choice(["all", "all", "given"]), rng.choice(["tokens", "images", "images", "tiles"])
    if talk.can_be_explicit(given, axis) and not (extra and "cross_attention_mask" in extra):
        if rng.random() < plan.wrong:
            length = rng.choice([length for length in range(1, past + new + 3) if length not in (new, past + new)])
            talk.generate(
                mode, 2, given, talk.explicit(given, axis, length, form=form), refuse=f"a mask of {length} text tokens"
            )
        if rng.random() < plan.explicit:
            whole = rng.random() < plan.whole
            own = talk.explicit(given, axis, past + new if whole else new, past if whole else 0, form)
    fresh_images = given is not None and talk.num_slots and not talk.comes_again(given)
    faulty = rng.random() < plan.faulty and not fresh_images  # what `generate` has encoded may stay
    talk.generate(mode, rng.randint(3, 5), given, own, extra, faulty)


def ask_uncached(talk: Talk, given: Slots | None, plan: Plan) -> None:
    """All the text and all images once more, without a cache, and the cache left alone."""
    rows, repeats = talk.rows, talk.repeats
    new = [] if given is None else [images for images in given for _ in range(repeats)]
    if given is not None and rows[0].images:
        return
    talk.rows = [row.copy() for row in rows]
    for row, images in zip(talk.rows, new):
        row.images = list(images)
    talk.repeats = 1
    images = [list(row.images) for row in talk.rows]
    sizes = {image.size for row in images for image in row}
    ids = [row.tokens + tokens for row, tokens in zip(talk.rows, talk.pending)]
    own = None
    if len(sizes) == 1 and (talk.kind != "states3" or len(images[0]) == 1):
        if talk.can_be_explicit(images, "all") and talk.rng.random() < max(plan.explicit, plan.wrong):
            if talk.rng.random() < plan.wrong:
                wrong = talk.explicit(images, "all", len(ids[0]) + talk.rng.choice([-1, 1]))
                talk.generate("uncached", 2, images, wrong, refuse="a mask of another length than the text")
            own = talk.explicit(images, "all", len(ids[0]))
        if own or talk.rule == "all" or all(row.count(MARKER) == len(r.real) for row, r in zip(ids, talk.rows)):
            talk.generate("uncached", 3, images, own)
    talk.rows, talk.repeats = rows, repeats


def ask_again(talk: Talk) -> None:
    """Another question to the cache of `encode_images`, which no answer may have changed."""
    again = Talk(talk.rng, talk.bank.name, talk.rule, talk.kind, "encoded", 1, 1)
    again.rows = [row.copy() for row in talk.original_rows]
    again.repeats, again.cache, again.log = len(again.rows) // talk.original_image_rows, talk.original, talk.log
    again.pending = [[] for _ in again.rows]
    again.log.append("asked again")
    add_text(again, talk.rng.randint(2, 6), [talk.rng.randint(0, 2) for _ in again.rows])
    again.generate("greedy", 3)


def part_of_the_images(talk: Talk) -> None:
    """Images of which some are in the cache and not all: a mistake of the caller, or images that would come twice."""
    rng = talk.rng
    if talk.own_masks or talk.kind == "states3":
        return
    there = cached(talk)
    size = 16 if talk.kind == "pixels" else STATE_TOKENS
    for _ in range(8):
        given = [list(images) for images in there]
        for images in given:
            new = Image(rng.randrange(NUM_PICTURES), size)
            change = rng.choice(["keep", "drop", "swap", "behind", "other"])
            if change == "drop":
                index = rng.randrange(len(images))
                images[index] = replace(images[index], real=False)
            elif change == "swap":
                rng.shuffle(images)
            elif change == "behind":
                images.insert(0, new)
            elif change == "other":
                images[rng.randrange(len(images))] = new
        most = max(map(len, given))
        given = [images + [Image(0, size, False)] * (most - len(images)) for images in given]
        if refuse(talk, given):
            return


def refuse(talk: Talk, given: Slots) -> bool:
    """A call with these images, if it must be refused."""
    rng = talk.rng
    if talk.beside(given) is not None:
        return False
    inputs = talk.image_inputs(given)
    talk.log.append(f"images {[[str(image) for image in images] for images in given]}")
    if rng.random() < 0.3:
        talk.must_raise(PART, functools.partial(talk.model.encode_images, cache=talk.cache, **inputs))
        return True
    pending = [list(row) for row in talk.pending]
    add_text(talk, 2, [0] * len(pending))
    if talk.length and rng.random() < 0.5 and talk.bank.name not in STATE_SPACE:
        talk.generate("greedy", 2, given, refuse=PART)
    else:
        stepwise = talk.bank.name in STEPWISE and talk.length
        talk.forward(1 if stepwise else len(talk.pending[0]), given, refuse=PART)
    talk.pending = pending
    return True


def take_away(talk: Talk, plan: Plan) -> None:
    """Text cropped, or rows chosen, moved, multiplied."""
    rng = talk.rng
    what = rng.choice(plan.takes)
    dynamic = talk.cache_kind != "static" and talk.bank.name not in STATE_SPACE  # which have no such methods
    if talk.cache is talk.original:
        return
    if what == "crop" and dynamic:
        left = max(row.left for row in talk.rows)
        most = min(talk.croppable, talk.length - 1 - left)
        if most > 0:
            talk.crop(rng.randint(1, most))
    elif what == "select" and dynamic:
        talk.select()
    elif what == "reorder":
        talk.reorder()
    elif what == "repeat" and dynamic and len(talk.rows) <= 3:
        talk.repeat()
    elif what == "reset" and talk.cache_kind == "callers":
        talk.reset()


def check(seed: int, plan: Plan | None = None) -> None:
    rng = random.Random(seed)
    theme = THEMES[seed % len(THEMES)] if plan is None else "its own plan"
    plan = PLANS[theme] if plan is None else plan
    talk = start(rng, plan)
    try:
        hold(talk, plan)
    except Over:
        pass
    except Exception as error:
        if "needs transformers" in str(error):  # what an older version cannot do is refused by name
            pytest.skip(str(error))
        if isinstance(error, ValueError) and any(words in str(error) for words in UNCLEAR):
            return  # each call before was compared
        steps = "\n".join(talk.log)
        raise AssertionError(f"seed {seed} ({theme}): {type(error).__name__}: {error}\n\n{steps}") from error
