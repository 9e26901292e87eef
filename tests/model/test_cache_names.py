"""The two names of the cache: `past_key_values`, and `cache`, as transformers calls it since 5.24."""

import warnings

import pytest
import torch
from tiny_models import make_model, pixels, token_ids
from transformers import DynamicCache, EncoderDecoderCache

from hf_xattn import attention_maps
from hf_xattn.utils.transformers_api import has


NAMES = ["past_key_values", "cache"]
OPTIONS = {"max_new_tokens": 4, "do_sample": False}


@pytest.fixture(scope="module")
def model():
    return make_model("llama")


@pytest.fixture(autouse=True)
def no_warnings():
    """transformers warns of the old name where one of its own functions gets it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        yield


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", ["head", "body"])
def test_forward_takes_both_names(model, name, part):
    """An answer without the text or the images of the cache, because it came under its other name."""
    called, ids = (model if part == "head" else model.model), token_ids()
    whole = called(ids, pixel_values=pixels())[0]
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    first = called(ids[:, :4], pixel_values=pixels(), **{name: cache})
    second = called(ids[:, 4:], **{name: first.past_key_values})
    torch.testing.assert_close(second[0], whole[:, 4:], rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_generate_takes_both_names(model, name, num_beams):
    """Other tokens than those of the same images as pixels, or of the whole conversation, for one of the names."""
    options = {**OPTIONS, "num_beams": num_beams}
    expected = model.generate(token_ids(), pixel_values=pixels(), **options)
    images = model.encode_images(pixel_values=pixels())
    for _ in range(2):  # the images stay as they are
        turn = model.generate(token_ids(), **{name: images}, **options, return_dict_in_generate=True)
        assert torch.equal(turn.sequences, expected)
    if num_beams == 1:
        more = torch.cat([turn.sequences, token_ids()], dim=1)
        cached = model.generate(more, **{name: turn.past_key_values}, **options)
        assert torch.equal(cached, model.generate(more, pixel_values=pixels(), **options))


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_encoding_takes_both_names(model, name):
    """Images that are put into a new cache instead of the given one."""
    images = model.encode_images(pixel_values=pixels())
    assert model.encode_images(pixel_values=pixels() + 1, **{name: images}) is images
    assert images.cross_attention_cache.layout.num_images == 2 * pixels().shape[1]


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_maps_take_both_names(model, name):
    """Maps that ignore the images of a cache."""
    images = model.encode_images(pixel_values=pixels())
    cached = attention_maps(model, {"input_ids": token_ids(), name: images}, max_new_tokens=2, do_sample=False)
    plain = attention_maps(
        model, {"input_ids": token_ids(), "pixel_values": pixels()}, max_new_tokens=2, do_sample=False
    )
    for mine, theirs in zip(cached.weights, plain.weights, strict=True):
        torch.testing.assert_close(mine, theirs)


@torch.no_grad()
@pytest.mark.parametrize("call", ["forward", "body", "generate", "encode_images", "attention_maps"])
def test_both_names_at_once_are_refused(model, call):
    """Two caches in one call, of which one is silently ignored."""
    one, other = model.encode_images(pixel_values=pixels()), model.encode_images(pixel_values=pixels())
    both = {"past_key_values": one, "cache": other}
    with pytest.raises(ValueError, match="Expected `past_key_values` or `cache`.* got both"):
        if call == "forward":
            model(token_ids(), **both)
        elif call == "body":
            model.model(token_ids(), **both)
        elif call == "generate":
            model.generate(token_ids(), **both, **OPTIONS)
        elif call == "encode_images":
            model.encode_images(pixel_values=pixels(), **both)
        else:
            attention_maps(model, {"input_ids": token_ids(), **both})


@torch.no_grad()
def test_outputs_have_the_names_of_transformers(model):
    """An output without the name that the installed transformers, or this package's guides, use."""
    turn = {"pixel_values": pixels(), "return_dict_in_generate": True, **OPTIONS}
    for output in (
        model(token_ids(), pixel_values=pixels()),
        model.model(token_ids(), pixel_values=pixels()),
        model.generate(token_ids(), **turn),
        model.generate(token_ids(), **turn, num_beams=2),
        make_model("mixtral")(token_ids(), pixel_values=pixels(), output_router_logits=True),
    ):
        for name in NAMES if has("cache") else NAMES[:1]:
            assert getattr(output, name) is output[name]
            assert isinstance(output[name], EncoderDecoderCache)
