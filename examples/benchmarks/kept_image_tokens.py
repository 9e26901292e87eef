"""What `keep_image_tokens` costs in accuracy, and what it saves.

python examples/benchmarks/kept_image_tokens.py accuracy OUTPUT [--count N]
python examples/benchmarks/kept_image_tokens.py speed [--tokens N ...] [--repeats N] [--quick]

OUTPUT is the folder of a finished `hf-xattn demo`, with or without `--language-model`. The questions are about held-out digits. Beside the
tokens that the package chooses, as many are kept by the sum of attention over the text, as published, and as many by chance. `speed` takes a
model of random weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import DEVICE, seconds
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, LlamaConfig
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

import hf_xattn
from hf_xattn.demo.canvases import PROMPT, WORDS, DigitPool, picture_of
from hf_xattn.demo.language_scores import answers, held_out_questions, is_right
from hf_xattn.layers import attention


SHARES = (1.0, 0.75, 0.5, 0.25, 0.1)


def sums_over_the_text(query, key, mask, counted, *, group, scaling, position_bias, null_key) -> torch.Tensor:
    """What Lee et al. (2025) rank by, in place of `importance`: `(R, heads, N)`. For small models: all weights exist at a time."""
    scores = (query @ key.transpose(-1, -2)).float() * scaling
    positions = query.shape[2] // group
    if mask is not None:
        scores = scores.masked_fill(~(mask.repeat_interleave(group, 2) if mask.shape[2] == positions else mask), -1e9)
    weights = scores.softmax(dim=-1).unflatten(2, (positions, group))
    if counted is not None:
        weights = weights.masked_fill(~counted[:, None, :, None, None], 0)
    return weights.sum(dim=2).flatten(1, 2)


def chance(query, key, *others: Any, group: int, **more: Any) -> torch.Tensor:
    """The same order of tokens for all heads, by chance."""
    order = torch.rand(query.shape[0], 1, key.shape[2], generator=torch.Generator().manual_seed(0)).to(query.device)
    return order.expand(-1, query.shape[1] * group, -1)


@contextmanager
def tokens_by(rule: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Inside, a rule chooses the tokens in place of the package's own."""
    own, attention.importance = attention.importance, rule
    try:
        yield
    finally:
        attention.importance = own


class Asked:
    """The demo's test. `share` is what every `generate` keeps.

    Args:
        output (`Path`): the demo's folder.
        count (`int`): canvases of the small demo; questions of each kind of the one with a language model.
        seed (`int`): of the questions. The demo's own are those of seed 0, as the split of the digits.
    """

    def __init__(self, output: Path, count: int, seed: int):
        self.model = AutoModelForImageTextToText.from_pretrained(output / "model").eval().to(DEVICE)
        self.processor = AutoProcessor.from_pretrained(output / "model")
        self.generate, self.share, self.last = self.model.generate, 1.0, None
        self.model.generate = self._generate
        pool = DigitPool(held_out=True, seed=0)
        self.questions = held_out_questions(pool, count, False, seed) if (output / "adapter").is_dir() else None
        rng = np.random.default_rng((seed, 3))
        self.canvases = [pool.canvas(rng) for _ in range(count)]

    def _generate(self, **inputs: Any) -> torch.Tensor:
        made = self.generate(**inputs, keep_image_tokens=self.share, return_dict_in_generate=True)
        self.last = made.past_key_values
        return made.sequences

    @property
    def kept(self) -> str:
        """Tokens of an image in later blocks, of all; and the bytes of all keys and values, of one row."""
        layers = self.last.cross_attention_cache.layers
        size = sum(part.nbytes for layer in layers for part in (layer.keys, layer.values)) // layers[0].keys.shape[0]
        return f"{layers[-1].keys.shape[2]} of {layers[0].keys.shape[2]} | {size / 1000:.1f} kB"

    @torch.no_grad()
    def right(self) -> float:
        """The share of right digits, or of right answers."""
        if self.questions is not None:
            said = answers(self.model, self.processor, self.questions)
            return sum(map(is_right, self.questions, said)) / len(said)
        pictures = [picture_of(canvas) for canvas in self.canvases]
        inputs = self.processor(text=[PROMPT] * len(pictures), images=pictures).to(self.model.device)
        tokens = self.model.generate(**inputs, max_new_tokens=8, do_sample=False)[:, inputs["input_ids"].shape[1] :]
        texts = self.processor.batch_decode(tokens, skip_special_tokens=True)
        pairs = [
            (word, WORDS[digit])
            for text, canvas in zip(texts, self.canvases)
            for word, digit in zip([*text.split()[1::2], *"???"], canvas.digits)
        ]
        return sum(word == digit for word, digit in pairs) / len(pairs)


def accuracy(output: Path, count: int, seed: int) -> None:
    asked = Asked(output, count, seed)
    print(
        "| share kept | tokens in later blocks | keys and values of an image | right | by sums over the text | by chance |"
    )
    print("|---|---|---|---|---|---|")
    for share in SHARES:
        asked.share = share
        right, kept, others = asked.right(), asked.kept, []
        for rule in (sums_over_the_text, chance):
            with tokens_by(rule):
                others.append(f"{asked.right():.1%}")
        print(f"| {share} | {kept} | {right:.1%} | {' | '.join(others)} |", flush=True)


def random_model(width: int) -> Any:
    """16 layers and 4 blocks, in bfloat16."""
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=32000,
    )
    text = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    return hf_xattn.retrofit(text, cross_attention={"zero_init": False, "gate_init": 1.0}).eval().to(DEVICE)


@torch.no_grad()
def speed(tokens: list[int], repeats: int, width: int = 1024) -> None:
    model = random_model(width)
    text = torch.randint(10, 1000, (1, 32), device=DEVICE)
    print("| image tokens | share kept | keys and values | first token, of all tokens' time | decode step, likewise |")
    print("|---|---|---|---|---|")
    for count in tokens:
        states = torch.randn(1, count, width, dtype=torch.bfloat16, device=DEVICE)
        caches: dict[float, EncoderDecoderCache] = {}

        def first(share: float, states: torch.Tensor = states, caches: dict = caches) -> None:
            caches[share] = EncoderDecoderCache(DynamicCache(), DynamicCache())
            model(
                text,
                cross_attention_states=states,
                past_key_values=caches[share],
                keep_image_tokens=share,
                logits_to_keep=1,
            )

        def steps(share: float, caches: dict = caches) -> None:
            for _ in range(8):
                model(text[:, -1:], past_key_values=caches[share])

        prefill = seconds({str(share): lambda share=share: first(share) for share in SHARES}, repeats)
        step = seconds({str(share): lambda share=share: steps(share) for share in SHARES}, repeats)
        for share in SHARES:
            layers = caches[share].cross_attention_cache.layers
            size = sum(part.nbytes for layer in layers for part in (layer.keys, layer.values))
            ratios = [times[str(share)] / times["1.0"] for times in (prefill, step)]
            print(f"| {count} | {share} | {size / 1e6:.1f} MB | {ratios[0]:.2f} | {ratios[1]:.2f} |", flush=True)
        print(f"(all tokens: {prefill['1.0'] * 1000:.0f} ms, {step['1.0'] * 1000 / 8:.1f} ms a step)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    of_accuracy = commands.add_parser("accuracy")
    of_accuracy.add_argument("output", type=Path)
    of_accuracy.add_argument("--count", type=int, default=500, help="canvases, or questions of each kind")
    of_accuracy.add_argument("--seed", type=int, default=1)
    of_speed = commands.add_parser("speed")
    of_speed.add_argument("--tokens", type=int, nargs="+", default=[1601, 6404])
    of_speed.add_argument("--repeats", type=int, default=5)
    of_speed.add_argument("--quick", action="store_true", help="a small model, as a test: the times mean nothing")
    arguments = parser.parse_args()
    if arguments.command == "accuracy":
        accuracy(arguments.output, arguments.count, arguments.seed)
    elif arguments.quick:
        speed([64], repeats=1, width=64)
    else:
        speed(arguments.tokens, arguments.repeats)


if __name__ == "__main__":
    main()
