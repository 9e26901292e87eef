"""Image caches in int8 in every flow. The reference is a model that rounds its projections by hand and knows nothing
of int8.
"""

import copy
import pickle

import pytest
import torch
from transformers.cache_utils import DynamicCache, StaticCache

from helpers.inputs.image_stores import MODELS, Counted, asked, assert_same
from helpers.models.compiled_models import compiled, counting_backend
from helpers.models.exported_models import decode_both_ways, export, needs_exporters, small
from helpers.models.marked_models import MARKER, RULES, close, fresh_cache, generate, marked
from helpers.models.tiny_models import make_model, make_text, pixels, token_ids
from helpers.references.int8_rounding import both
from hf_xattn import attention_maps
from hf_xattn.cache.image_cache import ImageCache, select_images
from hf_xattn.storage.image_files import combine_images, load_image_cache, save_image_cache
from hf_xattn.utils.transformers_api import CACHE


def encoded(model, images, **kwargs):
    with torch.no_grad():
        return model.encode_images(pixel_values=images, cache_dtype="int8", **kwargs)


def all_in_int8(cache):
    cross = cache.cross_attention_cache
    return cross.cache_dtype == "int8" and all(layer.keys.dtype == torch.int8 for layer in cross.layers)


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_answers_of_every_kind_of_model(kind):
    """A null key with a scale, queries folded beside the wrong scales, a tower or projection that runs
    for a question.
    """
    model, reference = both(**MODELS[kind])
    ids, images = token_ids(2), pixels(2, 2)
    cache = encoded(model, images)
    with Counted(model) as counts:
        for question in (ids, ids + 1):
            found = asked(model, question, cache=cache)
            assert_same(found, asked(reference, question, pixel_values=images), equal=False)
            assert all_in_int8(found[CACHE]) and type(cache) is ImageCache
        logits = model(ids, cache=cache.fork(DynamicCache(config=model.config.text_config))).logits
        assert close(logits, reference(ids, pixel_values=images, use_cache=False).logits)
    assert counts == {}
    plain = model(ids, pixel_values=images, use_cache=False).logits
    assert not torch.equal(logits, plain) and (logits - plain).abs().max() < 0.05 * plain.abs().max()


WAYS = {
    "beams": {"num_beams": 3},
    "return_sequences": {"do_sample": True, "num_return_sequences": 3},
    "beams_and_returns": {"num_beams": 4, "num_return_sequences": 2},
    "static": {"cache_implementation": "static"},
    "lookup": {"prompt_lookup_num_tokens": 2},
    "attentions": {"output_attentions": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_decode_reads_int8_images_alike(way):
    """Beams that share images and find other scales; a way to decode that reads steps as if they were values."""
    model, reference = both()
    batch = 1 if way == "lookup" else 2
    ids, cache = token_ids(batch), encoded(model, pixels(batch, 2))
    answers = []
    for served, images in ((model, {"cache": cache}), (reference, {"pixel_values": pixels(batch, 2)})):
        served.set_attn_implementation("eager")
        torch.manual_seed(4)
        answers.append(asked(served, ids, **images, **WAYS[way]))
    assert_same(*answers, equal=False)
    if way == "attentions":
        for mine, theirs in zip(answers[0].cross_attentions[0], answers[1].cross_attentions[0], strict=True):
            assert close(mine, theirs)


@pytest.mark.parametrize("rule", RULES)
def test_images_in_later_turns(rule):
    """Cached images that are rounded again with each new one, new ones in another dtype, an image in the place of
    another.
    """
    model, reference = both(marked, rule=rule)
    turns = [pixels(2, 1, seed=seed) for seed in range(3)]
    text = torch.tensor([[MARKER, 7, 8], [5, MARKER, 9]])
    cache, other, first = encoded(model, turns[0], cache=fresh_cache()), fresh_cache(), None
    for turn in range(3):
        images = torch.cat(turns[: turn + 1], dim=1)
        answer = asked(model, text, cache=cache, **({"pixel_values": images} if turn else {}))
        assert_same(answer, asked(reference, text, pixel_values=images, cache=other), equal=False)
        cross = cache.cross_attention_cache
        assert all_in_int8(cache) and cross.get_seq_length() == 16 * (turn + 1)
        first = first or [tensor.clone() for tensor in cross.layers[0].tensors]
        for now, before in zip(cross.layers[0].tensors, first, strict=True):
            assert torch.equal(now[:, :, :16], before), "the first image is as it was"
        text = torch.cat([answer.sequences, torch.tensor([[MARKER, 10 + turn], [11, MARKER]])], dim=1)
    together = encoded(marked(rule=rule), torch.cat(turns, dim=1)).cross_attention_cache
    for one, other in zip(cross.layers, together.layers):
        assert all(map(close, one.tensors, other.tensors)) and len(one.tensors) == 4


@torch.no_grad()
def test_a_forward_brings_images():
    """A forward whose own logits come from keys and values that later calls do not find."""
    model, reference = both()
    ids, images = token_ids(2, 9), pixels(2, 2)
    cache = encoded(model, images[:, :1]).fork(DynamicCache(config=model.config.text_config))
    found = [model(ids[:, :4], cache=cache).logits]
    found.append(model(ids[:, 4:7], pixel_values=images[:, 1:], cache=cache).logits)
    found.append(model(ids[:, 7:], cache=cache).logits)
    other = reference(ids[:, :4], pixel_values=images[:, :1], use_cache=True)
    expected = [other.logits]
    for part, more in ((ids[:, 4:7], {"pixel_values": images[:, 1:]}), (ids[:, 7:], {})):
        other = reference(part, cache=other[CACHE], **more)
        expected.append(other.logits)
    assert all(map(close, found, expected)) and all_in_int8(cache)
    assert cache.cross_attention_cache.get_seq_length() == 32


@torch.no_grad()
def test_rows_without_images_are_not_rounded():
    """Text beside an image that is rounded, which sees some of it; padding that counts."""
    model, reference = both()
    ids, images = token_ids(3), pixels(3, 2)
    mask = torch.tensor([[True, True], [False, False], [True, False]])
    cache = encoded(model, images, image_mask=mask)
    logits = model(ids, cache=cache.fork(DynamicCache(config=model.config.text_config))).logits
    assert close(logits, reference(ids, pixel_values=images, image_mask=mask, use_cache=False).logits)
    assert torch.equal(logits[1], make_text()(ids).logits[1]), "bit for bit"
    found = generate(model, ids, cache=cache, output_logits=True, return_dict_in_generate=True)
    base = make_text().generate(
        ids, max_new_tokens=5, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    for mine, theirs in zip(found.logits, base.logits):
        assert torch.equal(mine[1], theirs[1])
    text_only = model(ids, use_cache=True).logits
    assert torch.equal(text_only, make_text()(ids).logits)
    fresh = make_model(random=False)
    cache = encoded(fresh, images).fork(DynamicCache())
    assert torch.equal(fresh(ids, cache=cache).logits, make_text()(ids).logits), "a fresh model is its base"


@torch.no_grad()
@pytest.mark.parametrize("fault", [torch.nan, torch.inf])
def test_a_broken_image_stays_in_its_row(fault):
    """NaN that turns into numbers, or reaches another row."""
    model, images, ids = make_model(), pixels(2), token_ids(2)
    images[0, 0, 0, 3, 3] = fault
    cache = encoded(model, images)
    for text in (ids, ids[:, :1]):
        logits = model(text, cache=cache.fork(DynamicCache())).logits
        expected = model(text, cache=encoded(model, images[1:]).fork(DynamicCache())).logits if False else None
        assert expected is None
        assert logits[0].isnan().all() and logits[1].isfinite().all()
        assert close(logits[1:], model(text[1:], cache=encoded(model, images[1:]).fork(DynamicCache())).logits)
        plain = model(text, pixel_values=images).logits
        assert torch.equal(plain.isnan(), logits.isnan())


@torch.no_grad()
def test_select_repeat_crop_and_reset():
    """Rows with the scales of their neighbours; a reset cache that stays in int8 unasked."""
    model, reference = both()
    ids, images = token_ids(3), pixels(3)
    cache = encoded(model, images)
    chosen = select_images(cache, [2, 0, 2])
    assert all_in_int8(chosen)
    assert_same(asked(model, ids, cache=chosen), asked(reference, ids, pixel_values=images[[2, 0, 2]]), equal=False)
    talk, other = (
        served.encode_images(images, **more).fork(DynamicCache())
        for served, more in ((model, {"cache_dtype": "int8"}), (reference, {}))
    )
    for served, each in ((model, talk), (reference, other)):
        served(ids, cache=each)
        each.batch_repeat_interleave(2)
        each.batch_select_indices(torch.tensor([5, 0, 3]))
        each.reorder_cache(torch.tensor([1, 0, 2]))
        each.crop(-2)
    assert close(model(ids, cache=talk).logits, reference(ids, cache=other).logits)
    assert all_in_int8(talk)
    talk.reset()
    assert talk.cross_attention_cache.cache_dtype is None and talk.cross_attention_cache.nbytes == 0
    logits = model(ids, pixel_values=images, cache=talk).logits
    assert torch.equal(logits, model(ids, pixel_values=images).logits), "without `cache_dtype` nothing is rounded"


@torch.no_grad()
def test_copies_and_combined_rows():
    """A copy without its scales; rows of two dtypes in one batch."""
    model, reference = both()
    ids, images, mask = token_ids(2), pixels(2, 2), torch.tensor([[True, True], [True, False]])
    parts = [encoded(model, images[:1]), encoded(model, images[1:, :1])]
    combined = combine_images(parts)
    assert all_in_int8(combined) and combined.nbytes == 2 * parts[0].nbytes
    expected = asked(reference, ids, pixel_values=images, image_mask=mask)
    for cache in (combined, copy.deepcopy(combined), pickle.loads(pickle.dumps(combined))):
        assert_same(asked(model, ids, cache=cache), expected, equal=False)
    with pytest.raises(ValueError, match=r"Expected `caches` of one `cache_dtype`, got \['None', 'int8'\]"):
        combine_images([parts[0], model.encode_images(images[1:])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_a_file_of_int8_images_gives_the_same_answers(tmp_path, dtype):
    """A file of floats, of steps without scales, or one that another dtype is read from."""
    model, file = make_model(dtype=dtype, cross_attention_config={"quiet_softmax": True}), tmp_path / "images"
    ids, cache = token_ids(2), encoded(model, pixels(2, 2), image_mask=torch.tensor([[True, True], [True, False]]))
    save_image_cache(cache, file, model)
    assert cache.nbytes < file.stat().st_size < cache.nbytes + 3000
    loaded = load_image_cache(file, model)  # a model that was never asked for int8
    assert loaded.cache_dtype == "int8" and loaded.nbytes == cache.nbytes
    for mine, theirs in zip(loaded.cross_attention_cache.layers, cache.cross_attention_cache.layers, strict=True):
        assert mine.dtype == theirs.dtype == dtype
        assert all(map(torch.equal, mine.tensors, theirs.tensors)) and len(mine.tensors) == 4
    assert_same(asked(model, ids, cache=loaded), asked(model, ids, cache=cache))
    again = model.encode_images(pixels(2, 1, seed=8), cache=loaded)
    assert all_in_int8(again) and again.cross_attention_cache.get_seq_length() == 49


@torch.no_grad()
def test_maps_of_encoded_images():
    """Attention to rounded keys that differs from what the model computes with."""
    model, reference = both()
    ids, images = token_ids(1), pixels(1, 2)
    found = attention_maps(model, {"input_ids": ids, "cache": encoded(model, images)}, max_new_tokens=3)
    expected = attention_maps(reference, {"input_ids": ids, "pixel_values": images}, max_new_tokens=3)
    assert all(map(close, found.weights, expected.weights)) and torch.equal(found.tokens, expected.tokens)


@torch.no_grad()
def test_compiled_steps_read_int8_images_in_one_graph():
    """A graph that breaks at the scales, or compiles again for each image; a compiled step that reads steps."""
    torch._dynamo.reset()
    model, reference = both()
    backend, graphs = counting_backend()
    for index in range(2):
        ids, images = token_ids(2, 6 + index, seed=index), pixels(1, 2, seed=index)
        cache = encoded(model, images)
        expected = generate(reference, ids, pixel_values=images.expand(2, -1, -1, -1, -1))
        with torch.compiler.set_stance("default" if index == 0 else "fail_on_recompile"):
            tokens = model.generate(ids, cache=cache, max_length=12, do_sample=False, **compiled(backend))
        assert torch.equal(tokens[:, : 6 + index + 5], expected[:, :12]) and len(graphs) == 1
    step = torch.compile(model.forward, backend="eager", fullgraph=True)
    static = encoded(model, images).fork(StaticCache(config=model.config.text_config, max_cache_len=16))
    found = step(ids, cache=static, position_ids=torch.arange(7)[None]).logits
    assert close(found, reference(ids, pixel_values=images.expand(2, -1, -1, -1, -1)).logits)
    torch._dynamo.reset()


@pytest.mark.slow
@needs_exporters
@torch.no_grad()
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_decode_steps_of_a_program():
    """An exported program that loses the scales, or serves the exported images only."""
    model, ids = small(), token_ids(2, 9)
    config = model.config.text_config
    model.enable_image_store(dtype="int8")
    decode = export(model, {"input_ids": ids, "pixel_values": pixels(2, 2)}, only="decode")["decode"]
    cache = encoded(model, pixels(2, 2, seed=5)).fork(DynamicCache(config=config))
    decoded = decode_both_ways(model, decode, model(ids, cache=cache), 3, same=close)
    assert all_in_int8(decoded) and decoded.get_seq_length() == 12


def test_int8_images_refuse_gradients_and_mixed_dtypes():
    """Gradients that silently stop at the rounding, a dtype that nobody knows, two dtypes in one cache."""
    model, ids, images = make_model(), token_ids(), pixels()
    with Counted(model) as counts, pytest.raises(ValueError, match="inference only.*under `torch.no_grad"):
        model.encode_images(images, cache_dtype="int8")
    cache = encoded(model, images)
    talk = cache.fork(DynamicCache())
    with pytest.raises(ValueError, match="inference only.*under `torch.no_grad"):
        model(ids, pixel_values=pixels(seed=3), cache=talk)
    assert counts == {}, "nothing has run"
    model.train()
    with pytest.raises(ValueError, match='`cache_dtype="int8"`, which is for inference only'):
        model(ids, cache=talk, labels=ids)
    model.eval()
    assert talk.get_seq_length() == 0 and torch.isfinite(model(ids, cache=talk, labels=ids).loss)
    for wrong in ("int4", "torch.int8", "bfloat16", ""):
        expected = f"Expected `cache_dtype` to be \"int8\" or None .*, got '{wrong}'"
        with torch.no_grad(), pytest.raises(ValueError, match=expected):
            model.encode_images(images, cache_dtype=wrong)
    for wrong in (torch.int8, 8, True):
        with torch.no_grad(), pytest.raises(TypeError, match='Expected `cache_dtype` to be "int8" or None'):
            model.encode_images(images, cache_dtype=wrong)
    with torch.no_grad():
        plain = model.encode_images(images)
        with pytest.raises(ValueError, match="Expected `cache_dtype` to be None, because the images in `cache`"):
            model.encode_images(pixels(seed=3), cache=plain, cache_dtype="int8")
        assert plain.cache_dtype is None and plain.cross_attention_cache.get_seq_length() == 16
        rows = torch.tensor([0, 0])
        with pytest.raises(ValueError, match="`image_rows`"):
            model(ids, cache=cache.fork(DynamicCache()), image_rows=rows)
