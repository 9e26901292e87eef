"""What each text token of a conversation may see, decided one token at a time in plain Python.

The expected side of `test_cache_fuzz.py`. It holds the rules a second time, as lists, without caches and without the
code under test: a row is its tokens, its images, and for each token the image tokens that it saw when it was read. One
uncached forward with that as an explicit mask gives the logits that every cached way to read the same text must give.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from helpers.models.tiny_architectures import tiny_config
from helpers.models.tiny_models import TEXT_CONFIGS, make_text, randomize, strengthen, vision_config
from hf_xattn import XAttnConfig, XAttnForConditionalGeneration


MARKER = 3
TOLERANCE = 1e-4
DECODERS = ("llama", "mistral", "gemma3", "bloom", "mamba", "falcon_h1", "bamba", "jamba", "mixtral")
STATE_SPACE = ("mamba", "falcon_h1", "bamba", "jamba")
STEPWISE = ("mamba", "jamba")  # whose `forward` reads one token at a time where it has read some
WINDOWED = ("mistral", "gemma3")
NUM_PICTURES = 24
STATE_TOKENS = 4

Seen = dict[int, tuple[bool, ...]]  # number of an image -> which of its tokens


@dataclass(frozen=True)
class Image:
    """One image of one row: which picture, how many tokens it has, and what of it is padding."""

    picture: int
    size: int
    real: bool = True
    tokens: tuple[bool, ...] | None = None

    @property
    def visible(self) -> tuple[bool, ...]:
        return tuple(self.real and (self.tokens is None or self.tokens[index]) for index in range(self.size))

    @property
    def content(self) -> tuple[int, int] | None:
        """What a cache compares; None for padding."""
        return (self.picture, self.size) if self.real else None

    def __str__(self) -> str:
        mask = "" if self.tokens is None else ":" + "".join(str(int(token)) for token in self.tokens)
        return (f"p{self.picture}" if self.real else f"(p{self.picture})") + mask


class State(NamedTuple):
    """What the text so far leaves behind for the text that follows.

    Attributes:
        counted: image markers that count.
        before: counted markers before the latest run of adjacent ones.
        in_run: the last token is a counted marker.
        held: what the last row of an explicit mask allows, for the images that it covered.
    """

    counted: int = 0
    before: int = 0
    in_run: bool = False
    held: Seen = {}


@dataclass
class Row:
    """One row of text, of which the first `left` tokens are padding, and its images."""

    rule: str
    left: int = 0
    images: list[Image] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    sees: list[Seen] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    logits: list[torch.Tensor | None] = field(default_factory=list)

    def copy(self) -> Row:
        lists = (self.images, self.tokens, self.sees, self.states, self.logits)
        return Row(self.rule, self.left, *(list(entries) for entries in lists))

    def unread(self) -> Row:
        """The same images, no text."""
        return Row(self.rule, self.left, list(self.images))

    @property
    def real(self) -> list[tuple[int, int]]:
        """The images that are no padding, by content."""
        return [(image.picture, image.size) for image in self.images if image.real]

    def read(self, token: int, explicit: Seen | None = None) -> None:
        """One more token. `explicit`: the row of the caller's own mask, for the images that it covers."""
        counted, before, in_run, held = self.states[-1] if self.states else State()
        if token == MARKER and counted < len(self.real):
            before = before if in_run else counted
            counted, in_run = counted + 1, True
            held = held if self.rule == "all" else {}
        else:
            in_run = False
        decided = {**held, **(explicit or {})}
        seen: Seen = {}
        order = 0
        for index, image in enumerate(self.images):
            order += image.real
            allowed = decided.get(index, (self._rule(order, counted, before),) * image.size)
            seen[index] = tuple(a and b for a, b in zip(allowed, image.visible))
        self.tokens.append(token)
        self.sees.append(seen)
        self.states.append(State(counted, before, in_run, decided))
        self.logits.append(None)

    def _rule(self, order: int, counted: int, before: int) -> bool:
        if self.rule == "all":
            return True
        if self.rule == "previous":
            return order <= counted
        if self.rule == "latest":
            return order == counted
        return before < order <= counted

    def crop(self, count: int) -> None:
        """Takes the last `count` tokens back."""
        for entries in (self.tokens, self.sees, self.states, self.logits):
            del entries[len(entries) - count :]


def beside_a_cache(cached: list[list], given: list[list]) -> bool | None:
    """Whether a call gives all images of a cache in their slots, or only new ones. None: neither, which is an error.

    Args:
        cached, given: row by row the content of each slot, None for padding.
    """
    if all(there == images[: len(there)] for there, images in zip(cached, given)):
        return True
    known = any(image is not None and image in there for there, images in zip(cached, given) for image in images)
    return None if known else False


@dataclass
class Bank:
    """A model, and pictures with the features that it makes of them."""

    name: str
    rule: str
    model: XAttnForConditionalGeneration
    pixels: torch.Tensor  # (pictures, channels, height, width)
    features: torch.Tensor  # (pictures, tokens, width)
    states: torch.Tensor  # (pictures, tokens, width), of the kinds without a tower

    def features_of(self, kind: str, image: Image) -> torch.Tensor:
        return (self.features if kind == "pixels" else self.states)[image.picture, : image.size]


@functools.cache
def bank(name: str, rule: str) -> Bank:
    """A tiny model whose blocks matter, and which writes image markers now and then."""
    if name in TEXT_CONFIGS:
        text = make_text(name)
    else:
        torch.manual_seed(0)
        text = strengthen(AutoModelForCausalLM.from_config(tiny_config(name)).eval())
    torch.manual_seed(2)
    config = XAttnConfig(
        text_config=text.config,
        vision_config=vision_config(),
        cross_attention_layers=[1, 3],
        image_token_id=MARKER,
        image_visibility=rule,
    )
    model = randomize(XAttnForConditionalGeneration(config, text_model=text).eval())
    model.get_output_embeddings().weight.data[MARKER] *= 2.5
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    generator = torch.Generator().manual_seed(5)
    pixels = torch.randn(NUM_PICTURES, 3, 32, 32, generator=generator)
    states = torch.randn(NUM_PICTURES, STATE_TOKENS, config.text_config.hidden_size, generator=generator)
    with torch.no_grad():
        features = model.get_image_features(pixels[None])
    features = getattr(features, "pooler_output", features)
    return Bank(name, rule, model, pixels, features.reshape(NUM_PICTURES, -1, features.shape[-1]), states)


def mask_inputs(rows: list[list[Seen]], form: str) -> dict[str, torch.Tensor]:
    """A mask of what each text token of each row sees: of `form` `"tokens"`, `"images"` or `"tiles"`."""
    if form == "tokens":
        flags = [[[f for image in seen.values() for f in image] for seen in row] for row in rows]
        return {"cross_attention_mask": torch.tensor(flags)}
    mask = torch.tensor([[[any(image) for image in seen.values()] for seen in row] for row in rows])
    if form == "images":
        return {"image_attention_mask": mask}
    return {"cross_attention_mask": mask[..., None]}


def attention_mask(rows: list[Row], length: int) -> torch.Tensor:
    """`(batch, length)`, zero over the padding of the text."""
    return torch.tensor([[step >= row.left for step in range(length)] for row in rows]).long()


@torch.no_grad()
def reference_logits(bank: Bank, kind: str, rows: list[Row]) -> torch.Tensor:
    """`(batch, text_len, vocab)` of one uncached forward, each token seeing what its row says."""
    inputs = {}
    length = max(sum(image.size for image in row.images) for row in rows)
    if length:
        width = bank.features.shape[-1]
        states = torch.zeros(len(rows), length, width)
        mask = torch.zeros(len(rows), len(rows[0].tokens), length, dtype=torch.bool)
        for states_of_row, mask_of_row, row in zip(states, mask, rows):
            start = 0
            for index, image in enumerate(row.images):
                states_of_row[start : start + image.size] = bank.features_of(kind, image)
                nothing = (False,) * image.size
                mask_of_row[:, start : start + image.size] = torch.tensor([s.get(index, nothing) for s in row.sees])
                start += image.size
        inputs = {"cross_attention_states": states, "cross_attention_mask": mask}
    if any(row.left for row in rows):
        inputs["attention_mask"] = attention_mask(rows, len(rows[0].tokens))
    return bank.model(torch.tensor([row.tokens for row in rows]), use_cache=False, **inputs).logits


def compare(bank: Bank, kind: str, rows: list[Row]) -> None:
    """Every noted logit against the reference.

    Raises:
        AssertionError: with the rows and tokens that differ, and what they should have seen.
    """
    if not rows[0].tokens:
        return
    expected = reference_logits(bank, kind, rows)
    wrong = []
    for number, row in enumerate(rows):
        for step, logits in enumerate(row.logits):
            if logits is None or step < row.left:
                continue
            wanted = expected[number, step]
            difference = (logits - wanted).abs().max().item() / max(1.0, wanted.abs().max().item())
            if not difference <= TOLERANCE:
                seen = {str(row.images[i]): "".join(str(int(t)) for t in s) for i, s in row.sees[step].items()}
                wrong.append(
                    f"row {number}, token {step} (id {row.tokens[step]}): off by {difference:.1e}, sees {seen}"
                )
    assert not wrong, "logits differ from one uncached forward:\n  " + "\n  ".join(wrong[:6])


def beam_search(
    bank: Bank, kind: str, rows: list[Row], num_beams: int, steps: int
) -> tuple[list[list[list[int]]], float]:
    """New tokens of the best `num_beams` beams of each row, best first, and the narrowest decision on the way."""
    beams = [[(0.0, row, [])] for row in rows]
    margin = float("inf")
    for step in range(steps):
        flat = [entry for sample in beams for entry in sample]
        if step:
            flat = [(score, row.copy(), new) for score, row, new in flat]
            for _, row, new in flat:
                row.read(new[-1])
        scores = reference_logits(bank, kind, [row for _, row, _ in flat])[:, -1].log_softmax(-1).tolist()
        choices = [
            [(score + value, row, [*new, token]) for token, value in enumerate(values)]
            for (score, row, new), values in zip(flat, scores)
        ]
        start, best = 0, []
        for sample in beams:
            ranked = sorted(sum(choices[start : start + len(sample)], []), key=lambda entry: -entry[0])
            cuts = range(num_beams) if step == steps - 1 else [num_beams - 1]
            margin = min([margin, *(ranked[cut][0] - ranked[cut + 1][0] for cut in cuts)])
            start += len(sample)
            best.append(ranked[:num_beams])
        beams = best
    return [[new for _, _, new in sample] for sample in beams], margin


class Boom(RuntimeError):
    """Raised by a hook of this test."""


class Over(Exception):
    """The conversation cannot go on, and that is right."""


@dataclass
class Explicit:
    """A caller's own mask: the argument, and row by row what it allows."""

    inputs: dict[str, torch.Tensor]
    rows: list[list[Seen]]
    name: str = ""


@contextmanager
def raising(model: torch.nn.Module, rng: random.Random) -> Iterator[list[str]]:
    """The first call of a random submodule raises after its work is done. Yields what raised."""
    layers = [module for module in model.modules() if hasattr(module, "cross_attention_block")]
    layers += [model.get_output_embeddings(), model.get_input_embeddings()]
    parts = [getattr(block.attn, f"{name}_proj") for block in model.blocks for name in "qkvo"]
    module = rng.choice(rng.choice([layers, list(model.blocks), parts]))
    kind = rng.choice([Boom, KeyboardInterrupt])
    name = next(name for name, other in model.named_modules() if other is module)
    raised: list[str] = []

    def hook(*_):
        if not raised:
            raised.append(f"{kind.__name__} in {name}")
            raise kind(name)

    handle = module.register_forward_hook(hook)
    try:
        yield raised
    finally:
        handle.remove()


def draw_text(rng: random.Random, length: int, markers: int) -> list[int]:
    """Random ids with so many image markers, alone or in runs; few different ids make prompt lookup find something."""
    alphabet = rng.choice([range(4, 96), range(4, 10)])
    words = [rng.choice(alphabet) for _ in range(length)]
    markers = min(markers, length)
    if rng.random() < 0.4:
        start = rng.randrange(length - markers + 1)
        places = list(range(start, start + markers))
    else:
        places = rng.sample(range(length), markers)
    for place in places:
        words[place] = MARKER
    place = min(places, default=0)
    if 0 < place and words[-1] != MARKER and rng.random() < 0.4:
        words[-1] = words[place - 1]  # prompt lookup proposes a marker next
    return words


def check_beams(
    bank: Bank, kind: str, rows: list[Row], new: list[list[int]], options: dict[str, Any], steps: int
) -> None:
    """The tokens of a beam search without a cache, unless two beams are nearly equally likely."""
    count = options["num_return_sequences"]
    expected, margin = beam_search(bank, kind, rows, options["num_beams"], steps)
    if margin > TOLERANCE / 10:
        wanted = [tokens for sample in expected for tokens in sample[:count]]
        assert new == wanted, f"beams {new}, a search without a cache finds {wanted}"


def describe(given: list[list[Image]] | None, inputs: dict[str, Any], explicit: Explicit | None = None) -> str:
    """A call's arguments, for the log."""
    images = "" if given is None else ", images " + str([[str(image) for image in images] for images in given])
    shapes = [f"{name} {tuple(value.shape)}" for name, value in inputs.items() if isinstance(value, torch.Tensor)]
    own = "" if explicit is None else f", own mask: {explicit.name}"
    return f"{images}; {', '.join(shapes)}{own}"
