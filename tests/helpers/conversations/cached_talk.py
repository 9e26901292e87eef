"""A conversation with a cached model, and beside it the rows that say what its text may see.

Every method makes one call through public names, and then compares its logits with one uncached forward over the text
so far (see `conversations.py`). What was called is noted in `log`, so that a failing seed can be read.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache, StaticCache

from helpers.conversations.conversations import (
    NUM_PICTURES,
    STATE_SPACE,
    STATE_TOKENS,
    TOLERANCE,
    WINDOWED,
    Bank,
    Boom,
    Explicit,
    Image,
    Over,
    Row,
    Seen,
    attention_mask,
    bank,
    beside_a_cache,
    check_beams,
    compare,
    describe,
    mask_inputs,
    raising,
)
from helpers.conversations.talk_rows import TakesAway
from hf_xattn.cache.image_cache import select_images
from hf_xattn.cache.xattn_cache import BROKEN
from hf_xattn.images.conversation import SEND
from hf_xattn.utils.transformers_api import CACHE, has


PART = "a part of the images in the cache, or in other slots"  # a call that must be refused
Slots = list[list[Image]]  # the images of each image row; all rows have as many


class Talk(TakesAway):
    """One conversation.

    Args:
        rng: decides everything that is random.
        decoder, rule: the model.
        kind (`"pixels"`, `"states"` or `"states3"`): how images are given; `"states3"` is one image a call, without an
            axis for images.
        cache_kind (`"returned"`, `"callers"`, `"static"` or `"encoded"`).
        image_rows, repeats (`int`): text rows are their product.
    """

    def __init__(
        self, rng: random.Random, decoder: str, rule: str, kind: str, cache_kind: str, image_rows: int, repeats: int
    ):
        self.rng, self.kind, self.cache_kind = rng, kind, cache_kind
        self.bank: Bank = bank(decoder, rule)
        self.model = self.bank.model
        self.rule, self.repeats = rule, repeats
        self.rows = [Row(rule) for _ in range(image_rows * repeats)]
        self.pending: list[list[int]] = [[] for _ in self.rows]
        self.cache: EncoderDecoderCache | None = None
        if cache_kind == "callers":
            self.cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        elif cache_kind == "static":
            static = StaticCache(config=self.model.config.text_config, max_cache_len=128)
            self.cache = EncoderDecoderCache(static, DynamicCache())
        self.original: EncoderDecoderCache | None = None  # of `encode_images`, to be asked again
        self.original_rows: list[Row] = []
        self.original_image_rows = 1
        self.own_masks = False  # the text rows of an image row have different padding
        self.croppable = 0
        self.images_at = -1  # tokens in front of the last images: after a crop to these, new images are refused
        self.log = [
            f"{decoder}, image_visibility={rule!r}, {kind}, {cache_kind} cache, {image_rows} image rows x {repeats} "
            "text rows"
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

    # --- images

    def draw_images(self, num_slots: int, padding: str, distinct: bool = True, hidden: bool = False) -> Slots:
        """New images, not in the cache. `padding`: `"none"`, `"images"`, `"tokens"` or `"both"`. `hidden`: all are
        padding images.
        """
        size = 16 if self.kind == "pixels" else STATE_TOKENS
        if self.kind == "states3":
            num_slots, size = 1, self.rng.randint(2, STATE_TOKENS)
        result = []
        for row in self.image_rows:
            there = {image.picture for image in row.images} if distinct else set()
            images = []
            for picture in self.rng.sample([p for p in range(NUM_PICTURES) if p not in there], num_slots):
                real = not hidden and (padding not in ("images", "both") or self.rng.random() < 0.6)
                mask = None
                if padding in ("tokens", "both"):
                    mask = tuple(index == 0 or self.rng.random() < 0.7 for index in range(size))
                images.append(Image(picture, size, real, mask))
            result.append(images)
        if not hidden and not any(image.real for images in result for image in images):
            first = result[0][0]
            result[0][0] = Image(first.picture, first.size, True, first.tokens)
        return result

    def relaid(self, given: Slots) -> Slots:
        """The same images with the padding images of each row at its end, as processors make them."""
        return [sorted(images, key=lambda image: not image.real) for images in given]

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

    def place_images(self, given: Slots, before: int = 0) -> None:
        """Notes what the cache must hold after these images were given. `before`: tokens that they came with."""
        again = self.beside(given)
        assert again is not None, "this conversation gives images that must be refused"
        self.images_at = self.length - before
        slots = self.num_slots if again else 0
        for number, images in enumerate(given):
            for row in self.rows[number * self.repeats : (number + 1) * self.repeats]:
                row.images += images[slots:]

    def encode(self, given: Slots, faulty: bool = False) -> None:
        """Images through `encode_images`, into a new cache or the one that is there."""
        inputs = self.image_inputs(given)
        self.log.append(f"encode_images{describe(given, inputs)}, {'append' if self.cache is not None else 'new'}")
        self.cache = self.call(lambda: self.model.encode_images(cache=self.cache, **inputs), faulty)
        self.place_images(given, before=1)
        if self.original is None and self.cache_kind == "encoded" and not self.length:
            if not self.stateful and self.rng.random() < 0.3:  # `select_images` knows no decoder, so makes no states
                self._select_image_rows()
            self.original, self.original_rows = self.cache, [row.copy() for row in self.rows]
            self.original_image_rows = len(self.image_rows)
            self._record(self.cache)

    def _select_image_rows(self) -> None:
        rows = [self.rng.randrange(len(self.image_rows)) for _ in self.image_rows]
        self.log.append(f"select_images {rows}")
        self.cache = select_images(self.cache, rows)
        self.rows = [self.image_rows[row].copy() for row in rows for _ in range(self.repeats)]

    # --- masks

    def can_be_explicit(self, given: Slots | None, axis: str) -> bool:
        """Whether a per-token mask says something that the rules here decide."""
        if given is None and not self.num_slots:
            return False
        if given is not None and any(image.tokens is not None for images in given for image in images):
            return False  # their padding needs the same argument
        return axis == "all" or not any(row.states and row.states[-1].held for row in self.rows)

    def explicit(self, given: Slots | None, axis: str, length: int, first: int = 0, form: str = "tokens") -> Explicit:
        """A random mask of `length` rows; the first `first` ones repeat what the text in the cache has seen.

        Args:
            given: the images of the call.
            axis (`"all"` or `"given"`): the images that the mask covers.
            form (`"tokens"`, `"images"` or `"tiles"`): `(B, T, N)`, `image_attention_mask` `(B, T, n)`, or `(B, T, n,
                1)`.
        """
        rows: list[list[Seen]] = []
        slots, numbers = self._slots(given, axis)
        representable = True
        for number, row in enumerate(self.rows):
            images = slots[number // self.repeats]
            seen_by_row: list[Seen] = []
            for step in range(length):
                seen: Seen = {}
                for index, image in zip(numbers, images):
                    flags = (False,) * image.size
                    if step < first:
                        flags = row.sees[step].get(index, flags)
                        representable &= flags == tuple(any(flags) and flag for flag in image.visible)
                    elif form == "tokens":
                        flags = tuple(self.rng.random() < 0.6 for _ in flags)
                    else:
                        flags = (self.rng.random() < 0.6,) * image.size
                    if index < self.num_slots and not (row.images[index].real or self.comes_again(given)):
                        flags = (False,) * image.size  # or the mask is refused
                    seen[index] = flags
                seen_by_row.append(seen)
            rows.append(seen_by_row)
        if form != "tokens" and (not representable or self.kind == "states3"):
            return self.explicit(given, axis, length, first)
        return Explicit(mask_inputs(rows, form), rows, f"{form} over {axis} images, {length} rows")

    def _slots(self, given: Slots | None, axis: str) -> tuple[Slots, list[int]]:
        """The images that a mask covers, and their numbers in the row."""
        if given is None:
            return [row.images for row in self.image_rows], list(range(self.num_slots))
        if self.comes_again(given):
            return given, list(range(len(given[0])))
        if axis == "given":
            return given, list(range(self.num_slots, self.num_slots + len(given[0])))
        both = [row.images + images for row, images in zip(self.image_rows, given)]
        return both, list(range(len(both[0])))

    def beside(self, given: Slots) -> bool | None:
        """Whether the call gives all images of the cache in their slots, or only new ones; None if it is refused."""
        return beside_a_cache(
            *(
                [[image.content for image in images] for images in rows]
                for rows in ([row.images for row in self.image_rows], given)
            )
        )

    def comes_again(self, given: Slots | None) -> bool:
        """Whether the call gives all images of the cache in their slots, with what of them is padding."""
        return given is not None and self.beside(given) is True

    def padding_inputs(self, rows: list[Row], what: str) -> dict[str, torch.Tensor]:
        """`image_mask` or a 2-D `cross_attention_mask` as these rows have it."""
        if what == "image_mask":
            return {what: torch.tensor([[image.real for image in row.images] for row in rows])}
        return {what: torch.tensor([[flag for image in row.images for flag in image.visible] for row in rows])}

    # --- calls

    def call(self, function: Callable[[], Any], faulty: bool = False) -> Any:
        """The call; `faulty`: it fails once first, and is made again."""
        if not faulty:
            return function()
        before = self._cached_text()
        with raising(self.model, self.rng) as raised:
            try:
                return function()
            except (Boom, KeyboardInterrupt):
                if not raised:
                    raise
        self.log.append(f"  {raised[0]}; again")
        try:
            return function()
        except ValueError as error:
            # What a layer overwrites in place cannot be taken back. A `generate` that failed has read its prompt, or
            # the first chunks of it, so that a mask has other rows than there is new text.
            longer = ("`input_ids` with the text in `cache`", "`cross_attention_mask`", "`attention_mask` of shape")
            refused = tuple(f"Expected {words}" for words in longer)
            over = str(error).startswith(refused) and self._cached_text() != before
            if str(error) == BROKEN:
                over = any(type(layer) is not DynamicLayer for layer in self.cache.self_attention_cache.layers)
            if over:
                raise Over from error
            raise

    def _cached_text(self) -> int:
        return 0 if self.cache is None else int(self.cache.get_seq_length())

    def must_raise(self, what: str, function: Callable[[], Any]) -> None:
        """A call that has no right answer; the error says which number is wrong, or which images to send."""
        self.log.append(f"  must be refused: {what}")
        try:
            function()
        except ValueError as error:
            assert re.search(r"\d", str(error)), f"the error names no numbers: {error}"
            assert what != PART or SEND in str(error), f"the error does not tell what to send: {error}"
            return
        raise AssertionError(f"no ValueError: {what}")

    def text_inputs(self, ids: list[list[int]], mask: bool = False) -> dict[str, torch.Tensor]:
        """Ids, and the attention mask of all the text where some of it is padding."""
        inputs = {"input_ids": torch.tensor(ids)}
        if mask or any(row.left for row in self.rows):
            inputs["attention_mask"] = attention_mask(self.rows, self.length + len(self.pending[0]))
        return inputs

    def read(self, tokens: list[list[int]], explicit: Explicit | None = None, skip: int = 0) -> None:
        """Notes that the model has read these tokens."""
        for number, (row, new) in enumerate(zip(self.rows, tokens)):
            for step, token in enumerate(new):
                row.read(token, None if explicit is None else explicit.rows[number][skip + step])

    def forward(
        self,
        length: int,
        given: Slots | None = None,
        explicit: Explicit | None = None,
        extra: dict[str, torch.Tensor] | None = None,
        faulty: bool = False,
        refuse: str | None = None,
    ) -> None:
        """The next `length` tokens of the pending text through `forward`."""
        ids = [row[:length] for row in self.pending]
        rest = [row[length:] for row in self.pending]
        self.pending = ids
        inputs = {**self.text_inputs(ids), **({} if given is None else self.image_inputs(given)), **(extra or {})}
        inputs |= {} if explicit is None else explicit.inputs
        self.log.append(f"forward {ids}{describe(given, inputs, explicit)}")
        if self.bank.name == "mamba" and self.length:  # which takes a mask as long as its ids
            inputs.pop("attention_mask", None)
        if "attention_mask" in inputs and self.bank.name not in ("bloom", "mamba"):  # as `generate` counts positions
            inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)[:, -length:]
        call = torch.no_grad()(lambda: self.model(cache=self.cache, use_cache=True, **inputs))
        if refuse:
            self.pending = [first + last for first, last in zip(ids, rest)]
            return self.must_raise(refuse, call)
        outputs = self.call(call, faulty)
        if given is not None:
            self.place_images(given)
        self.read(ids, explicit)
        for row, logits in zip(self.rows, outputs.logits):
            row.logits[-length:] = list(logits)
        lost = self.windowed and outputs[CACHE] is not self.cache  # read before the window kept its past
        self._keep(outputs[CACHE])
        self.croppable += 0 if lost else length
        self.pending = rest
        compare(self.bank, self.kind, self.rows)

    def generate(
        self,
        mode: str = "greedy",
        steps: int = 4,
        given: Slots | None = None,
        explicit: Explicit | None = None,
        extra: dict[str, torch.Tensor] | None = None,
        faulty: bool = False,
        refuse: str | None = None,
    ) -> None:
        """The pending text and new tokens through `generate`. `mode`: `"greedy"`, `"chunks"`, `"new_only"`, `"sample"`,
        `"lookup"`, `"beams"` (the cache is not kept) or `"uncached"` (the same; `given` are all images)."""
        options, copies = self.options("greedy" if refuse and self.length else mode)
        whole = [row.tokens + new for row, new in zip(self.rows, self.pending)]
        ids = self.pending if mode == "new_only" else whole
        prompt = len(whole[0])
        padded = any(0 in row for row in ids)  # the padding id was generated
        mask = mode == "new_only" or self.rng.random() < 0.3 or padded
        inputs = self.text_inputs(ids, mask) | options
        inputs |= {} if given is None else self.image_inputs(given)
        inputs |= {**(extra or {}), **({} if explicit is None else explicit.inputs)}
        self.log.append(f"generate {mode} {steps} after {whole}{describe(given, inputs, explicit)}")
        if mode != "uncached":
            inputs["cache"] = self.cache
        if refuse:
            return self.must_raise(refuse, lambda: self._generate(inputs, steps))
        if self.length and mode != "uncached" and copies > 1:
            self.cache.batch_repeat_interleave(copies)  # `generate` repeats the new text, and no text in a cache
        torch.manual_seed(self.rng.randrange(1000))
        outputs = self.call(lambda: self._generate(inputs, steps), faulty)
        new = outputs.sequences[:, len(ids[0]) :].tolist()
        assert all(len(row) == steps for row in new)

        rows, pending = self.rows, self.pending
        if mode == "uncached":
            self.rows = [row.unread() for row in rows]
            self.read(whole, explicit)
        else:
            if given is not None:
                self.place_images(given)
            self.read(pending, explicit, skip=0 if explicit is None else len(explicit.rows[0]) - len(pending[0]))
        if "num_beams" in options:
            check_beams(self.bank, self.kind, self.rows, new, options, steps)
            if mode != "uncached":
                raise Over
            self.rows = rows
            return
        if copies > 1:
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
        if mode == "uncached":
            self.rows = rows
            return
        assert self.length == prompt + steps - 1
        self.pending = [row[-1:] for row in new]
        self._keep(outputs[CACHE])
        self.croppable = 0 if self.windowed else self.length

    def options(self, mode: str) -> tuple[dict[str, Any], int]:
        """Arguments of `generate`, and how many text rows it makes of one."""
        single = self.length and (self.stateful or self.cache_kind == "static")  # whose text cannot be repeated
        if mode == "sample":
            copies = 1 if single else self.rng.randint(1, 3)
            return {"do_sample": True, "num_return_sequences": copies}, copies
        options: dict[str, Any] = {"do_sample": False}
        copies = 1
        if mode == "lookup":
            options["prompt_lookup_num_tokens"] = self.rng.randint(2, 4)
        elif mode == "chunks":
            options["prefill_chunk_size"] = self.rng.randint(2, 4)
        elif mode == "uncached":
            options["use_cache"] = False
        if (mode == "beams" and not single) or (mode == "uncached" and self.rng.random() < 0.3):
            copies = options["num_beams"] = self.rng.randint(2, 4)
            options["num_return_sequences"] = self.rng.randint(1, copies)
        return options, copies

    def _generate(self, inputs: dict[str, Any], steps: int):
        return self.model.generate(**inputs, return_dict_in_generate=True, output_logits=True, max_new_tokens=steps)

    def _keep(self, cache: EncoderDecoderCache) -> None:
        if cache is not self.cache:
            self.cache, self.croppable = cache, 0
            self._record(cache)

    def _record(self, cache: EncoderDecoderCache) -> None:
        """Lets windows keep what a crop may bring back, where transformers can read on without a crop."""
        if self.windowed and has("activate_past_recording"):
            cache.activate_past_recording()
