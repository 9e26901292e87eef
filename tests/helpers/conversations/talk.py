"""A random conversation with a cached model: [`check`] draws it from a seed and compares each of its calls with one
uncached forward over the text so far (see `expected.py`).

Every method of a [`Talk`] makes one call through public names. What was called is noted in `log`, so that a failing
seed can be read. Calls that must be refused, calls that fail and searches with beams have tests of their own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

from helpers.conversations.bank import (
    BLOCKS,
    DECODERS,
    MARKER,
    NUM_PICTURES,
    RULES,
    STATE_SPACE,
    STATE_TOKENS,
    STEPWISE,
    WINDOWED,
    bank,
    draw_text,
)
from helpers.conversations.expected import TOLERANCE, Image, Row, Seen, attention_mask, compare, given_again, mask_of
from hf_xattn.utils.transformers_api import CACHE, has


Slots = list[list[Image]]  # the images of each image row; all rows have as many
Mask = list[list[Seen]]  # a caller's own mask for each text token, row by row


class Over(Exception):
    """The conversation cannot go on, and that is right."""


@dataclass(frozen=True)
class Plan:
    """What happens in a conversation, and how likely each thing is.

    Attributes:
        explicit: a mask of the caller's own for each text token.
        whole: that mask covers the text in the cache too.
        few: markers that are fewer than the images.
        take: text or rows are taken away or moved after a turn.
        hidden: all images that come in a turn are padding.
    """

    decoders: tuple[str, ...] = DECODERS
    rules: tuple[str, ...] = RULES
    caches: tuple[str, ...] = ("returned", "callers", "static", "encoded")
    kinds: tuple[str, ...] = ("pixels", "states", "states", "states3")
    modes: tuple[str, ...] = ("forward", "forward", "greedy", "chunks", "new_only", "sample", "lookup")
    takes: tuple[str, ...] = ("crop", "crop", "select", "reorder", "repeat", "reset")
    explicit: float = 0.25
    whole: float = 0.4
    few: float = 0.3
    take: float = 0.4
    hidden: float = 0.0


PLANS = {
    "chat": Plan(),
    "mask_of_whole_chat": Plan(
        kinds=("pixels", "states"), modes=("greedy", "greedy", "forward"), explicit=0.9, whole=1.0, take=0.1
    ),
    "more_images_than_markers": Plan(
        decoders=tuple(name for name in DECODERS if name not in STATE_SPACE),
        rules=("previous", "latest", "latest_group"),
        caches=("encoded", "encoded", "returned", "callers"),
        modes=("lookup", "lookup", "greedy", "forward"),
        takes=("crop",),
        explicit=0.05,
        few=1.0,
        take=0.6,
    ),
    "rows": Plan(
        caches=("encoded", "encoded", "returned", "callers"),
        modes=("forward", "greedy", "sample"),
        takes=("select", "reorder", "repeat"),
        take=0.9,
    ),
    "padding_images": Plan(kinds=("pixels", "states"), modes=("forward", "forward", "greedy", "new_only"), hidden=0.5),
}
THEMES = tuple(PLANS)


class Talk:
    """One conversation, and beside it the rows that say what its text may see. `rng` decides what happens of `plan`."""

    def __init__(self, rng: random.Random, plan: Plan):
        self.rng, self.plan = rng, plan
        decoder, caches = rng.choice(plan.decoders), plan.caches
        if decoder in STATE_SPACE:  # whose states have no place in a plain `DynamicCache()`
            caches = tuple(kind for kind in caches if kind in ("returned", "encoded"))
        self.kind, self.cache_kind, self.rule = rng.choice(plan.kinds), rng.choice(caches), rng.choice(plan.rules)
        alone = rng.random() < (0.6 if plan.modes.count("lookup") > 1 else 0.25)
        image_rows = 1 if alone else rng.randint(1, 3)
        self.repeats = rng.choice([1, 2]) if self.cache_kind == "encoded" and not alone else 1
        block = rng.choice([name for name in BLOCKS if "position" not in name])
        self.bank = bank(decoder, self.rule, block)
        self.model = self.bank.model
        self.rows = [Row(self.rule) for _ in range(image_rows * self.repeats)]
        self.pending: list[list[int]] = [[] for _ in self.rows]  # text that the model has not read
        self.cache: EncoderDecoderCache | None = None
        if self.cache_kind == "callers":
            self.cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        elif self.cache_kind == "static":
            static = StaticCache(config=self.model.config.text_config, max_cache_len=128)
            self.cache = EncoderDecoderCache(static, DynamicCache())
        # `"none"`, `"images"`, `"tokens"` or `"both"`: what of the images is padding.
        self.padding = rng.choice(["none", "none", "images", "images", "tokens", "both"])
        self.croppable = 0
        self.given: Slots | None = None  # the images of the last call
        # Tokens in front of the text of the last images, and up to its end. After a crop to the first number, new
        # images are refused; where all text sees all images, already after a crop into that text.
        self.images_at, self.images_end = -1, 0
        self.log = [
            f"{decoder}, blocks: {block}, image_visibility={self.rule!r}, {self.kind}, {self.cache_kind} cache, "
            f"{image_rows} image rows x {self.repeats} text rows"
        ]

    # --- what is there

    @property
    def stateful(self) -> bool:
        return self.bank.name in STATE_SPACE

    @property
    def windowed(self) -> bool:
        return self.bank.name in WINDOWED and self.cache_kind in ("returned", "encoded")

    @property
    def length(self) -> int:
        return len(self.rows[0].tokens)

    @property
    def image_rows(self) -> list[Row]:
        """The first text row of each image row."""
        return self.rows[:: self.repeats]

    @property
    def num_slots(self) -> int:
        return len(self.rows[0].images)

    def comes_again(self, given: Slots | None) -> bool:
        """Whether the call gives all images of the cache in their slots, with what of them is padding."""
        return given is not None and given_again([row.images for row in self.image_rows], given)

    @property
    def lacks_text_of_images(self) -> bool:
        return self.rule == "all" and self.length < self.images_end

    # --- images

    def draw_images(self, num_slots: int) -> Slots:
        """New images, which are not in the cache."""
        size = 16 if self.kind == "pixels" else STATE_TOKENS
        if self.kind == "states3":  # one image a call, without an axis for images
            num_slots, size = 1, self.rng.randint(2, STATE_TOKENS)
        hidden = self.padding != "none" and self.rng.random() < self.plan.hidden
        result = []
        for row in self.image_rows:
            there = {image.picture for image in row.images}
            images = []
            for picture in self.rng.sample([p for p in range(NUM_PICTURES) if p not in there], num_slots):
                real = not hidden and (self.padding not in ("images", "both") or self.rng.random() < 0.6)
                mask = None
                if self.padding in ("tokens", "both"):
                    mask = tuple(index == 0 or self.rng.random() < 0.7 for index in range(size))
                images.append(Image(picture, size, real, mask))
            result.append(images)
        if not hidden and not any(image.real for images in result for image in images):
            result[0][0] = replace(result[0][0], real=True)
        return result

    def draw_given(self) -> tuple[Slots | None, list[int]]:
        """The images of a turn, and how many of each row are new and real."""
        rng, nothing = self.rng, [0] * len(self.image_rows)
        there = [list(row.images) for row in self.image_rows]
        if not self.num_slots:
            if rng.random() < 0.1 and self.cache_kind != "encoded":
                return None, nothing
            given = new = self.draw_images(rng.randint(1, 3))
        elif self.num_slots > 5 or rng.random() < 0.25 or self.length <= self.images_at or self.lacks_text_of_images:
            return None, nothing
        elif rng.random() < 0.2 and (self.kind != "states3" or self.num_slots == 1):
            return there, nothing
        else:
            new = self.draw_images(rng.randint(1, 2))
            again = self.kind != "states3" and rng.random() < 0.6
            given = [old + images for old, images in zip(there, new)] if again else new
        return given, [sum(image.real for image in images) for images in new]

    def image_inputs(self, given: Slots) -> dict[str, torch.Tensor]:
        """The arguments that give these images."""
        size, rng = given[0][0].size, self.rng
        pictures = torch.tensor([[image.picture for image in images] for images in given])
        if self.kind == "pixels":
            inputs = {"pixel_values": self.bank.pixels[pictures]}
        else:
            inputs = {"cross_attention_states": self.bank.states[pictures, :size]}
        if len(given[0]) == 1 and (self.kind == "states3" or (self.kind == "pixels" and rng.random() < 0.3)):
            inputs = {name: tensor[:, 0] for name, tensor in inputs.items()}
        real = [[image.real for image in images] for images in given]
        if not all(map(all, real)) or rng.random() < 0.2:
            inputs["image_mask"] = torch.tensor(real)
        if any(image.tokens is not None for images in given for image in images):
            tokens = [[flag for image in images for flag in image.tokens or (True,) * size] for images in given]
            inputs["cross_attention_mask"] = torch.tensor(tokens)
        return inputs

    def place_images(self, given: Slots | None, before: int = 0) -> None:
        """Notes what the cache must hold after these images were given. `before`: tokens that they came with."""
        if given is None:
            return
        slots = self.num_slots if self.comes_again(given) else 0
        self.images_at = self.length - before
        self.images_end = self.length if before else self.length + len(self.pending[0])
        for number, images in enumerate(given):
            for row in self.rows[number * self.repeats : (number + 1) * self.repeats]:
                row.images += images[slots:]

    def encode(self, given: Slots) -> None:
        """Images through `encode_images`, into a new cache or the one that is there."""
        inputs = self.image_inputs(given)
        self.note("encode_images", given, inputs)
        self._keep(self.model.encode_images(cache=self.cache, **inputs))
        self.place_images(given, before=1)

    def draw_mask(self, given: Slots | None, length: int, first: int = 0) -> Mask | None:
        """A random mask of `length` text tokens, or None where a mask says nothing that the rules here decide. Its
        first `first` rows repeat what the text in the cache has seen.
        """
        every = self.rng.random() < 0.7  # the mask covers the images of the cache, too
        if not (given or self.num_slots) or any(image.tokens is not None for row in given or [] for image in row):
            return None  # the padding of new images needs the same argument
        if not every and any(row.states and row.states[-1].held for row in self.rows):
            return None
        slots, numbers = self._masked_images(given, every)
        mask: Mask = []
        for number, row in enumerate(self.rows):
            mask.append([])
            for step in range(length):
                seen: Seen = {}
                for index, image in zip(numbers, slots[number // self.repeats]):
                    flags = (False,) * image.size
                    if step < first:
                        flags = row.sees[step].get(index, flags)
                    elif index >= self.num_slots or row.images[index].real or self.comes_again(given):
                        flags = tuple(self.rng.random() < 0.6 for _ in flags)  # else, the mask is refused
                    seen[index] = flags
                mask[-1].append(seen)
        return mask

    def _masked_images(self, given: Slots | None, every: bool) -> tuple[Slots, list[int]]:
        """The images that a mask covers, and their numbers in the row."""
        if given is None:
            return [row.images for row in self.image_rows], list(range(self.num_slots))
        if self.comes_again(given):
            return given, list(range(len(given[0])))
        if not every:
            return given, list(range(self.num_slots, self.num_slots + len(given[0])))
        both = [row.images + images for row, images in zip(self.image_rows, given)]
        return both, list(range(len(both[0])))

    # --- calls

    def note(self, call: str, given: Slots | None, inputs: dict[str, Any]) -> None:
        self.given = given
        images = "" if given is None else f", images {[[str(image) for image in images] for images in given]}"
        shapes = [f"{name} {tuple(value.shape)}" for name, value in inputs.items() if isinstance(value, torch.Tensor)]
        self.log.append(f"{call}{images}; {', '.join(shapes)}")

    def inputs(self, ids: list[list[int]], given: Slots | None, mask: Mask | None, padded: bool) -> dict[str, Any]:
        """Ids, images and masks; `padded`: with the attention mask of all the text."""
        inputs = {"input_ids": torch.tensor(ids)}
        if padded or any(row.left for row in self.rows):
            inputs["attention_mask"] = attention_mask(self.rows, self.length + len(self.pending[0]))
        inputs |= {} if given is None else self.image_inputs(given)
        return inputs if mask is None else {**inputs, "cross_attention_mask": mask_of(mask)}

    def read(self, tokens: list[list[int]], mask: Mask | None = None) -> None:
        """Notes that the model has read these tokens."""
        for number, (row, new) in enumerate(zip(self.rows, tokens)):
            of_row = [None] * len(new) if mask is None else mask[number][len(mask[number]) - len(new) :]
            for token, explicit in zip(new, of_row):
                row.read(token, explicit)

    def forward(self, length: int, given: Slots | None, mask: Mask | None) -> None:
        """The next `length` tokens of the pending text through `forward`."""
        ids, rest = [row[:length] for row in self.pending], [row[length:] for row in self.pending]
        self.pending = ids
        inputs = self.inputs(ids, given, mask, False)
        self.note(f"forward {ids}", given, inputs)
        if self.bank.name == "mamba" and self.length:  # which takes a mask as long as its ids
            inputs.pop("attention_mask", None)
        if "attention_mask" in inputs and self.bank.name not in ("bloom", "mamba"):  # as `generate` counts positions
            inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)[:, -length:]
        outputs = self.model(cache=self.cache, use_cache=True, **inputs)
        self.place_images(given)
        self.read(ids, mask)
        for row, logits in zip(self.rows, outputs.logits):
            row.logits[-length:] = list(logits)
        lost = self.windowed and outputs[CACHE] is not self.cache  # read before the window kept its past
        self._keep(outputs[CACHE])
        self.croppable += 0 if lost else length
        self.pending = rest
        compare(self.bank, self.kind, self.rows)

    def generate(self, mode: str, steps: int, given: Slots | None, mask: Mask | None) -> None:
        """The pending text and new tokens through `generate`."""
        single = self.length and (self.stateful or self.cache_kind == "static")  # whose text cannot be repeated
        copies = self.rng.randint(1, 3) if mode == "sample" and not single else 1
        options: dict[str, Any] = {"do_sample": mode == "sample", "num_return_sequences": copies}
        if mode == "lookup":
            options["prompt_lookup_num_tokens"] = self.rng.randint(2, 4)
        elif mode == "chunks":
            options["prefill_chunk_size"] = self.rng.randint(2, 4)
        whole = [row.tokens + new for row, new in zip(self.rows, self.pending)]
        ids = self.pending if mode == "new_only" else whole
        padded = any(0 in row for row in ids)  # the padding id was generated
        inputs = self.inputs(ids, given, mask, mode == "new_only" or self.rng.random() < 0.3 or padded)
        self.note(f"generate {mode} {steps} after {whole}", given, inputs)
        if self.length and copies > 1:
            self.cache.batch_repeat_interleave(copies)  # `generate` repeats the new text, and no text in a cache
        torch.manual_seed(self.rng.randrange(1000))
        asked = {"cache": self.cache, "return_dict_in_generate": True, "output_logits": True, "max_new_tokens": steps}
        outputs = self.model.generate(**inputs, **options, **asked)
        new = outputs.sequences[:, len(ids[0]) :].tolist()
        assert all(len(row) == steps for row in new)

        self.place_images(given)
        self.read(self.pending, mask)
        self.rows = [row.copy() for row in self.rows for _ in range(copies)]
        self.repeats *= copies
        for step, logits in enumerate(outputs.logits):
            if step:
                self.read([row[step - 1 : step] for row in new])
            for row, values in zip(self.rows, logits):
                row.logits[-1] = values
        if mode != "sample":
            for tokens, logits in zip(zip(*new), outputs.logits):
                best = logits.max(-1).values - logits[range(len(tokens)), list(tokens)]
                assert best.max() <= TOLERANCE, f"tokens {tokens} are not the likeliest"
        compare(self.bank, self.kind, self.rows)
        assert self.length == len(whole[0]) + steps - 1
        self.pending = [row[-1:] for row in new]
        self._keep(outputs[CACHE])
        self.croppable = 0 if self.windowed else self.length

    def _keep(self, cache: EncoderDecoderCache) -> None:
        """Lets windows keep what a crop may bring back, where transformers can read on without a crop."""
        if cache is not self.cache:
            self.cache, self.croppable = cache, 0
            if self.windowed and has("activate_past_recording"):
                cache.activate_past_recording()

    def looks_like_all_text(self) -> bool:
        """Whether the new text has as many markers as the call has images, some of which are in the cache. Such a call
        is refused: one that sends a whole conversation again, without its cache, looks the same.
        """
        if self.given is None or not self.comes_again(self.given):
            return False
        images = [sum(image.real for image in row) for row in self.given for _ in range(self.repeats)]
        return any(tokens.count(MARKER) == count for tokens, count in zip(self.pending, images))

    # --- turns

    def hold(self) -> None:
        """The whole conversation."""
        rng, plan = self.rng, self.plan
        turns = rng.randint(1, 3) if plan.whole < 1 else rng.randint(2, 3)
        for number in range(turns):
            self.turn(last=number == turns - 1)
            if self.cache is not None and rng.random() < plan.take:
                self.take_away(rng.choice(plan.takes))
        if self.cache is not None:
            self.add_text(rng.randint(1, 2), [rng.randint(0, 1) for _ in self.rows])
            self.read_pieces(None)

    def turn(self, last: bool) -> None:
        """Images, text, and one way to read them."""
        rng = self.rng
        if not self.num_slots and self.cache_kind != "encoded":
            self.repeats = 1  # the first images decide who shares them
        given, new = self.draw_given()
        fresh = self.cache is None or not (self.num_slots or self.length or self.cache_kind == "encoded")
        if given is not None and (self.cache_kind == "encoded" and self.cache is None or rng.random() < 0.1):
            self.encode(given)
            given, fresh = None, False
        mode = rng.choice([mode for mode in self.plan.modes if self.possible(mode, last, given)])
        markers = [count for count in new for _ in range(self.repeats)]
        if not fresh or mode == "forward" or self.rule == "all":
            if rng.random() < self.plan.few:
                markers = [rng.randint(0, count) for count in markers]
            else:
                markers = [max(0, count + rng.choice([0, 0, 0, -1, 1])) for count in markers]
        if mode != "forward" and given is None and not (self.num_slots or self.length):
            markers = [0] * len(markers)  # `generate` refuses a first text with markers and no image
        self.add_text(max([*markers, rng.randint(2, 8)]) + 1, markers)
        fixed = self.bank.name == "bloom" and self.cache_kind == "static"  # whose `forward` takes no padding
        if not self.length and (not self.stateful or last) and not fixed and rng.random() < 0.4:
            self.pad_left()
        if mode == "forward":
            return self.read_pieces(given)
        past, length, mask = self.length, len(self.pending[0]), None
        if rng.random() < self.plan.explicit:
            whole = rng.random() < self.plan.whole
            mask = self.draw_mask(given, past + length if whole else length, past if whole else 0)
        self.generate(mode, rng.randint(3, 5), given, mask)

    def possible(self, mode: str, last: bool, given: Slots | None) -> bool:
        """Whether transformers can decode so, and whether there is anything to see."""
        if mode == "forward":
            return True
        if mode == "chunks" and not has("prefill_chunk_size") and self.length:
            return False
        if self.stateful:
            return mode in ("greedy", "sample")
        if mode == "lookup":  # with text in the cache transformers reads that text again
            return len(self.rows) == 1 and self.cache_kind != "static" and not self.length
        return mode != "new_only" or self.length > 0

    def add_text(self, length: int, markers: list[int]) -> None:
        for row, count in zip(self.pending, markers):
            row += draw_text(self.rng, length, count)

    def pad_left(self) -> None:
        """Shorter prompts, padded at their start, where they hold no marker."""
        for row, tokens in zip(self.rows, self.pending):
            before = tokens.index(MARKER) if MARKER in tokens else len(tokens) - 1
            row.left = self.rng.randint(0, min(before, 3))
            tokens[: row.left] = [0] * row.left

    def read_pieces(self, given: Slots | None) -> None:
        """The pending text through `forward`, in pieces."""
        rng = self.rng
        while self.pending[0]:
            left = 0 if self.length else max(row.left for row in self.rows)
            length = max(rng.randint(1, len(self.pending[0])), left + 1)  # no piece of padding alone
            if self.bank.name in STEPWISE and self.length:
                length = 1
            if given is None and self.num_slots and (self.kind != "states3" or self.num_slots == 1):
                if rng.random() < 0.1:
                    given = [list(row.images) for row in self.image_rows]
            mask = self.draw_mask(given, length) if rng.random() < self.plan.explicit else None
            self.forward(length, given, mask)
            given = None

    def take_away(self, what: str) -> None:
        """Text cropped, or rows chosen, moved, multiplied."""
        rng, count = self.rng, self.repeats
        dynamic = self.cache_kind != "static" and not self.stateful  # the others have no such methods
        if what == "crop" and dynamic:
            most = min(self.croppable, self.length - 1 - max(row.left for row in self.rows))
            if most > 0:
                self.crop(rng.randint(1, most))
        elif what == "select" and dynamic:
            rows = [rng.randrange(len(self.rows)) for _ in range(rng.randint(1, 3))]
            self.cache.batch_select_indices(torch.tensor(rows))
            self._take(f"batch_select_indices {rows}", rows, 1)
        elif what == "reorder":  # within the text rows of an image row, as beams do
            rows = [index // count * count + rng.randrange(count) for index in range(len(self.rows))]
            self.cache.reorder_cache(torch.tensor(rows))
            self._take(f"reorder_cache {rows}", rows, count)
        elif what == "repeat" and dynamic and len(self.rows) <= 3:
            self.cache.batch_repeat_interleave(2)
            rows = [index for index in range(len(self.rows)) for _ in range(2)]
            self._take("batch_repeat_interleave 2", rows, count * 2)
        elif what == "reset" and self.cache_kind == "callers":
            self.log.append("reset")
            self.cache.reset()
            self.rows = [Row(self.rule) for _ in self.image_rows]
            self.pending, self.repeats, self.croppable = [[] for _ in self.rows], 1, 0

    def crop(self, count: int) -> None:
        self.log.append(f"crop {count}")
        try:
            self.cache.crop(-count)
        except RuntimeError as error:  # transformers' word for a sliding window that has dropped text
            raise Over from error
        for row in self.rows:
            row.crop(count)
        self.pending = [[] for _ in self.rows]
        self.croppable = 0 if self.windowed else self.croppable - count

    def _take(self, call: str, rows: list[int], repeats: int) -> None:
        self.log.append(call)
        self.rows = [self.rows[index].copy() for index in rows]
        self.pending = [list(self.pending[index]) for index in rows]
        self.repeats = repeats


@torch.no_grad()
def check(seed: int) -> None:
    """Holds the conversation of a seed.

    Raises:
        AssertionError: with all calls of the conversation, if one of them gives other logits than a forward without a
            cache.
    """
    theme = THEMES[seed % len(THEMES)]
    talk = Talk(random.Random(seed), PLANS[theme])
    try:
        talk.hold()
    except Over:
        pass
    except Exception as error:
        if "needs transformers" in str(error):  # what an older version cannot do is refused by name
            pytest.skip(str(error))
        if "in the new text for each image that has none yet" in str(error) and talk.looks_like_all_text():
            return
        steps = "\n".join(talk.log)
        raise AssertionError(f"seed {seed} ({theme}): {type(error).__name__}: {error}\n\n{steps}") from error
