"""`keep_image_tokens` in `generate` and in conversations: what is kept belongs to one text and follows its rows."""

import copy

import pytest
import torch
from chat_models import answer, drawing, make_chat_model, question
from conftest import make_model, pixels, token_ids
from conversation_helpers import MARKER, close, fresh_cache, generate, marked, states_of
from kept_tokens import Case, kept_of, lengths
from test_architectures import make_tiny, retrofitted
from test_compile import GREEDY, compiled, counting_backend
from test_export import decode_both_ways, export, needs_exporters, small
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

from hf_xattn.architectures import ARCHITECTURES
from hf_xattn.chat_session import ChatSession
from hf_xattn.image_cache import combine_images, save_image_cache, select_images
from hf_xattn.inspection import key_value_bytes_per_token
from hf_xattn.transformers_api import is_before


LAYERS = [0, 1, 3]
STEPS = 5


def model_of(**config):
    return make_model(cross_attention_layers=LAYERS, **config)


def case_of(batch=2, num_images=2, padded=0, **config):
    inputs = {"input_ids": token_ids(batch), "pixel_values": pixels(batch, num_images)}
    if padded:
        inputs["attention_mask"] = torch.ones(batch, 7, dtype=torch.long)
        inputs["attention_mask"][0, :padded] = 0
    return Case(model_of(**config), inputs)


METHODS = {
    "greedy": {},
    "static": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "sequences": {"do_sample": True, "top_k": 1, "num_return_sequences": 2},
}


@torch.no_grad()
@pytest.mark.parametrize("padded", [0, 3])
@pytest.mark.parametrize("method", METHODS)
def test_generate_uses_the_tokens_that_the_prompt_has_chosen(method, padded):
    """Steps that see other tokens than the prompt has chosen; padding of the prompt that chooses, where a static cache hides its mask;
    an image row chosen for each beam."""
    case = case_of(padded=padded)
    expected = case.continued(0.25, STEPS)
    options = {"max_new_tokens": STEPS, "do_sample": False, **METHODS[method]}
    outputs = case.model.generate(
        **case.inputs, **options, keep_image_tokens=0.25, return_dict_in_generate=True, output_scores=True
    )
    cache = outputs.past_key_values
    assert lengths(cache) == [32, 8, 8]
    assert torch.equal(kept_of(cache, 32), case.kept(0.25))
    if method != "beams":
        repeats = len(outputs.sequences) // 2
        assert torch.equal(outputs.sequences, expected.repeat_interleave(repeats, dim=0))
    plain = case.model.generate(**case.inputs, **options, return_dict_in_generate=True, output_scores=True)
    assert not close(torch.stack(outputs.scores), torch.stack(plain.scores))


@torch.no_grad()
@pytest.mark.parametrize("method", ["prompt lookup", "assistant"])
def test_candidates_choose_nothing(method):
    """Guesses of an assistant that choose image tokens, so the answer depends on who guesses; a crop of the guesses that is refused."""
    case = case_of(1)
    case.inputs["input_ids"][0, 4:7] = case.inputs["input_ids"][0, 0:3]
    expected = case.continued(0.25, STEPS)
    options = {"prompt_lookup_num_tokens": 3}
    if method == "assistant":
        options = {"assistant_model": copy.deepcopy(case.model.model.text_model)}
    tokens = generate(
        case.model,
        case.inputs["input_ids"],
        pixel_values=case.inputs["pixel_values"],
        keep_image_tokens=0.25,
        **options,
    )
    assert torch.equal(tokens, expected)


def test_one_graph_for_all_steps():
    """A decode step that compiles again for other tokens that were kept."""
    case = case_of()
    backend, graphs = counting_backend()
    for index in range(2):
        ids, images = token_ids(2, 7 + index, seed=index), pixels(2, 2, seed=index)
        options = {**GREEDY, "max_length": 16, "pixel_values": images, "keep_image_tokens": 0.25}
        expected = case.model.generate(ids, **options)
        with torch.compiler.set_stance("default" if index == 0 else "fail_on_recompile"):
            assert torch.equal(case.model.generate(ids, **options, **compiled(backend)), expected)
        assert len(graphs) == 1
    torch._dynamo.reset()


@torch.no_grad()
def test_bytes_and_projections_of_generate():
    """Keys of dropped tokens that are projected, or stay in memory as views of all."""
    model, seen = model_of(), []
    for block in model.blocks:
        block.attn.k_proj.register_forward_hook(lambda module, inputs, output: seen.append(tuple(output.shape[:2])))
    cache = generate(
        model, token_ids(), pixel_values=pixels(2, 2), keep_image_tokens=0.25, return_dict_in_generate=True
    ).past_key_values
    assert seen == [(2, 32), (2, 8), (2, 8)], "once, in the first forward"
    layers = cache.cross_attention_cache.layers
    held = sum(part.untyped_storage().nbytes() for layer in layers for part in (layer.keys, layer.values))
    a_token = key_value_bytes_per_token(model.config.cross_attention_config, 1, torch.float32)
    assert held == 2 * a_token * (32 + 8 + 8)


@torch.no_grad()
@pytest.mark.parametrize("quiet", [False, True])
def test_encoded_images_stay_whole(quiet):
    """The silent wrong answer: tokens that one question has chosen, in the answer to another one."""
    model = model_of(cross_attention_config={"quiet_softmax": quiet})
    images = model.encode_images(pixel_values=pixels(2, 2))
    before = [(layer.keys.clone(), layer.values.clone()) for layer in images.cross_attention_cache.layers]
    for seed in (1, 2):
        ids = token_ids(2, seed=seed)
        expected = generate(
            model,
            ids,
            pixel_values=pixels(2, 2),
            keep_image_tokens=0.25,
            return_dict_in_generate=True,
            output_scores=True,
        )
        asked = generate(
            model, ids, past_key_values=images, keep_image_tokens=0.25, return_dict_in_generate=True, output_scores=True
        )
        assert close(torch.stack(asked.scores), torch.stack(expected.scores))
        assert torch.equal(kept_of(asked.past_key_values, 32), kept_of(expected.past_key_values, 32))
        assert lengths(asked.past_key_values) == [32 + quiet, 8 + quiet, 8 + quiet]
        assert lengths(images) == [32 + quiet] * 3 and images.cross_attention_cache.layout.kept is None
    for layer, (key, value) in zip(images.cross_attention_cache.layers, before, strict=True):
        assert torch.equal(layer.keys, key) and torch.equal(layer.values, value)
    plain = generate(model, ids, past_key_values=images)
    assert torch.equal(plain, generate(model, ids, pixel_values=pixels(2, 2)))


@torch.no_grad()
def test_the_image_store_keeps_all_tokens():
    """Keys of one question's tokens, stored under the image for all questions."""
    model = model_of()
    asked = {seed: {"ids": token_ids(2, seed=seed), "pixel_values": pixels(2, 2)} for seed in (1, 2)}
    shares = (0.25, None, 0.5)
    expected = {(s, k): generate(model, **asked[s], keep_image_tokens=k) for s in asked for k in shares}
    model.enable_image_store()
    whole = None
    for seed in (1, 2, 1):
        for share in shares:
            outputs = generate(model, **asked[seed], keep_image_tokens=share, return_dict_in_generate=True)
            assert torch.equal(outputs.sequences, expected[seed, share]), (seed, share)
            assert lengths(outputs.past_key_values)[1] == {0.25: 8, 0.5: 16, None: 32}[share]
            whole = whole or model.image_store.nbytes
            assert model.image_store.nbytes == whole
    assert whole == 4 * 16 * key_value_bytes_per_token(model.config.cross_attention_config, 3, torch.float32)
    assert model.image_store.misses == 4


@torch.no_grad()
def test_questions_that_share_an_image_choose_together():
    """Rows of one image row with tokens of their own, for which its keys have no place."""
    model, ids = model_of(), token_ids(6)
    images = model.encode_images(pixel_values=pixels(2, 2))
    cache = images.fork(DynamicCache(config=model.config.text_config))
    logits = model(ids, past_key_values=cache, keep_image_tokens=0.25).logits
    inputs = {"input_ids": ids, "pixel_values": pixels(2, 2), "image_rows": torch.arange(6) // 3}
    case = Case(model, inputs)
    assert torch.equal(kept_of(cache, 32), case.kept(0.25))
    assert close(logits, case.expected(0.25))


def two_turns(model, share, later_images=None, later_share=None):
    """Logits of a second turn with the cache of the first one, and the cache."""
    ids, cache = token_ids(2, 12), fresh_cache()
    model(ids[:, :7], pixel_values=pixels(2, 1), past_key_values=cache, keep_image_tokens=share)
    second = model(ids[:, 7:], pixel_values=later_images, past_key_values=cache, keep_image_tokens=later_share)
    return second.logits, cache


@torch.no_grad()
@pytest.mark.parametrize("later_share", [None, 0.25, 1.0])
def test_later_images(later_share):
    """Images of a second turn at the place of dropped tokens, or dropped by the first text, which has not seen them."""
    model = model_of()
    logits, cache = two_turns(model, 0.5, pixels(2, 1, seed=9), later_share)
    new = 4 if later_share == 0.25 else 16
    assert lengths(cache) == [32, 8 + new, 8 + new]
    kept = kept_of(cache, 32)
    assert kept[:, :16].sum(-1).tolist() == [8, 8] and kept[:, 16:].sum(-1).tolist() == [new, new]
    _, first = two_turns(model, 0.5)
    assert torch.equal(kept_of(first, 16), kept[:, :16]), "an image is decided about once"
    # Keys of the second image are those of its own kept tokens.
    whole = model.encode_images(pixel_values=torch.cat([pixels(2, 1), pixels(2, 1, seed=9)], dim=1))
    for held, layer in zip(cache.cross_attention_cache.layers[1:], whole.cross_attention_cache.layers[1:], strict=True):
        for row in range(2):
            assert close(held.keys[row], layer.keys[row][:, kept[row]])
            assert close(held.values[row], layer.values[row][:, kept[row]])
    # A third turn decides only about what nobody has decided about.
    again = copy.deepcopy(cache)
    third = model(token_ids(2, 3, seed=5), past_key_values=cache).logits
    decided = model(token_ids(2, 3, seed=5), past_key_values=again, keep_image_tokens=0.125).logits
    assert close(third, decided) == (later_share == 0.25)
    assert torch.equal(kept_of(again, 32)[:, :16], kept[:, :16]) and lengths(cache) == [32, 8 + new, 8 + new]
    assert lengths(again)[1:] == ([12, 12] if later_share == 0.25 else [10, 10])
    assert logits.shape[1] == 5


@torch.no_grad()
def test_images_that_are_appended_without_a_text():
    """`encode_images` into a conversation that has dropped tokens."""
    model, (_, cache) = model_of(), two_turns(model_of(), 0.5)
    model.encode_images(pixels(2, 1, seed=9), past_key_values=cache)
    assert lengths(cache) == [32, 24, 24]
    model(token_ids(2, 3), past_key_values=cache, keep_image_tokens=0.25)
    assert lengths(cache) == [32, 12, 12]


@torch.no_grad()
def test_images_that_a_row_has_not_seen_yet():
    """Tokens dropped by a text that has not seen the image, and tokens that the first text to see it cannot drop."""
    model = marked("previous", cross_attention_layers=LAYERS)
    cache = model.encode_images(pixel_values=pixels(2, 2)).fork(DynamicCache(config=model.config.text_config))
    ids = token_ids(2, 12)
    ids[:, 0] = ids[0, 3] = ids[1, 8] = MARKER  # the second row sees its second image in the second turn
    model(ids[:, :7], past_key_values=cache, keep_image_tokens=0.25)
    assert kept_of(cache, 32).unflatten(1, (2, 16)).sum(-1).tolist() == [[4, 4], [4, 16]]
    assert lengths(cache) == [32, 20, 20]
    first = kept_of(cache, 32)
    # The rest in one turn, or token by token: a step without `keep_image_tokens` leaves everything.
    steps = copy.deepcopy(cache)
    for index in range(7, 12):
        model(ids[:, index : index + 1], past_key_values=steps)
    assert torch.equal(kept_of(steps, 32), first)
    model(ids[:, 7:], past_key_values=cache, keep_image_tokens=0.25)
    assert kept_of(cache, 32).unflatten(1, (2, 16)).sum(-1).tolist() == [[4, 4], [4, 4]]
    assert torch.equal(kept_of(cache, 32)[0], first[0]) and torch.equal(kept_of(cache, 32)[1, :16], first[1, :16])


@torch.no_grad()
@pytest.mark.parametrize("way", ["pixels", "encoded", "store", "forward", "next turn"])
def test_images_that_a_mask_hides(way):
    """Tokens dropped of an image that the caller's mask hides from the prompt, where the mask comes from the cache."""
    model, ids, images = model_of(), token_ids(2), {"pixel_values": pixels(2, 2)}
    mask = torch.ones(2, 7, 32, dtype=torch.bool)
    mask[0, :, 16:] = False
    given = {"cross_attention_mask": mask, "keep_image_tokens": 0.5}
    if way == "store":
        model.enable_image_store()
    if way == "encoded":
        images = {"past_key_values": model.encode_images(**images)}
    if way in ("forward", "next turn"):
        cache = fresh_cache()
        share = given.pop("keep_image_tokens")
        first = share if way == "forward" else None
        model(ids, past_key_values=cache, **images, **given, keep_image_tokens=first)
        if way == "next turn":  # the last row of the mask still applies
            model(token_ids(2, 3, seed=8), past_key_values=cache, keep_image_tokens=share)
    else:
        cache = generate(model, ids, **images, **given, return_dict_in_generate=True).past_key_values
    kept = kept_of(cache, 32)
    assert kept.unflatten(1, (2, 16)).sum(-1).tolist() == [[8, 16], [8, 8]]
    if way != "next turn":
        real = {"input_ids": ids, "pixel_values": pixels(2, 2), "cross_attention_mask": mask}
        assert torch.equal(kept, Case(model, real, sees=mask).kept(0.5))


@torch.no_grad()
def test_rows_without_text():
    """Tokens of an image dropped at random, because its row of the batch holds padding alone this time."""
    model, (ids, later) = model_of(), (token_ids(2), token_ids(2, 5, seed=8))
    cache, alone = fresh_cache(), fresh_cache()
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1] = 0
    model(ids, attention_mask=mask, pixel_values=pixels(2, 1), past_key_values=cache, keep_image_tokens=0.25)
    assert kept_of(cache, 16).sum(-1).tolist() == [4, 16]
    mask = torch.cat([mask, torch.ones(2, 5, dtype=torch.long)], dim=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, 7:]
    given = {"attention_mask": mask, "position_ids": positions}
    logits = model(later, past_key_values=cache, keep_image_tokens=0.25, **given).logits
    expected = model(later[1:], pixel_values=pixels(2, 1)[1:], past_key_values=alone, keep_image_tokens=0.25).logits
    assert torch.equal(kept_of(cache, 16)[1:], kept_of(alone, 16)) and close(logits[1:], expected)


@torch.no_grad()
def test_padding_with_nan():
    """Padding that nobody may see, in the attention of a call that chooses tokens or of one after it."""
    model, ids, real = model_of(), token_ids(2), torch.tensor([[True, False], [True, True]])
    clean = states_of(model, pixels(2, 2))
    broken = clean.clone()
    broken[0, 1] = torch.nan
    results = []
    for states in (clean, broken):
        cache, images = fresh_cache(), {"cross_attention_states": states, "image_mask": real}
        tokens = generate(model, ids, keep_image_tokens=0.5, **images)
        first = model(ids, past_key_values=cache, keep_image_tokens=0.5, **images).logits
        new = {**images, "cross_attention_states": states + 1}
        results.append((tokens, first, model(ids, past_key_values=cache, **new).logits))
    for expected, found in zip(*results, strict=True):
        assert torch.equal(found, expected)


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_embeddings_choose_as_their_ids(implementation):
    """Padding that chooses, where a prompt of embeddings meets a static cache, whose mask does not tell padding."""
    case = case_of(padded=3)
    ids = case.inputs.pop("input_ids")
    options = {"keep_image_tokens": 0.25, "max_new_tokens": STEPS, "cache_implementation": implementation}
    embeds = case.model.get_input_embeddings()(ids)
    tokens = case.model.generate(inputs_embeds=embeds, **case.inputs, **options, do_sample=False)
    case.inputs["input_ids"] = ids
    assert torch.equal(tokens, case.continued(0.25, STEPS)[:, ids.shape[1] :])


@pytest.mark.skipif(is_before(ARCHITECTURES["bloom"].static_since), reason="Bloom has no static cache here")
@torch.no_grad()
def test_padding_does_not_choose_in_a_mask_as_long_as_the_cache():
    """The wrong columns of a mask that goes on behind the text, as Bloom needs it with a static cache."""
    model, ids, states = retrofitted(make_tiny("bloom")), token_ids(2, 7), torch.randn(2, 8, 16)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    found = []
    for own in (DynamicCache(), StaticCache(config=model.config.text_config, max_cache_len=16)):
        covered = torch.nn.functional.pad(mask, (0, 0 if isinstance(own, DynamicCache) else 9))
        cache, given = EncoderDecoderCache(own, DynamicCache()), {"cross_attention_states": states}
        model(ids, attention_mask=covered, past_key_values=cache, **given, keep_image_tokens=0.25)
        found.append(kept_of(cache, 8))
    assert torch.equal(*found)


@torch.no_grad()
@pytest.mark.parametrize("change", ["select", "reorder", "repeat"])
def test_rows_take_their_tokens_along(change):
    """Rows that see the tokens of another row after a selection."""
    model, ids = model_of(), token_ids(2, 10)
    real = torch.rand(2, 32, generator=torch.Generator().manual_seed(0)) < 0.4  # rows keep other numbers of tokens, too
    inputs = {"pixel_values": pixels(2, 2), "cross_attention_mask": real, "keep_image_tokens": 0.5}
    cache, rows = fresh_cache(), torch.tensor([1, 0, 1])
    model(ids[:, :7], past_key_values=cache, **inputs)
    expected = model(ids[:, 7:], past_key_values=copy.deepcopy(cache)).logits
    if change == "select":
        cache.batch_select_indices(rows)
    elif change == "reorder":
        rows = rows[:2]
        cache.reorder_cache(rows)
    else:
        rows = torch.tensor([0, 0, 1, 1])
        cache.batch_repeat_interleave(2)
    assert close(model(ids[rows, 7:], past_key_values=cache).logits, expected[rows])


@torch.no_grad()
def test_the_text_that_has_chosen_cannot_be_removed():
    """Another question that gets the tokens of a question that is gone."""
    model, ids = model_of(), token_ids(2, 10)
    cache = fresh_cache()
    model(ids[:, :7], pixel_values=pixels(2, 2), past_key_values=cache, keep_image_tokens=0.25)
    expected = model(ids[:, 7:], past_key_values=copy.deepcopy(cache)).logits
    model(token_ids(2, 4, seed=8), past_key_values=cache)
    cache.crop(-4)
    assert close(model(ids[:, 7:], past_key_values=copy.deepcopy(cache)).logits, expected), "later text may go"
    with pytest.raises(ValueError, match="the text that has chosen the image tokens .*6 of its 7 tokens are left"):
        cache.crop(-1)
    assert cache.get_seq_length() == 7, "a refused crop changes nothing"
    cache.self_attention_cache.crop(-2)
    with pytest.raises(ValueError, match="5 of its 7 tokens are left"):
        model(ids[:, 7:], past_key_values=cache)
    cache.reset()
    plain = model(ids, pixel_values=pixels(2, 2)).logits
    assert close(model(ids, pixel_values=pixels(2, 2), past_key_values=cache).logits, plain)


@torch.no_grad()
def test_what_is_for_all_texts_refuses_dropped_tokens(tmp_path):
    """Keys of one question's tokens in a file, in another batch, or in another conversation."""
    model = model_of()
    cache = model.encode_images(pixel_values=pixels())
    model(token_ids(), past_key_values=cache, keep_image_tokens=0.25)
    calls = {
        "select_images": lambda: select_images(cache, [0]),
        "combine_images": lambda: combine_images([model.encode_images(pixel_values=pixels()), cache]),
        "save_image_cache": lambda: save_image_cache(cache, tmp_path / "images.safetensors", model),
        "fork": lambda: cache.fork(DynamicCache(config=model.config.text_config)),
    }
    for call in calls.values():
        with pytest.raises(ValueError, match=r"to hold all image tokens, got .*\(`keep_image_tokens`\)"):
            call()
    from hf_xattn.xattn_cache import XAttnCache

    stolen = XAttnCache(DynamicCache(config=model.config.text_config), cache.cross_attention_cache)
    with pytest.raises(ValueError, match="the text half is empty"):
        model(token_ids(seed=8), past_key_values=stolen)


@torch.no_grad()
def test_a_failed_call_drops_nothing(monkeypatch):
    """A cache without the tokens that a call has dropped before it failed."""
    model = model_of()
    cache = model.encode_images(pixel_values=pixels(2, 2))
    handle = model.blocks[-1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(token_ids(), past_key_values=cache, keep_image_tokens=0.25)
    handle.remove()
    assert lengths(cache) == [32, 32, 32] and cache.cross_attention_cache.layout.kept is None
    assert close(model(token_ids(), past_key_values=cache).logits, model(token_ids(), pixel_values=pixels(2, 2)).logits)


@torch.no_grad()
def test_turns_of_generate():
    """A second turn that chooses again from what the first has left, or that loses its images."""
    model, cache = model_of(), EncoderDecoderCache(DynamicCache(), DynamicCache())
    first = generate(model, token_ids(1), pixel_values=pixels(1, 1), past_key_values=cache, keep_image_tokens=0.5)
    kept = kept_of(cache, 16)
    text = torch.cat([first, token_ids(1, 4, seed=8)], dim=1)
    both = torch.cat([pixels(1, 1), pixels(1, 1, seed=9)], dim=1)
    generate(model, text, pixel_values=both, past_key_values=cache, keep_image_tokens=0.25)
    assert lengths(cache) == [32, 12, 12]
    assert torch.equal(kept_of(cache, 32)[:, :16], kept)


def test_calls_of_generate_that_cannot_choose_once():
    """Chunks or steps that choose other tokens than the whole prompt."""
    model, inputs = model_of(), {"pixel_values": pixels(), "keep_image_tokens": 0.5}
    with pytest.raises(ValueError, match="`keep_image_tokens` without `prefill_chunk_size`, got 4"):
        generate(model, token_ids(), prefill_chunk_size=4, **inputs)
    with pytest.raises(ValueError, match="`keep_image_tokens` with a cache, got `use_cache=False`"):
        generate(model, token_ids(), use_cache=False, **inputs)
    with pytest.raises(ValueError, match="`input_ids` or `inputs_embeds` with `keep_image_tokens`"):
        model.generate(max_new_tokens=2, **inputs)
    assert generate(model, token_ids(), prefill_chunk_size=4, **{**inputs, "keep_image_tokens": 1}).shape == (2, 12)


@torch.no_grad()
def test_contexts_that_device_hooks_rebuild():
    """A context that accelerate copies for each layer, without the tokens that the first block has chosen."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    from hf_xattn.decoder import find_decoder

    model, ids = model_of(), token_ids(2, 10)
    inputs = {"pixel_values": pixels(2, 2), "keep_image_tokens": 0.25}

    def both_turns():
        cache = fresh_cache()
        first = model(ids[:, :7], past_key_values=cache, **inputs).logits
        return first, model(ids[:, 7:], past_key_values=cache, output_attentions=True)

    expected_first, expected = both_turns()
    for layer in find_decoder(model.model.text_model)[1]:
        add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    first, second = both_turns()
    assert torch.equal(first, expected_first) and torch.equal(second.logits, expected.logits)
    for weights, wanted in zip(second.cross_attentions, expected.cross_attentions, strict=True):
        assert torch.equal(weights, wanted) and weights.shape[-1] == 32


@torch.no_grad()
def test_a_chat_that_takes_back_its_question(tmp_path):
    """A new question that gets the tokens of the one that was taken back, because the cache was cropped."""
    folder = make_chat_model(tmp_path, chat_template=None)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor = AutoProcessor.from_pretrained(folder)
    options = {"keep_image_tokens": 0.25, "max_new_tokens": 4, "do_sample": False}
    session = ChatSession(model, processor, **options)
    session.ask("what is it ?", [drawing(1)])
    first = session._cache
    session.ask("and this ?", [drawing(2)])
    assert session._cache is first and len(set(lengths(first))) == 2, "the second turn goes on with the cache"
    session.messages = []
    said = session.ask("which colour is it ?", [drawing(1)])
    assert session._cache is not first
    assert said == answer(model, processor, [question("which colour is it ?", drawing(1))], **options)
    # Maps of all tokens would not be those of this answer.
    with pytest.raises(ValueError, match="`attention_maps` without `keep_image_tokens`, got 0.25"):
        session.maps(session.answers[-1])


@needs_exporters
@torch.no_grad()
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_exported_programs():
    """A program that reads dropped tokens, or one with the tokens of the prompt that it was traced with."""
    model, inputs = small(), {"input_ids": token_ids(2, 9), "pixel_values": pixels(2, 2), "keep_image_tokens": 0.25}
    decode = export(model, inputs, only="decode")["decode"]
    cache = decode_both_ways(model, decode, model(**inputs), 3)
    assert lengths(cache) == [32, 8]
    with pytest.raises(ValueError, match="exported program, which does not know how much"):
        cache.crop(-1)
    with pytest.raises(Exception) as raised:  # the exporter's own, with a cause
        export(model, inputs, dynamic=False)
    causes, error = [], raised.value
    while error is not None:
        causes.append(str(error))
        error = error.__cause__ or error.__context__
    assert any("TokenChoice" in cause or "`keep_image_tokens` outside of" in cause for cause in causes), causes
