"""Blocks against image tokens in the prompt: the same decoder, the same tower, the same features.

python examples/benchmarks/against_llava.py [--hidden SIZE] [--images N ...] [--repeats N] [--questions] [--output FILE]

The peers are LLaVA's way, 576 tokens an image, and InternVL's, which compresses them four to one
(`image_token_peers.py`). The features of the images are given. The tower's time is a figure of its own: all sides need
it. Text and image tokens are random; the speed does not depend on them. All sides run in one dtype with `sdpa`, with
the same class of cache in a row, and in runs that take turns. Without bfloat16 arithmetic, `--dtype float32` is faster.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench import machine
from image_token_peers import IMAGE_TOKEN, TOKENS, TOWERS, build
from timing import DEVICE, seconds
from torch import nn
from transformers import Cache, EncoderDecoderCache, StaticCache

from hf_xattn.utils.transformers_api import CACHE


TEXT = 32  # tokens of the prompt, or of the system prompt in front of a question
STEPS = 8  # of one timed run of decode steps
QUESTIONS, QUESTION, ANSWER = 32, 16, 8  # their number, their tokens, the tokens of an answer
AT_ONCE = 8  # questions of a batch that holds the image for each of them


class Side:
    """One way to give images to the decoder.

    Args:
        model: of [`build`].
        features (`torch.Tensor`): `(1, images, 577, width)`, outputs of the tower.
        tokens (`int`): of an image in the prompt. 0: the model has blocks.
    """

    def __init__(self, model: Any, features: torch.Tensor, tokens: int = 0):
        self.model, self.features, self.tokens = model, features, tokens
        self.image_ids = torch.full((1, tokens * features.shape[1]), IMAGE_TOKEN, device=DEVICE)

    def ids(self, text: torch.Tensor) -> torch.Tensor:
        """The prompt: image tokens, then the text."""
        return torch.cat([self.image_ids.expand(len(text), -1), text], dim=1)

    def images(self, rows: int = 1) -> dict[str, torch.Tensor]:
        """The same images for each row."""
        if self.tokens:
            return {"pixel_values": self.features[0].repeat(rows, 1, 1)}
        return {"vision_features": self.features.expand(rows, -1, -1, -1)}

    def read(self, text: torch.Tensor) -> Any:
        """Reads images and text. Returns the cache."""
        return self.model(self.ids(text), **self.images(), use_cache=True, logits_to_keep=1)[CACHE]

    def generate(self, text: torch.Tensor, number: int, cache: Any = None) -> Any:
        """Generates a number of tokens after images and text, whose beginning may be in a cache. Returns the cache."""
        known = {CACHE: cache} if cache is not None else self.images(len(text))
        made = self.model.generate(
            self.ids(text),
            **known,
            max_new_tokens=number,
            min_new_tokens=number,
            do_sample=False,
            return_dict_in_generate=True,
            disable_compile=True,  # a static cache would start the compiler on a GPU
        )
        return made[CACHE]

    def static(self, cache: Any, room: int) -> Any:
        """A copy of a cache, with the text's keys and values in tensors that are not copied at every step."""
        text = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        static = StaticCache(config=self.model.config.get_text_config(), max_cache_len=text.get_seq_length() + room)
        for index, layer in enumerate(text.layers):
            static.update(layer.keys, layer.values, index)
        if text is cache:
            return static
        whole = copy.deepcopy(cache)
        whole.self_attention_cache = static
        return whole


def sides(ours: Any, peers: dict[str, Any], number: int) -> dict[str, Side]:
    """All sides with the same images."""
    width = ours.config.vision_config.hidden_size
    features = torch.randn(1, number, 577, width, device=DEVICE, dtype=ours.model.vision_tower.dtype)
    return {"ours": Side(ours, features), **{name: Side(peers[name], features, TOKENS[name]) for name in peers}}


def random_text(rows: int, length: int) -> torch.Tensor:
    return torch.randint(3, 1000, (rows, length), device=DEVICE)


def key_value_bytes(cache: Cache | EncoderDecoderCache) -> int:
    halves = (
        [cache.self_attention_cache, cache.cross_attention_cache] if isinstance(cache, EncoderDecoderCache) else [cache]
    )
    return sum(states.nbytes for half in halves for layer in half.layers for states in (layer.keys, layer.values))


def check(ours: Any, peers: dict[str, Any]) -> None:
    """All decoders are the same without an image. With one, all see it, also from a copied and from a static cache."""
    text, more = random_text(1, TEXT), random_text(1, QUESTION)
    whole = torch.cat([text, more], dim=1)
    blind = ours(whole).logits
    for name, side in sides(ours, peers, 1).items():
        assert torch.equal(side.model(whole).logits, blind), name
        seeing = side.model(side.ids(whole), **side.images()).logits[:, -1].float()
        changed = (blind[:, -1] - seeing).norm()
        assert seeing.isfinite().all() and changed > 0.01, (name, changed)
        kept = side.read(text)
        for cache in (copy.deepcopy(kept), side.static(kept, QUESTION)):
            rounding = (side.model(more, **{CACHE: cache}).logits[:, -1] - seeing).norm()
            assert rounding < changed / 2, (name, type(cache), changed, rounding)


def images(ours: Any, peers: dict[str, Any], number: int, repeats: int, tower: float) -> dict[str, dict]:
    """First token, decode step and cache bytes with a number of images in front of the text."""
    each = sides(ours, peers, number)
    text, kept = random_text(1, TEXT), {}

    def keep(name: str) -> None:
        kept[name] = each[name].generate(text, 1)

    first = seconds({name: lambda n=name: keep(n) for name in each}, repeats)
    sizes = {name: key_value_bytes(cache) for name, cache in kept.items()}
    rounds = 3 * repeats
    caches = {(name, "dynamic"): cache for name, cache in kept.items()}
    caches |= {(name, "static"): each[name].static(cache, STEPS * (rounds + 1)) for name, cache in kept.items()}

    def steps(key: tuple[str, str]) -> None:
        for _ in range(STEPS):
            each[key[0]].model(input_ids=text[:, :1], **{CACHE: caches[key]})

    times = seconds({key: lambda k=key: steps(k) for key in caches}, rounds)
    decode = {kind: {name: times[name, kind] / STEPS for name in each} for kind in ("dynamic", "static")}
    at = f"{number} image(s): "
    return {
        f"{at}first token": row(first, "ms", 1e3),
        f"{at}first token, with the tower": row({name: t + number * tower for name, t in first.items()}, "ms", 1e3),
        f"{at}decode step": row(decode["dynamic"], "ms", 1e3),
        f"{at}decode step, static caches": row(decode["static"], "ms", 1e3),
        f"{at}cache": row(sizes, "MB", 1e-6),
    }


def questions(ours: Any, peers: dict[str, Any], repeats: int) -> dict[str, dict]:
    """Questions about one image. What all have in common, image and system prompt, is read once and copied for each
    question; or each question brings it again.
    """
    each = sides(ours, peers, 1)
    system = random_text(1, TEXT)
    asked = torch.cat([system.expand(QUESTIONS, -1), random_text(QUESTIONS, QUESTION)], dim=1)
    prefixes = {name: side.read(system) for name, side in each.items()}
    static = {name: side.static(prefixes[name], QUESTION + ANSWER) for name, side in each.items()}
    kept: dict[str, Any] = {}

    def in_batch(name: str) -> None:
        cache = copy.deepcopy(prefixes[name])
        cache.batch_repeat_interleave(QUESTIONS)
        kept[name] = each[name].generate(asked, ANSWER, cache)

    def one(name: str, cache: Any = None) -> None:
        each[name].generate(asked[:1], ANSWER, copy.deepcopy(cache))

    def timed(run: Callable[[str], Any], rounds: int = repeats) -> dict[str, float]:
        return seconds({name: lambda n=name: run(n) for name in each}, rounds)

    again = timed(lambda name: each[name].generate(asked[:AT_ONCE], ANSWER), max(1, repeats // 3))
    rows = {
        "image and system prompt, read once": row(timed(lambda name: each[name].read(system)), "ms", 1e3),
        "32 questions in a batch, prefix kept": row(timed(in_batch), "ms", 1e3),
        "32 questions, nothing kept": row({n: t * QUESTIONS / AT_ONCE for n, t in again.items()}, "ms", 1e3),
        "one question, prefix kept": row(timed(lambda name: one(name, prefixes[name])), "ms", 1e3),
        "one question, prefix kept, static caches": row(timed(lambda name: one(name, static[name])), "ms", 1e3),
        "one question, nothing kept": row(timed(one), "ms", 1e3),
    }
    sizes = {name: key_value_bytes(cache) for name, cache in kept.items()}
    return {**rows, "32 questions in a batch, cache": row(sizes, "MB", 1e-6)}


def row(values: dict[str, float], unit: str, scale: float) -> dict[str, Any]:
    return {"unit": unit, **{name: value * scale for name, value in values.items()}}


def price(ours: Any, peers: dict[str, Any]) -> dict[str, float]:
    """Million parameters. The connector has the sizes of Llava's projector; the blocks come on top."""

    def million(module: nn.Module) -> float:
        return sum(weight.numel() for weight in module.parameters()) / 1e6

    llava = peers["Llava"]
    return {
        "decoder": million(llava.model.language_model) + million(llava.lm_head),
        "connector, ours": million(ours.model.connector),
        "blocks, ours": sum(million(block) for block in ours.model.blocks),
        **{f"projector, {name}": million(peer.model.multi_modal_projector) for name, peer in peers.items()},
    }


def tower_seconds(ours: Any, repeats: int) -> float:
    """The tower's time for an image."""
    pixels = torch.randn(1, 3, 336, 336, device=DEVICE, dtype=ours.model.vision_tower.dtype)
    return seconds({"tower": lambda: ours.model.vision_tower(pixels)}, repeats)["tower"]


def markdown_line(name: str, figure: dict[str, Any]) -> str:
    sizes = [f"{figure[side]:.1f} {figure['unit']}" for side in ("ours", *TOKENS)]
    ratios = [f"{figure[peer] / figure['ours']:.2f}" for peer in TOKENS]
    marked = [f"**{ratio}**" if float(ratio) < 1 else ratio for ratio in ratios]
    return f"| {' | '.join([name, *sizes, *marked])} |"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, choices=TOWERS, default=1024, help="hidden size (default: 1024)")
    parser.add_argument("--images", type=int, nargs="*", default=[1, 4, 16], help="images a prompt (default: 1 4 16)")
    parser.add_argument("--questions", action="store_true", help="also 32 questions about one image")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds, after one that is not (default: 5)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: bfloat16")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()
    ours, peers = build(arguments.hidden, getattr(torch, arguments.dtype))
    check(ours, peers)
    parameters = price(ours, peers)
    for name, number in parameters.items():
        print(f"parameters, million: {name:<24} {number:8.1f}", flush=True)
    tower = tower_seconds(ours, arguments.repeats)
    print(f"tower, an image: {tower * 1e3:.0f} ms\n")
    print(f"| | ours | {' | '.join(TOKENS)} | {' | '.join(f'{name} / ours' for name in TOKENS)} |")
    print(f"|---{'|---' * (1 + 2 * len(TOKENS))}|", flush=True)
    figures: dict[str, dict] = {}

    def report(made: dict[str, dict]) -> None:
        figures.update(made)
        for name, figure in made.items():
            print(markdown_line(name, figure), flush=True)

    for number in arguments.images:
        report(images(ours, peers, number, arguments.repeats, tower))
    if arguments.questions:
        report(questions(ours, peers, arguments.repeats))
    made = {
        "machine": machine(),
        "dtype": arguments.dtype,
        "million parameters": parameters,
        "tower, seconds": tower,
        "figures": figures,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(made, indent=2) + "\n")
    print(json.dumps(machine()))


if __name__ == "__main__":
    main()
