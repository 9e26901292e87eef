"""Text in the cache of a caller: read once, and never passed over, whatever the call looks like."""

import copy

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging

from helpers.models.marked_models import strong_model, turn
from helpers.models.tiny_decoders import make_tiny, retrofitted
from helpers.models.tiny_models import make_model, pixels, token_ids
from helpers.references.gradient_checks import checkpoint_activations
from hf_xattn import freeze_base
from hf_xattn.cache.image_cache import select_images
from hf_xattn.utils.transformers_api import CACHE


GREEDY = {"max_new_tokens": 6, "do_sample": False}


LOOKUP = {"do_sample": False, "prompt_lookup_num_tokens": 3}


def empty(model):
    return EncoderDecoderCache(DynamicCache(config=model.config.get_text_config()), DynamicCache())


def generate(model, ids, **options):
    return model.generate(ids, max_new_tokens=8, pad_token_id=0, **{"do_sample": False, **options})


@pytest.mark.parametrize("options", [{}, LOOKUP], ids=["greedy", "lookup"])
@pytest.mark.parametrize("given", ["whole", "new"])
@pytest.mark.parametrize("new", [2, 9])
def test_new_text_after_cached_text(given, new, options):
    """New tokens that are left out because as many are cached, or cached ones that are read again; with padding."""
    model, images = make_model(), pixels(1)
    first, second = token_ids(1, 5), token_ids(1, new, seed=3).repeat(1, 2)[:, :new]
    both = torch.cat([first, second], 1)
    mask = torch.ones_like(both)
    mask[:, :2] = 0
    expected = generate(model, both, attention_mask=mask, pixel_values=images)[:, both.shape[1] :]
    cache = empty(model)
    with torch.no_grad():
        model(first, attention_mask=mask[:, :5], pixel_values=images, cache=cache)
    ids = both if given == "whole" else second
    found = generate(model, ids, attention_mask=mask, cache=cache, **options)
    assert torch.equal(found[:, ids.shape[1] :], expected)
    assert cache.get_seq_length() == both.shape[1] + 7  # the last token is read by the next call


@pytest.mark.parametrize("encoded", [False, True])
def test_a_cache_that_must_not_be_used(encoded):
    """`use_cache=False` beside a cache: each step would add the whole text to it."""
    model, images, ids = make_model(), pixels(), token_ids()
    given = {"cache": model.encode_images(images)}
    if not encoded:
        given = {"cache": empty(model), "pixel_values": images}
    with pytest.raises(ValueError, match="Expected `use_cache=True` with `cache`, of type"):
        generate(model, ids, use_cache=False, **given)
    assert given["cache"].get_seq_length() == 0


def test_generate_while_training(monkeypatch):
    """Checkpointed layers write nothing into the cache, so each step would see the last token alone."""
    from hf_xattn import generation_xattn

    told = []
    monkeypatch.setattr(generation_xattn.logger, "warning_once", told.append)
    model, images, ids = make_model(), pixels(), token_ids()
    expected = generate(model, ids, pixel_values=images)
    model.gradient_checkpointing_enable()
    assert torch.equal(generate(model, ids, pixel_values=images), expected) and not told
    model.train()
    assert torch.equal(generate(model, ids, pixel_values=images), expected)
    assert "Gradient checkpointing runs layers twice, so `generate` works without a cache" in told.pop()
    with pytest.raises(ValueError, match="twice, so `cache` cannot be used"):
        generate(model, ids, pixel_values=images, cache=empty(model))


@pytest.mark.parametrize("plain", [False, True], ids=["with_images", "plain_cache"])
@pytest.mark.parametrize("way", ["training", "frozen", "text_model_alone", "wrapped_in_evaluation"])
def test_cached_text_beside_checkpointing(way, plain):
    """Text in the cache that checkpointed layers do not read, or that they would write twice: other logits."""
    model, ids = make_model(), token_ids()
    cache, images = (DynamicCache(), {}) if plain else (empty(model), {"pixel_values": pixels()})
    with torch.no_grad():
        model(ids, cache=cache, **images)
        expected = model(ids[:, :1], cache=copy.deepcopy(cache)).logits
    if way == "wrapped_in_evaluation":
        layers = model.get_decoder().layers
        for index, layer in enumerate(layers):
            layers[index] = checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    else:
        checkpoint_activations(freeze_base(model) if way == "frozen" else model)
        (model.model.text_model if way == "text_model_alone" else model).train()
    for length in (1, 3):
        with pytest.raises(ValueError, match="twice, so no text can be added to `cache`"):
            model(ids[:, :length], cache=cache)
    assert cache.get_seq_length() == ids.shape[1]
    with torch.no_grad():  # as the error says
        assert torch.equal(model.eval()(ids[:, :1], cache=cache).logits, expected)


def test_cached_state_beside_checkpointing():
    """The same for a decoder without keys and values, which keeps a state of the text."""
    model, ids = retrofitted(make_tiny("mamba2")), token_ids()
    with torch.no_grad():
        cache = model(ids, cache=DynamicCache(config=model.config.get_text_config(decoder=True)))[CACHE]
    checkpoint_activations(model.train())
    with pytest.raises(ValueError, match="twice, so no text can be added to `cache`"):
        model(ids[:, :1], cache=cache)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("length", [1, 3])
def test_a_mask_of_the_new_text_alone(length, static):
    """A mask that transformers fills up with zeros, which hide the new text from itself."""
    model, ids = make_model(), token_ids()
    text = StaticCache(config=model.config.get_text_config(), max_cache_len=16)
    cache = EncoderDecoderCache(text, DynamicCache()) if static else empty(model)
    with torch.no_grad():
        model(ids, pixel_values=pixels(), cache=cache)
        with pytest.raises(ValueError, match=rf"\(batch, {ids.shape[1] + length}\).*got \(2, {length}\)"):
            model(ids[:, :length], attention_mask=torch.ones(2, length), cache=cache)
        model(ids[:, :length], attention_mask=torch.ones(2, ids.shape[1] + length), cache=cache)


@pytest.mark.parametrize("name", ["image_attention_mask", "cross_attention_mask"])
def test_a_mask_to_add_to_scores(name):
    """A mask whose zeros attend, read the other way round."""
    model, ids = make_model(), token_ids()
    allowed = torch.tensor([1.0, 0.0]).expand(2, ids.shape[1], 2)
    bias = torch.zeros_like(allowed).masked_fill(allowed == 0, -1e9)
    images = torch.cat([pixels(), pixels(seed=60)], 1)
    of_tiles = (lambda mask: mask[..., None]) if name == "cross_attention_mask" else (lambda mask: mask)
    with pytest.raises(ValueError, match=rf"`{name}` to be boolean, or 1 .* got -1e\+09 to 0"):
        model(ids, pixel_values=images, **{name: of_tiles(bias)})
    expected = model(ids, pixel_values=images, **{name: of_tiles(allowed.bool())}).logits
    assert torch.equal(model(ids, pixel_values=images, **{name: of_tiles(allowed)}).logits, expected)


@pytest.fixture(scope="module")
def model():
    return strong_model()


def test_images_with_the_text_of_a_forward(model):
    """A question whose beginning counts as read, because another text of that length was."""
    cache = model.encode_images(pixel_values=pixels(1, 1))
    with torch.no_grad(), CaptureLogger(logging.get_logger("hf_xattn.generation_xattn")) as said:
        model.generate(token_ids(1, 20, seed=11), cache=cache, **GREEDY)
        assert said.out == ""
        model(token_ids(1), cache=cache)
        model.generate(token_ids(1, 20, seed=11), cache=cache, **GREEDY)
    assert "`cache` from `encode_images` holds text" in said.out


def test_new_text_with_the_last_token(model):
    """A mask that is right, and refused."""
    made, new = turn(model), token_ids(1, 4, seed=9)
    text = torch.cat([made.sequences, new], dim=1)
    cached = int(made[CACHE].get_seq_length())
    mask = torch.ones_like(text)
    found = model.generate(text[:, cached:], cache=made[CACHE], attention_mask=mask, **GREEDY)
    assert torch.equal(found[:, -6:], model.generate(text, pixel_values=pixels(1, 1), **GREEDY)[:, -6:])


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 3}], ids=str)
def test_text_of_other_beams(options, model):
    """The cache of a beam search, whose rows are not those of the sequences that it returns."""
    made = turn(model, **options)
    text = torch.cat([made.sequences, token_ids(len(made.sequences), 4, seed=9)], dim=1)
    with pytest.raises(ValueError, match="comes from a beam search"):
        model.generate(text.repeat_interleave(3 // len(text), 0), cache=made[CACHE], **GREEDY)
    images = select_images(made[CACHE], [0])
    expected = model.generate(text, pixel_values=pixels(1, 1).expand(len(text), -1, -1, -1, -1), **GREEDY)
    assert torch.equal(model.generate(text, cache=images, **GREEDY), expected)
