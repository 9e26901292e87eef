"""Positions of text for `position_bias` and codes of positions: a row of a batch has those that it has alone."""

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.models import own_parts
from helpers.models.tiny_architectures import tiny_config
from helpers.models.tiny_models import TEXT_CONFIGS, make_text, pixels, randomize, strengthen, vision_config
from hf_xattn import XAttnConfig, XAttnForConditionalGeneration
from hf_xattn.utils.architectures import ARCHITECTURES
from hf_xattn.utils.transformers_api import CACHE, is_before


# Not GPT-2, which counts padding itself where it gets no `position_ids`.
DECODERS = ("llama", "opt", "bloom", "mpt", "falcon", "gptj", "mamba", "falcon_mamba", "mamba2", "bamba", "jamba")
STATES_ALONE = ("mamba", "falcon_mamba", "mamba2")  # which want no mask after the prompt
LENGTH, LEFT = 8, (0, 3)
IDS = torch.randint(4, 90, (2, LENGTH), generator=torch.Generator().manual_seed(3))
MASK = (torch.arange(LENGTH) >= torch.tensor(LEFT)[:, None]).long()
IMAGES, REAL = pixels(2, 3), torch.tensor([[True, True, True], [False, True, False]])
TOLERANCE = 1e-4


KINDS = {"bias": {"position_bias": True, "position_bias_max_distance": 64}, "code": {"position": own_parts.TURNING}}


@functools.cache
def biased(name, kind="bias"):
    if name in TEXT_CONFIGS:
        text = make_text(name)
    else:
        torch.manual_seed(0)
        text = strengthen(AutoModelForCausalLM.from_config(tiny_config(name)).eval())
    torch.manual_seed(2)
    config = XAttnConfig(
        text_config=text.config,
        vision_config=vision_config(),
        cross_attention_layers=[0, 3],
        cross_attention_config=dict(KINDS[kind]),
    )
    model = randomize(XAttnForConditionalGeneration(config, text_model=text).eval())
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def own_images(row):
    return {"pixel_values": IMAGES[row : row + 1, REAL[row]]}


def own_ids(row):
    return IDS[row : row + 1, LEFT[row] :]


def read(model, ids, mask=None, cut=LENGTH, cache=None, **images):
    """Logits of a text of which the last `cut` tokens are read one by one; and the cache."""
    length, found = ids.shape[1], []
    stateful = model.config.text_config.model_type in STATES_ALONE
    for start, end in [(0, length - cut), *((step, step + 1) for step in range(length - cut, length))]:
        covered = {} if mask is None or (stateful and start) else {"attention_mask": mask[:, :end]}
        outputs = model(ids[:, start:end], **covered, **images, cache=cache, use_cache=True)
        found, cache, images = [*found, outputs.logits], outputs[CACHE], {}
    return torch.cat(found, dim=1), cache


@torch.no_grad()
@pytest.mark.parametrize(
    "name, kind", [*((name, "bias") for name in DECODERS), *((name, "code") for name in ("llama", "bloom", "mamba"))]
)
def test_left_padding_is_not_counted(name, kind):
    """A row whose answer depends on how long the other rows of its batch are, or how many images they have."""
    model = biased(name, kind)
    given = {"pixel_values": IMAGES, "image_mask": REAL}
    at_once = model(IDS, attention_mask=MASK, **given, use_cache=False).logits
    in_pieces, _ = read(model, IDS, MASK, 4, **given)
    for row in range(2):
        alone = model(own_ids(row), **own_images(row), use_cache=False).logits[0]
        for found in (at_once, in_pieces):
            assert torch.allclose(found[row, LEFT[row] :], alone, atol=TOLERANCE), row


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "bloom", "mamba", "bamba"])
@pytest.mark.parametrize("cache", [None, "static", False])
@pytest.mark.parametrize("kind", KINDS)
def test_generated_tokens_have_the_positions_of_a_row_alone(name, cache, kind):
    """Positions of the mask that `generate` makes for a static cache, which is longer than the text."""
    if cache == "static" and name == "bloom" and is_before(ARCHITECTURES["bloom"].static_since):
        pytest.skip("Bloom has no static cache here")
    model = biased(name, kind)
    options = {"use_cache": False} if cache is False else {"cache_implementation": cache}
    options |= {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    found = model.generate(IDS, attention_mask=MASK, pixel_values=IMAGES, image_mask=REAL, **options).logits
    for row in range(2):
        alone = model.generate(own_ids(row), **own_images(row), **options).logits
        assert torch.allclose(torch.stack(found)[:, row], torch.stack(alone)[:, 0], atol=TOLERANCE), row


@torch.no_grad()
def test_padding_is_remembered():
    """Rows of a state-space decoder, which gets no mask after its prompt, that lose their padding when they change
    places, or keep that of another text.
    """
    model, step = biased("mamba"), torch.tensor([[7], [7]])
    given = {"pixel_values": IMAGES, "image_mask": REAL}
    _, cache = read(model, IDS, MASK, 0, **given)
    cache.reorder_cache(torch.tensor([1, 0]))
    found = model(step, cache=cache).logits
    for row in range(2):
        _, alone = read(model, own_ids(row), None, 0, **own_images(row))
        expected = model(step[:1], cache=alone).logits
        assert torch.allclose(found[1 - row], expected[0], atol=TOLERANCE), row
    cache.reset()
    ids = IDS[:, 3:]
    found = [read(model, ids, None, 2, **given, **more)[0] for more in ({}, {"cache": cache})]
    assert torch.equal(*found)
