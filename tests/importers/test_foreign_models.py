"""Mllama and Idefics of transformers, twenty random configurations each, against what they become here.

Each case draws sizes, head layout, epsilon, places of the layers, a batch with rows of different length, and images
for each row.
"""

import random

import pytest
import torch
from transformers import MllamaConfig, MllamaForConditionalGeneration

from helpers.models.tiny_idefics import FAKE, make_idefics, stop_idefics
from helpers.models.tiny_idefics import MARKER as IDEFICS_MARKER
from helpers.models.tiny_mllama import MARKER, TEXT, VISION, mllama_inputs, stop_mllama
from hf_xattn.importers import import_checkpoint


CASES = range(20)
NEW = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}


@torch.no_grad()
def randomized(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name or "layrnorm" in name or ".ln." in name:
            parameter.add_(noise * 0.1)
        else:  # gates are zero in a fresh model
            parameter.copy_(noise if parameter.numel() == 1 or "alpha" in name else noise * 0.2)
    return model.eval()


def heads(draw):
    count = draw.choice([2, 4])
    return {
        "hidden_size": count * draw.choice([4, 8]),
        "num_attention_heads": count,
        "intermediate_size": draw.choice([24, 40]),
        "hidden_act": draw.choice(["silu", "gelu"]),
        "rms_norm_eps": draw.choice([1e-6, 1e-5, 1e-2]),
    }


def random_mllama(draw, seed):
    cross, places = [], [1]
    for _ in range(draw.randint(0, 3)):  # may be neighbours
        places.append(places[-1] + draw.choice([1, 1, 2, 3]))
    cross = places
    own = heads(draw)
    text = (
        TEXT
        | own
        | {
            "num_key_value_heads": draw.choice([each for each in (1, 2, 4) if own["num_attention_heads"] % each == 0]),
            "num_hidden_layers": cross[-1] + draw.randint(1, 2),  # the last one may be a cross-attention layer
            "cross_attention_layers": cross,
            "tie_word_embeddings": draw.random() < 0.3,
        }
    )
    vision = VISION | {
        "hidden_size": draw.choice([8, 16]),
        "intermediate_size": draw.choice([16, 24]),
        "num_global_layers": draw.randint(1, 2),
        "intermediate_layers_indices": draw.choice([[0], [0, 2]]),
    }
    vision["vision_output_dim"] = vision["hidden_size"] * (1 + len(vision["intermediate_layers_indices"]))
    config = MllamaConfig(text_config=text, vision_config=vision, image_token_index=MARKER)
    config._attn_implementation = draw.choice(["eager", "sdpa"])
    torch.manual_seed(seed)
    return stop_mllama(randomized(MllamaForConditionalGeneration(config), seed))


def random_text(draw, counts, marker, length=9):
    """Left-padded rows with a marker for each image of `counts`."""
    rows = []
    for count in counts:
        size = draw.randint(count + 3, length)
        places = set(draw.sample(range(size - 1), count))
        row = [marker if place in places else draw.randint(4, 90) for place in range(size)]
        rows.append([0] * (length - size) + row)
    return rows


@torch.no_grad()
@pytest.mark.parametrize("seed", CASES)
def test_an_imported_mllama_gives_its_logits_and_tokens(seed):
    """Sizes, epsilons, head layouts or places that the importer takes for others; tiles, padding or a row that leak
    into another.
    """
    draw = random.Random(seed)
    theirs = random_mllama(draw, seed)
    ours = import_checkpoint(theirs)
    counts = [draw.randint(0, 3) for _ in range(draw.randint(1, 3))]
    counts[draw.randrange(len(counts))] = draw.randint(1, 3)
    rows = random_text(draw, counts, MARKER)
    given = mllama_inputs(rows, [[draw.randint(1, 4) for _ in range(count)] for count in counts], seed)
    given["attention_mask"] = (given["input_ids"] != 0).long()
    found = given["attention_mask"].bool()
    expected = theirs(**given).logits[found]
    by_ids = {name: value for name, value in given.items() if name != "cross_attention_mask"}
    for each in (given, by_ids):
        assert torch.allclose(ours(**each).logits[found], expected, atol=3e-5)
    generated = theirs.generate(**given, **NEW)
    assert torch.equal(ours.generate(**given, **NEW), generated)
    assert torch.equal(ours.generate(**by_ids, **NEW, use_cache=seed % 2 == 0), generated)


def random_idefics(draw, seed):
    vision_heads = draw.choice([1, 2])
    width = vision_heads * draw.choice([8, 12])
    resampler = {
        "resampler_n_latents": draw.randint(1, 4),
        "resampler_depth": draw.randint(1, 2),
        "resampler_n_heads": draw.choice([1, 2]),
        "resampler_head_dim": draw.choice([4, 8]),
        "qk_layer_norms_perceiver": draw.random() < 0.5,
    }
    uses = draw.random() < 0.5
    interval = draw.randint(1, 3)
    model = make_idefics(
        **heads(draw),
        num_hidden_layers=interval * draw.randint(1, 2),  # for any other number, theirs has a layer too few
        cross_layer_interval=interval,
        qk_layer_norms=draw.random() < 0.5,
        alpha_type=draw.choice(["vector", "float"]),
        tie_word_embeddings=draw.random() < 0.3,
        use_resampler=uses,
        perceiver_config={"use_resampler": uses} | resampler,
        vision_config={
            "embed_dim": width,
            "image_size": 16,
            "intermediate_size": draw.choice([16, 24]),
            "patch_size": 8,
            "num_hidden_layers": draw.randint(1, 2),
            "num_attention_heads": vision_heads,
        },
    )
    randomized(model, seed)
    model.tie_weights()
    return stop_idefics(model)


@torch.no_grad()
@pytest.mark.parametrize("seed", CASES)
def test_an_imported_idefics_gives_its_logits_and_tokens(seed):
    """The same for Idefics, with and without resampler, norms of queries and keys, and gates for each channel."""
    draw = random.Random(100 + seed)
    theirs = random_idefics(draw, seed)
    ours = import_checkpoint(theirs)
    counts = [draw.randint(1, 3) for _ in range(draw.randint(1, 3))]
    ids = torch.tensor(random_text(draw, counts, IDEFICS_MARKER))
    ids[(ids == 7)] = FAKE
    images = max(counts)
    seen = (ids == IDEFICS_MARKER).cumsum(dim=1)
    pixels = torch.randn(len(ids), images, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    real = torch.arange(images) < torch.tensor(counts)[:, None]
    pixels[~real] = 0
    given = {
        "input_ids": ids,
        "pixel_values": pixels,
        "attention_mask": (ids != 0).long(),
        "image_attention_mask": (seen[..., None] == torch.arange(1, images + 1)).long(),
    }
    found = given["attention_mask"].bool()
    expected = theirs(**given).logits[found]
    by_ids = {name: value for name, value in given.items() if name != "image_attention_mask"} | {"image_mask": real}
    for each in (given, by_ids):
        assert torch.allclose(ours(**each).logits[found], expected, atol=3e-5)
    generated = theirs.generate(**given, **NEW, use_cache=True)
    assert torch.equal(ours.generate(**given, **NEW), generated)
    assert torch.equal(ours.generate(**by_ids, **NEW, use_cache=seed % 2 == 0), generated)
