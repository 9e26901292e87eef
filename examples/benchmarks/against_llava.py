"""Blocks against image tokens in the prompt (LLaVA's way): the same decoder, the same projector, the same features.

python examples/benchmarks/against_llava.py [--hidden SIZE] [--images N ...] [--repeats N] [--questions] [--output FILE]

The features of the images are given. The tower's time is a figure of its own: both sides need it. Text and image
tokens are random; the speed does not depend on them. Both sides run in bfloat16 with `sdpa`, in runs that take turns.
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
from peers import VOCABULARY
from timing import DEVICE, seconds
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Cache,
    CLIPVisionConfig,
    CLIPVisionModel,
    DynamicCache,
    EncoderDecoderCache,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    StaticCache,
)
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import BaseModelOutputWithPooling

from hf_xattn import retrofit


LAYERS, BLOCKS = 16, [3, 7, 11, 15]
IMAGE_TOKEN = VOCABULARY - 1
TEXT = 32  # tokens of the prompt, beside the image
STEPS = 8  # of one timed run of decode steps
QUESTIONS, QUESTION, ANSWER = 32, 16, 8  # their number, their tokens, the tokens of an answer
AT_ONCE = 8  # questions of a batch that holds the image for each of them
# the tower beside a hidden size. All make 576 tokens of an image, and a class token that both sides leave out.
TOWERS = {
    64: {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 128},
    **dict.fromkeys(
        (1024, 2048),  # CLIP ViT-L/14-336
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    ),
}


class GivenFeatures(nn.Module):
    """A tower that returns what it gets."""

    def forward(self, features: torch.Tensor, **kwargs) -> BaseModelOutputWithPooling:
        return BaseModelOutputWithPooling(last_hidden_state=features, hidden_states=(features,))


def both(hidden: int) -> tuple[Any, Any]:
    """A decoder with blocks, and transformers' Llava over a copy of the decoder. The connector's weights are the
    projector's.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=hidden // 64,
        num_key_value_heads=min(8, hidden // 64),
        intermediate_size=4 * hidden,
        vocab_size=VOCABULARY,
        max_position_embeddings=2**15,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    vision_config = CLIPVisionConfig(image_size=336, patch_size=14, **TOWERS[hidden])
    with no_init_weights():  # slow for a large decoder; `fill` is fast
        text = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        tower = CLIPVisionModel._from_config(vision_config, dtype=torch.bfloat16, attn_implementation="sdpa")
    fill(text)
    fill(tower)
    with torch.device("meta"):  # the parts that have weights are put in below
        theirs: Any = LlavaForConditionalGeneration(
            LlavaConfig(
                vision_config=copy.deepcopy(vision_config),
                text_config=copy.deepcopy(text.config),
                image_token_index=IMAGE_TOKEN,
                vision_feature_layer=-1,
                vision_feature_select_strategy="default",
            )
        )
    plain: Any = copy.deepcopy(text)
    theirs.model.language_model, theirs.lm_head = plain.model, plain.lm_head
    theirs.model.vision_tower = GivenFeatures()
    theirs.generation_config = copy.deepcopy(plain.generation_config)

    with no_init_weights():
        ours: Any = retrofit(
            text,
            tower,
            cross_attention_layers=BLOCKS,
            cross_attention={"qk_norm": True},
            vision_feature_select_strategy="default",
        )
    for part in (*ours.model.blocks, ours.model.connector):  # also what would start at zero: the blocks see
        fill(part)
    projector = theirs.model.multi_modal_projector.to_empty(device="cpu").to(torch.bfloat16)
    layers = [layer for layer in ours.model.connector.layers if isinstance(layer, nn.Linear)]
    for layer, of_ours in zip((projector.linear_1, projector.linear_2), layers, strict=True):
        layer.load_state_dict(of_ours.state_dict())
    assert theirs.model.language_model.config._attn_implementation == "sdpa"
    assert not [name for name, weight in theirs.named_parameters() if weight.is_meta]
    return ours.to(DEVICE).eval(), theirs.to(DEVICE).eval()


def fill(module: nn.Module) -> None:
    """Random weights, from a few values in turn. Norms are 1, biases 0; gates keep their value."""
    noise = (torch.randn(2**20 + 7) * 0.02).to(torch.bfloat16)
    for name, weight in module.named_parameters():
        if "norm" in name and name.endswith("weight"):
            nn.init.ones_(weight)
        elif name.endswith("bias"):
            nn.init.zeros_(weight)
        elif not name.endswith("gate"):
            weight.copy_(noise.repeat(weight.numel() // len(noise) + 1)[: weight.numel()].view_as(weight))


class Sides:
    """The same calls for both ways.

    Args:
        ours, theirs: the models of [`both`].
        images (`int`): images in front of the text.
    """

    def __init__(self, ours: Any, theirs: Any, images: int):
        self.ours, self.theirs = ours, theirs
        width = ours.config.vision_config.hidden_size
        self.features = torch.randn(1, images, 577, width, device=DEVICE, dtype=torch.bfloat16)
        self.image_ids = torch.full((1, 576 * images), IMAGE_TOKEN, device=DEVICE)
        self.text = torch.randint(3, 1000, (1, TEXT), device=DEVICE)

    def with_image(self, text: torch.Tensor) -> torch.Tensor:
        """Their prompt: image tokens, then the text."""
        return torch.cat([self.image_ids.expand(len(text), -1), text], dim=1)

    def their_images(self, rows: int = 1) -> torch.Tensor:
        return self.features[0].repeat(rows, 1, 1)

    def first_token(self) -> dict[str, Callable[[], Any]]:
        options = {**tokens(1), "return_dict_in_generate": True}
        return {
            "ours": lambda: self.ours.generate(self.text, vision_features=self.features, **options),
            "theirs": lambda: self.theirs.generate(
                self.with_image(self.text), pixel_values=self.their_images(), **options
            ),
        }


def tokens(number: int) -> dict[str, Any]:
    return {"max_new_tokens": number, "min_new_tokens": number, "do_sample": False}


def key_value_bytes(cache: Cache | EncoderDecoderCache) -> int:
    halves = (
        [cache.self_attention_cache, cache.cross_attention_cache] if isinstance(cache, EncoderDecoderCache) else [cache]
    )
    return sum(states.nbytes for half in halves for layer in half.layers for states in (layer.keys, layer.values))


def check(sides: Sides) -> None:
    """Both decoders are the same without an image; with one, both see it, also from a cache."""
    ours, theirs = sides.ours(sides.text).logits, sides.theirs(sides.text).logits
    assert torch.equal(ours, theirs), (ours - theirs).abs().max()
    ours_seeing = sides.ours(sides.text, vision_features=sides.features).logits
    theirs_seeing = sides.theirs(
        sides.with_image(sides.text), pixel_values=sides.their_images(), logits_to_keep=TEXT
    ).logits
    image = sides.ours.encode_images(vision_features=sides.features)
    prefix = sides.theirs(sides.image_ids, pixel_values=sides.their_images(), logits_to_keep=1).past_key_values
    ours_cached = sides.ours(sides.text, past_key_values=image).logits
    theirs_cached = sides.theirs(sides.text, past_key_values=prefix).logits
    for name, without, seeing, cached in (
        ("ours", ours, ours_seeing, ours_cached),
        ("theirs", theirs, theirs_seeing, theirs_cached),
    ):
        changed, rounding = ((each - seeing)[:, -1].float().norm() for each in (without, cached))
        assert seeing.isfinite().all(), name
        assert changed > 0.01 and rounding < changed / 2, (name, changed, rounding)


def static_copy(model: PreTrainedModel, cache: DynamicCache, room: int) -> StaticCache:
    """The same keys and values in a cache that is not copied at every step."""
    static = StaticCache(config=model.config.get_text_config(), max_cache_len=cache.get_seq_length() + room)
    for index, layer in enumerate(cache.layers):
        static.update(layer.keys, layer.values, index)
    return static


def images(ours: Any, theirs: Any, number: int, repeats: int, tower: float) -> dict[str, dict]:
    """First token, decode step and cache bytes with a number of images in front of the text."""
    sides = Sides(ours, theirs, number)
    kept: dict[str, Any] = {}

    def keep(name: str, run: Callable[[], Any]) -> None:
        kept[name] = run().past_key_values

    first = seconds({name: lambda n=name, r=run: keep(n, r) for name, run in sides.first_token().items()}, repeats)
    sizes = {name: key_value_bytes(cache) for name, cache in kept.items()}
    rounds = 3 * repeats
    kept["theirs, static"] = static_copy(theirs, kept["theirs"], STEPS * (rounds + 1))
    token = sides.text[:, :1]

    def steps(name: str) -> None:
        model = ours if name == "ours" else theirs
        for _ in range(STEPS):
            model(input_ids=token, past_key_values=kept[name])

    decode = {name: time / STEPS for name, time in seconds({n: lambda n=n: steps(n) for n in kept}, rounds).items()}
    at = f"{number} image(s): "
    with_tower = {name: time + number * tower for name, time in first.items()}
    return {
        f"{at}first token": row(first, "ms", 1e3),
        f"{at}first token, with the tower": row(with_tower, "ms", 1e3),
        f"{at}decode step": row(decode, "ms", 1e3),
        f"{at}decode step, their static cache": row(decode, "ms", 1e3, "theirs, static"),
        f"{at}cache": row(sizes, "MB", 1e-6),
    }


def questions(ours: Any, theirs: Any, repeats: int) -> dict[str, dict]:
    """Questions about one image: 32 in a batch, the image read once; and one more, alone, after the image is known."""
    sides = Sides(ours, theirs, 1)
    asked = torch.randint(3, 1000, (QUESTIONS, QUESTION), device=DEVICE)
    kept: dict[str, Any] = {}

    def read() -> DynamicCache:
        """Their keys and values of the image's part of the prompt."""
        return theirs(sides.image_ids, pixel_values=sides.their_images(), logits_to_keep=1).past_key_values

    def answer(model: Any, ids: torch.Tensor, **inputs) -> Any:
        return model.generate(ids, return_dict_in_generate=True, **inputs, **tokens(ANSWER))

    def ours_in_batch() -> None:
        image = ours.encode_images(vision_features=sides.features)
        kept["ours"] = answer(ours, asked, past_key_values=image).past_key_values

    def theirs_in_batch() -> None:
        prefix = read()
        prefix.batch_repeat_interleave(QUESTIONS)
        kept["theirs"] = answer(theirs, sides.with_image(asked), past_key_values=prefix).past_key_values

    def theirs_again(ids: torch.Tensor) -> None:
        answer(theirs, sides.with_image(ids), pixel_values=sides.their_images(len(ids)))

    batch = seconds({"ours": ours_in_batch, "theirs": theirs_in_batch}, repeats)
    quarter = seconds({"again": lambda: theirs_again(asked[:AT_ONCE])}, max(1, repeats // 3))
    batch["theirs, again"] = quarter["again"] * QUESTIONS / AT_ONCE
    image, prefix = ours.encode_images(vision_features=sides.features), read()
    one = asked[:1]
    alone = seconds(
        {
            "ours": lambda: answer(ours, one, past_key_values=image),
            "theirs": lambda: answer(theirs, sides.with_image(one), past_key_values=copy.deepcopy(prefix)),
            "theirs, again": lambda: theirs_again(one),
        },
        repeats,
    )
    sizes = {name: key_value_bytes(cache) for name, cache in kept.items()}
    return {
        "32 questions in a batch, their prefix reused": row(batch, "ms", 1e3),
        "32 questions, their prompt read for each": row(batch, "ms", 1e3, "theirs, again"),
        "32 questions in a batch, cache": row(sizes, "MB", 1e-6),
        "one more question, their prefix copied": row(alone, "ms", 1e3),
        "one more question, their prompt read again": row(alone, "ms", 1e3, "theirs, again"),
    }


def row(values: dict[str, float], unit: str, scale: float, theirs: str = "theirs") -> dict[str, Any]:
    return {
        "ours": values["ours"] * scale,
        "theirs": values[theirs] * scale,
        "unit": unit,
        "theirs / ours": values[theirs] / values["ours"],
    }


def price(ours: Any, theirs: Any) -> dict[str, float]:
    """Million parameters. The connector has the projector's sizes; the blocks come on top."""

    def million(module: nn.Module) -> float:
        return sum(weight.numel() for weight in module.parameters()) / 1e6

    return {
        "decoder": million(theirs.model.language_model) + million(theirs.lm_head),
        "projector, both sides": million(theirs.model.multi_modal_projector),
        "blocks, ours alone": sum(million(block) for block in ours.model.blocks),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, choices=TOWERS, default=1024, help="hidden size (default: 1024)")
    parser.add_argument("--images", type=int, nargs="*", default=[1, 4, 16], help="images a prompt (default: 1 4 16)")
    parser.add_argument("--questions", action="store_true", help="also 32 questions about one image")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds, after one that is not (default: 5)")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()
    ours, theirs = both(arguments.hidden)
    check(Sides(ours, theirs, 1))
    parameters = price(ours, theirs)
    for name, number in parameters.items():
        print(f"parameters, million: {name:<24} {number:8.1f}", flush=True)
    pixels = torch.randn(1, 3, 336, 336, device=DEVICE, dtype=torch.bfloat16)
    tower = seconds({"tower": lambda: ours.model.vision_tower(pixels)}, arguments.repeats)["tower"]
    print(
        f"tower, an image: {tower * 1e3:.0f} ms\n\n{'| figure':<54} | ours | theirs | theirs / ours "
        "|\n|---|---|---|---|"
    )
    figures: dict[str, dict] = {}

    def report(made: dict[str, dict]) -> None:
        figures.update(made)
        for name, each in made.items():
            sizes = f"{each['ours']:.1f} {each['unit']} | {each['theirs']:.1f} {each['unit']}"
            print(f"| {name:<52} | {sizes} | {each['theirs / ours']:.2f} |", flush=True)

    for number in arguments.images:
        report(images(ours, theirs, number, arguments.repeats, tower))
    if arguments.questions:
        report(questions(ours, theirs, arguments.repeats))
    if arguments.output:
        made = {"machine": machine(), "million parameters": parameters, "tower, seconds": tower, "figures": figures}
        arguments.output.write_text(json.dumps(made, indent=2) + "\n")
    print(json.dumps(machine()))


if __name__ == "__main__":
    main()
