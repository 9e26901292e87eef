"""The two names of the cache: `cache`, as transformers calls it since 5.24, and `past_key_values`."""

import inspect
import warnings

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from helpers.models.tiny_models import make_model, make_text, pixels, token_ids
from hf_xattn import XAttnModel, attention_maps
from hf_xattn.utils.transformers_api import CACHE, has


pytestmark = pytest.mark.filterwarnings("default:.past_key_values. is deprecated:FutureWarning")

OLD = "past_key_values"
OPTIONS = {"max_new_tokens": 4, "do_sample": False}
CALLS = {
    "forward": lambda model, **caches: model(token_ids(), **caches),
    "body": lambda model, **caches: model.model(token_ids(), **caches),
    "generate": lambda model, **caches: model.generate(token_ids(), **caches, **OPTIONS),
    "encode_images": lambda model, **caches: model.encode_images(pixel_values=pixels() + 1, **caches),
    "encode_images of the body": lambda model, **caches: model.model.encode_images(pixel_values=pixels() + 1, **caches),
    "attention_maps": lambda model, **caches: attention_maps(model, {"input_ids": token_ids(), **caches}),
    "prepare_inputs": lambda model, **caches: model.prepare_inputs_for_generation(token_ids(), **caches),
}


@pytest.fixture(scope="module")
def model():
    return make_model("llama")


@pytest.fixture
def told():
    """Warnings of the old name."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FutureWarning)
        yield lambda: [str(each.message) for each in caught if OLD in str(each.message)]


@torch.no_grad()
@pytest.mark.parametrize("call", CALLS)
def test_the_new_name_is_silent(call, model, told):
    """A warning of transformers about a name that the caller did not use."""
    CALLS[call](model, cache=model.encode_images(pixel_values=pixels()))
    assert told() == []


@torch.no_grad()
@pytest.mark.parametrize("call", CALLS)
def test_the_old_name_warns_as_in_transformers(call, model, told):
    """A name that goes away in silence, or one that is still the only one, but warns."""
    CALLS[call](model, **{OLD: model.encode_images(pixel_values=pixels())})
    found = told()
    assert all("`past_key_values` is deprecated" in each and "Use `cache` instead" in each for each in found)
    assert bool(found) == has("cache")
    make_text()(token_ids(), **{OLD: DynamicCache()})
    assert (len(told()) > len(found)) == has("cache")


@torch.no_grad()
@pytest.mark.parametrize("name", ["cache", OLD])
@pytest.mark.parametrize("part", ["head", "body"])
def test_forward_takes_both_names(model, name, part):
    """An answer without the text or the images of the cache, because it came under its other name."""
    called, ids = (model if part == "head" else model.model), token_ids()
    whole = called(ids, pixel_values=pixels())[0]
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    first = called(ids[:, :4], pixel_values=pixels(), **{name: cache})
    assert first[CACHE] is cache
    second = called(ids[:, 4:], **{name: cache})
    torch.testing.assert_close(second[0], whole[:, 4:], rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("name", ["cache", OLD, "cache_params"])
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
        cached = model.generate(more, **{name: turn[CACHE]}, **options)
        assert torch.equal(cached, model.generate(more, pixel_values=pixels(), **options))


@torch.no_grad()
@pytest.mark.parametrize("name", ["cache", OLD])
def test_encoding_and_maps_take_both_names(model, name, told):
    """Images that are put into a new cache instead of the given one; maps that ignore the images of a cache."""
    images = model.encode_images(pixel_values=pixels())
    assert model.encode_images(pixel_values=pixels() + 1, **{name: images}) is images
    assert images.cross_attention_cache.layout.num_images == 2 * pixels().shape[1]
    images = model.encode_images(pixel_values=pixels())
    cached = attention_maps(model, {"input_ids": token_ids(), name: images}, max_new_tokens=2, do_sample=False)
    given = {"input_ids": token_ids(), "pixel_values": pixels()}
    plain = attention_maps(model, given, max_new_tokens=2, do_sample=False)
    for mine, theirs in zip(cached.weights, plain.weights, strict=True):
        torch.testing.assert_close(mine, theirs)


@torch.no_grad()
@pytest.mark.parametrize("call", CALLS)
def test_of_both_names_the_new_one_counts(call, model):
    """Two caches in one call, of which one is ignored without a word, or the wrong one."""
    one, other = model.encode_images(pixel_values=pixels()), model.encode_images(pixel_values=pixels() + 1)
    plain, _ = model.encode_images(pixel_values=pixels()), other.cross_attention_cache.layers
    with pytest.warns(FutureWarning, match="Both `past_key_values` and `cache` are set"):
        found = CALLS[call](model, **{"cache": one, OLD: other})
    expected = CALLS[call](model, cache=plain)
    if call == "generate":
        assert torch.equal(found, expected)
    elif call == "attention_maps":
        assert all(map(torch.equal, found.weights, expected.weights))
    elif call.startswith("encode_images"):
        assert found is one
    elif call == "prepare_inputs":
        assert found[CACHE] is one
    else:
        assert torch.equal(found[0], expected[0])
    assert other.get_seq_length() == 0


def test_signatures_have_the_name_of_transformers():
    """A name that transformers, Trainer or PEFT look for among the arguments, and do not find."""
    expected = inspect.signature(type(make_text()).forward).parameters
    for function in (type(make_model()).forward, XAttnModel.forward):
        found = inspect.signature(function).parameters
        assert CACHE in found and CACHE in expected
        assert not {"cache", OLD}.difference({CACHE}) & found.keys()


@torch.no_grad()
def test_results_have_the_names_of_transformers(model):
    """A result without the name that the installed transformers, or this package's guides, use."""
    turn = {"pixel_values": pixels(), "return_dict_in_generate": True, **OPTIONS}
    for output in (
        model(token_ids(), pixel_values=pixels()),
        model.model(token_ids(), pixel_values=pixels()),
        model.generate(token_ids(), **turn),
        model.generate(token_ids(), **turn, num_beams=2),
        make_model("mixtral")(token_ids(), pixel_values=pixels(), output_router_logits=True),
    ):
        for name in {OLD, CACHE}:
            assert getattr(output, name) is output[name]
            assert isinstance(output[name], EncoderDecoderCache)
