"""The checks of `hf-xattn check`: each holds on a sound model, and fails on a model that was broken on purpose."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaForCausalLM, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer, StaticLayer

from helpers.models.quantized_bases import quantized_retrofit
from helpers.models.tiny_architectures import EXPERTS
from helpers.models.tiny_decoders import SERVED, make_tiny, retrofitted
from helpers.models.tiny_models import make_model, make_text, needs_part, randomize, strengthen
from hf_xattn import (
    GatedCrossAttentionBlock,
    XAttnConfig,
    XAttnForConditionalGeneration,
)
from hf_xattn.cache.cross_cache import CrossAttentionLayer
from hf_xattn.cache.xattn_cache import XAttnCache
from hf_xattn.checks import BROKEN, HOLDS, NAMES, NOT_CHECKED, run_checks
from hf_xattn.utils.transformers_api import CACHE, has, is_before, takes_cache


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr("hf_xattn.checks.STEPS", 3)


def checked(model, *names):
    """Results of some checks, by name; by default of all."""
    left_out = [name for name in NAMES if names and name not in names]
    results = {result.name: result for result in run_checks(model, left_out)}
    assert list(results) == list(NAMES)
    return {name: result for name, result in results.items() if name not in left_out}


def states_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", ["llama_tied", "gemma3"])
def test_a_sound_model_passes_every_check(name):
    """A check that fails on a sound model: with tied weights and a tower, with sliding windows and features."""
    model = make_model(name, vision=name == "llama_tied")
    before = states_of(model)
    results = checked(model)
    assert [result for result in results.values() if result.status == BROKEN] == []
    unchecked = {result.name: result.line for result in results.values() if result.status == NOT_CHECKED}
    expected = {"cache-offloaded": "offloading needs a GPU, the model is on cpu"}
    if name == "llama_tied":
        expected["cache-sliding"] = "the decoder has no sliding window"
    if name != "llama_tied" or not has("cache of FP8"):
        refusal = unchecked["cache-quantized"]
        assert refusal.startswith("the decoder itself refuses this cache: ")
        expected["cache-quantized"] = refusal
    assert unchecked == expected
    assert results["image-less-rows"].measured == results["image-less-rows"].allowed == 0
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before) and not model.training
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", SERVED)
def test_a_sound_model_of_every_architecture_passes(model_type, dtype, tmp_path):
    """A decoder on which a sound model is called broken."""
    retrofitted(make_tiny(model_type, dtype)).save_pretrained(tmp_path)
    results = checked(AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval())
    broken = {result.name for result in results.values() if result.status == BROKEN}
    if model_type == "moshi" and dtype == torch.float32:  # its cache has a sliding window, its mask has none
        assert broken == {"cache-sliding"} and "The decoder alone, without an image, " in results["cache-sliding"].line
    else:
        assert broken == set()
    assert ("rounding: its experts" in results["image-less-rows"].line) == (model_type in EXPERTS)


@pytest.mark.parametrize("vision", [True, False])
def test_rows_that_see_the_image_of_another(vision, monkeypatch):
    """A branch that reaches rows without an image, by a little."""
    model = make_model(vision=vision)
    forward = GatedCrossAttentionBlock.forward
    monkeypatch.setattr(GatedCrossAttentionBlock, "forward", lambda *args, **named: forward(*args, **named) + 1e-4)
    (result,) = checked(model, "image-less-rows").values()
    assert result.status == BROKEN and 1e-6 < result.measured < 1 and result.allowed == 0


@torch.no_grad()
def test_rows_of_8_bit_layers():
    """Rounding by other rows that is called a leak: with large activations, these layers choose columns by the values
    of all rows.
    """
    model = quantized_retrofit("bitsandbytes_8bit")
    for block in model.blocks:
        block.attn.o_proj.weight.mul_(100)
        block.mlp.down_proj.weight.mul_(30)
    for name, module in model.model.text_model.named_modules():
        if name.endswith("layernorm"):
            module.weight.mul_(5)
    (result,) = checked(model, "image-less-rows").values()
    assert result.status == HOLDS and 0 < result.measured < result.allowed
    assert "(rounding: bitsandbytes chooses" in result.line


FLAMINGO = {"zero_init": False, "gate_init": 0.0}


@pytest.mark.parametrize(
    "config", [{}, FLAMINGO, {"gate": "none"}, {"mlp_type": "none"}, {**FLAMINGO, "mlp_type": "none"}], ids=str
)
def test_a_fresh_model_passes_every_check(config):
    """A fresh model that fails, or whose caches are compared while its images change nothing."""
    model = make_model(random=False, cross_attention_config=config)
    before = states_of(model)
    results = checked(model, "image-less-rows", "cache-dynamic")
    for name in ("image-less-rows", "cache-dynamic"):
        assert results[name].status == HOLDS and "fresh blocks get random weights here" in results[name].line
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def changing_when_kept(monkeypatch, change):
    """Changes keys and values of images that outlive the call which has encoded them."""
    note = XAttnCache.note_images

    def noted(cache, *args, **kwargs):
        for layer in cache.cross_attention_cache.layers:
            layer.keys, layer.values = change(layer.keys), change(layer.values)
        note(cache, *args, **kwargs)

    monkeypatch.setattr(XAttnCache, "note_images", noted)


def test_caches_of_a_fresh_model_can_fail(monkeypatch):
    """A lie about images that a model without trained blocks hides."""
    changing_when_kept(monkeypatch, lambda part: 2 * part)
    (result,) = checked(make_model(random=False), "cache-dynamic").values()
    assert result.status == BROKEN


@pytest.mark.parametrize(
    "kind",
    [
        "cache-dynamic",
        "cache-static",
        pytest.param("cache-quantized", marks=needs_part("cache of FP8")),
        "cache-encoded",
        "cache-continued",
    ],
)
def test_a_cache_that_lies_about_images(kind, monkeypatch):
    """Keys and values of another image in a later step."""
    model = make_model()
    (sound,) = checked(model, kind).values()
    assert sound.status == HOLDS and sound.measured < sound.allowed
    changing_when_kept(monkeypatch, lambda part: 8 * part.flip(2))
    (result,) = checked(model, kind).values()
    assert result.status == BROKEN and result.measured > result.allowed
    assert "LlamaForCausalLM by itself, without an image, is right: " in result.line


@pytest.mark.parametrize(
    ("kind", "layer", "name"),
    [("cache-sliding", DynamicSlidingWindowLayer, "gemma3"), ("cache-static", StaticLayer, "llama")],
)
def test_a_cache_that_lies_about_text(kind, layer, name, monkeypatch):
    """Text that one kind of cache loses, and the others keep."""
    model, update = make_model(name), layer.update

    def lie(self, *args, **kwargs):
        keys, values = update(self, *args, **kwargs)
        return (keys.flip(1), values) if keys.shape[-2] > args[0].shape[-2] > 0 else (keys, values)

    monkeypatch.setattr(layer, "update", lie)
    (result,) = checked(model, kind).values()
    assert result.status == BROKEN and "The decoder alone, without an image, " in result.line


def test_a_cache_that_the_model_refuses():
    """A sound model that is called broken, because its decoder has no right static cache."""
    (result,) = checked(randomize(retrofitted(make_tiny("gpt_neo"))), "cache-static").values()
    assert result.status == NOT_CHECKED and "GPTNeoForCausalLM" in result.line and "also without blocks" in result.line


@needs_part("prefill_chunk_size")
def test_text_that_a_decoder_forgets():
    """A decoder of custom code that drops its state where text follows cached text."""
    model = randomize(retrofitted(strengthen(make_tiny("jamba"))))
    (result,) = checked(model, "cache-continued").values()
    assert result.status == HOLDS
    model.model._interface = model.model._interface._replace(forgets=None)
    (result,) = checked(model, "cache-continued").values()
    assert result.status == BROKEN and "The decoder alone, without an image, " in result.line


class ForgetfulLlama(LlamaForCausalLM):
    """A decoder that takes a cache and ignores it."""

    @takes_cache
    def forward(self, input_ids=None, cache=None, use_cache=None, **kwargs):
        return super().forward(input_ids, use_cache=False, **kwargs)


def test_a_decoder_that_ignores_its_cache():
    """A fault that the base has alone and that is taken for one of the blocks, or a base that nobody could ask and
    that is called right.
    """
    text = ForgetfulLlama(make_text().config).eval()
    config = XAttnConfig(text_config=text.config, cross_attention_config={"context_size": 16})
    model = randomize(XAttnForConditionalGeneration(config, text_model=strengthen(text)).eval())
    for result in checked(model, "cache-dynamic", "cache-encoded", "cache-continued").values():
        assert result.status == BROKEN and result.line.endswith(" off, too: the fault is that of ForgetfulLlama")
    mamba = randomize(retrofitted(strengthen(make_tiny("mamba"))))
    mamba.model._interface = mamba.model._interface._replace(forgets=False)
    (result,) = checked(mamba, "cache-continued").values()
    unasked = "MambaForCausalLM by itself cannot be asked: it raises "
    told = unasked if is_before("5.24.0") else "off, too: the fault is that of MambaForCausalLM"
    assert result.status == BROKEN and told in result.line


def test_a_decoder_that_wants_no_cache():
    """No cache at all, which equals no cache (as MPT's configuration asks)."""
    model = make_model()
    model.config.text_config.use_cache = model.generation_config.use_cache = False
    results = checked(model, "cache-dynamic", "cache-encoded")
    assert {result.status for result in results.values()} == {HOLDS}, results


def test_a_cache_that_raises(monkeypatch):
    """An error of ours that is taken for a cache which the decoder does not have."""
    model = make_model()

    def fail(layer):
        raise RuntimeError("no keys\nmore")

    monkeypatch.setattr(CrossAttentionLayer, "read", fail)
    (result,) = checked(model, "cache-static").values()
    assert result.status == BROKEN and result.line == "raised RuntimeError: no keys"


def test_sliding_windows_that_are_too_long(monkeypatch):
    """A text of many thousand tokens without a cache, which seems to hang."""
    monkeypatch.setattr("hf_xattn.checks.LONGEST_WINDOW", 5)
    (result,) = checked(make_model("gemma3"), "cache-sliding").values()
    assert result.status == NOT_CHECKED and result.line == "its window of 6 tokens is longer than 5"


def test_a_model_that_raises():
    """A traceback in the place of the other checks."""
    model = make_model()

    def fail(*args):
        raise IndexError("nothing there")

    model.blocks[0].register_forward_hook(fail)
    results = checked(model, "image-less-rows", "cache-dynamic")
    assert all(
        result.status == BROKEN and result.line == "raised IndexError: nothing there" for result in results.values()
    )


def test_an_unknown_name_of_a_check_is_refused():
    """A check that someone wants to leave out and misspells, after an hour of others."""
    with pytest.raises(ValueError, match="Expected `--skip` to be one of image-less-rows, .*, got 'caches'"):
        run_checks(make_model(), skip=["caches"])


def test_the_dynamic_cache_is_one(monkeypatch):
    """A dynamic cache that is said to hold, where the generation configuration makes a static one."""
    model = make_model()
    model.generation_config.cache_implementation = "static"
    made = []
    own = type(model)._prepare_cache_for_generation

    def prepare(self, config, kwargs, *args, **more):
        result = own(self, config, kwargs, *args, **more)
        made.append(type(getattr(kwargs.get(CACHE), "self_attention_cache", None)))
        return result

    monkeypatch.setattr(type(model), "_prepare_cache_for_generation", prepare)
    assert checked(model, "cache-dynamic")["cache-dynamic"].status == HOLDS
    assert DynamicCache in made and StaticCache not in made
