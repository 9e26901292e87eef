"""The checks of `hf-xattn check`: each holds on a sound model, and fails on a model that was broken on purpose."""

import gc
import weakref

import pytest
import torch
from quantized_bases import quantized_retrofit
from tiny_architectures import EXPERTS
from tiny_decoders import SERVED, make_tiny, retrofitted
from tiny_models import make_model, make_text, needs_part, randomize, strengthen
from transformers import AutoModelForCausalLM, DynamicCache, LlamaForCausalLM, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer, StaticLayer
from transformers.integrations.peft import MIN_PEFT_VERSION

from hf_xattn import (
    GatedCrossAttention,
    GatedCrossAttentionBlock,
    XAttnConfig,
    XAttnForConditionalGeneration,
    retrofit,
)
from hf_xattn.cache.cross_cache import CrossAttentionLayer
from hf_xattn.cache.xattn_cache import XAttnCache
from hf_xattn.checks import BROKEN, FRESH, HOLDS, NAMES, NOT_CHECKED, run_checks
from hf_xattn.checks.weights import load_base
from hf_xattn.images.image_encoder import ImageEncoder
from hf_xattn.utils.transformers_api import CACHE, has, is_before, takes_cache


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr("hf_xattn.checks.caches.STEPS", 3)


CACHES = [name for name in NAMES if name.startswith("cache-")]


def reload(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def checked(model, *names, base=None, load=reload, **options):
    """Results of some checks, by name; by default of all."""
    left_out = [name for name in NAMES if names and name not in names]
    given = None if base is None else lambda: base
    results = {result.name: result for result in run_checks(model, load, given, skip=left_out, **options)}
    assert list(results) == list(NAMES)
    return {name: result for name, result in results.items() if name not in left_out}


def states_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", ["llama_tied", "gemma3"])
def test_a_sound_model(name):
    """A check that fails on a sound model: with tied weights and a tower, with sliding windows and features."""
    model, base = make_model(name, vision=name == "llama_tied"), make_text(name)
    before = states_of(model)
    results = checked(model, base=base)
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
    assert results["base-weights"].measured == results["text-only"].measured == results["image-less-rows"].measured == 0
    assert "against the base" in results["text-only"].line and results["image-less-rows"].allowed == 0
    assert results["blocks-alive"].status == HOLDS and results["blocks-alive"].measured > 0
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before) and not model.training
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", SERVED)
def test_every_architecture(model_type, dtype, tmp_path):
    """A decoder on which a sound model is called broken."""
    text = make_tiny(model_type, dtype)
    text.save_pretrained(tmp_path / "text")
    retrofitted(text).save_pretrained(tmp_path / "model")
    model = reload(tmp_path / "model")
    results = checked(model, base=load_base(model, str(tmp_path / "text")))
    broken = {result.name for result in results.values() if result.status == BROKEN}
    if model_type == "moshi" and dtype == torch.float32:  # its cache has a sliding window, its mask has none
        assert broken == {"cache-sliding"} and "The decoder alone, without an image, " in results["cache-sliding"].line
    else:
        assert broken == set()
    assert ("rounding: its experts" in results["image-less-rows"].line) == (model_type in EXPERTS)


def test_changed_base_weights():
    """A base that was trained along, one value of it, and nobody is told which tensors."""
    model, base = make_model(), make_text()
    with torch.no_grad():
        model.model.text_model.model.layers[2].mlp.up_proj.weight[3, 4] += 0.5
        model.model.text_model.model.norm.weight[0] = -0.0 if model.model.text_model.model.norm.weight[0] == 0 else 2.0
    results = checked(model, "base-weights", "text-only", base=base)
    assert results["base-weights"].status == BROKEN and results["base-weights"].measured == 2
    assert "model.layers.2.mlp.up_proj.weight (by 5.0e-01)" in results["base-weights"].line
    assert "model.norm.weight" in results["base-weights"].line
    assert results["text-only"].status == BROKEN and results["text-only"].measured > 0


def test_other_tensors_than_the_base():
    """A base of another size, or with a head of its own, that passes for the same."""
    model, base = make_model("llama_tied"), make_text("llama")
    (result,) = checked(model, "base-weights", base=base).values()
    assert result.status == BROKEN and "lm_head.weight" in result.line
    base.resize_token_embeddings(100)
    (result,) = checked(make_model(), "base-weights", base=base).values()
    assert result.status == BROKEN and "(shape (96, 32), not (100, 32))" in result.line


def test_adapters_on_the_base():
    """LoRA on the base that is called untouched, because the weights below it are."""
    peft = pytest.importorskip("peft", minversion=MIN_PEFT_VERSION)
    model = make_model()
    targets = ["model.text_model.model.layers.2.self_attn.q_proj"]
    model.add_adapter(peft.LoraConfig(target_modules=targets, init_lora_weights=False))
    results = checked(model, "base-weights", "text-only", "save-load", base=make_text())
    assert results["base-weights"].status == BROKEN and results["base-weights"].measured == 1
    assert "model.layers.2.self_attn.q_proj (LoRA or another adapter)" in results["base-weights"].line
    assert results["text-only"].status == BROKEN
    assert results["save-load"].status == NOT_CHECKED and "adapter (PEFT)" in results["save-load"].line


def test_logits_that_are_no_numbers():
    """A model that computes NaN, as its base does, and is called equal to it."""
    model, base = make_model(), make_text()
    for broken in (model.model.text_model, base):
        broken.lm_head.weight.data[5] = float("nan")
    results = checked(model, "base-weights", "text-only", base=base)
    assert results["base-weights"].status == HOLDS
    assert results["text-only"].status == BROKEN and results["text-only"].line == "the logits are not finite"


def test_without_a_base():
    """A line that says the base was checked, or a text half that reads images where there are none."""
    model = make_model()
    results = checked(model, "base-weights", "text-only")
    assert results["base-weights"].status == NOT_CHECKED and results["base-weights"].line.startswith("no --base")
    assert results["text-only"].status == HOLDS and "without the blocks (no --base)" in results["text-only"].line
    assert len(model.blocks) == 2  # they are back
    layer = model.model.text_model.model.layers[1]
    layer.register_forward_hook(lambda layer, _, output: output + 1e-3 * hasattr(layer, "cross_attention_block"))
    (result,) = checked(model, "text-only").values()
    assert result.status == BROKEN and result.measured > 0


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


@pytest.mark.parametrize("part", ["attn.o_proj", "mlp.down_proj", "attn.v_proj", "attn_gate", "mlp_gate"])
def test_a_dead_block(part):
    """A block that learned nothing beside one that did."""
    model = make_model()
    block = model.blocks[1]
    with torch.no_grad():
        (getattr(block, part) if "gate" in part else block.get_submodule(part).weight).zero_()
    (result,) = checked(model, "blocks-alive").values()
    assert result.status == BROKEN and result.measured == 1
    assert result.line == f"1 of 2 blocks dead: block 1 (layer 3): {part} is zero"


def test_other_dead_blocks(monkeypatch):
    """A block without a zero weight that changes nothing, or with weights that are no numbers."""
    model = make_model()
    with torch.no_grad():
        model.blocks[0].attn.q_proj.weight[0, 0] = float("nan")
    (result,) = checked(model, "blocks-alive").values()
    assert result.status == BROKEN and "block 0 (layer 1): attn.q_proj.weight is not finite" in result.line
    model = make_model()
    forward = model.blocks[0].forward
    monkeypatch.setattr(model.blocks[0], "forward", lambda states, **named: (forward(states, **named), states)[1])
    (result,) = checked(model, "blocks-alive").values()
    assert result.status == BROKEN and "block 0 (layer 1): it changes no hidden state" in result.line
    model = make_model()
    with torch.no_grad():
        model.blocks[0].mlp.up_proj.weight.mul_(1e25)
        model.blocks[0].mlp.gate_proj.weight.mul_(1e25)
    (result,) = checked(model, "blocks-alive").values()
    assert result.status == BROKEN and "block 0 (layer 1): its update is not finite" in result.line


FLAMINGO = {"zero_init": False, "gate_init": 0.0}


@pytest.mark.parametrize(
    "config", [{}, FLAMINGO, {"gate": "none"}, {"mlp_type": "none"}, {**FLAMINGO, "mlp_type": "none"}], ids=str
)
def test_a_fresh_model(config):
    """A fresh model that fails, or whose caches are compared while its images change nothing."""
    model = make_model(random=False, cross_attention_config=config)
    before = states_of(model)
    results = checked(model, "blocks-alive", "image-less-rows", "cache-dynamic", base=make_text())
    assert results["blocks-alive"].status == FRESH and results["blocks-alive"].line.startswith("fresh: untrained")
    for name in ("image-less-rows", "cache-dynamic"):
        assert results[name].status == HOLDS and "fresh blocks get random weights here" in results[name].line
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        model.blocks[0].attn.v_proj.weight.zero_()
    (result,) = checked(model, "blocks-alive").values()
    assert result.status == BROKEN


def changing_when_kept(monkeypatch, change):
    """Changes keys and values of images that outlive the call which has encoded them."""
    mark = XAttnCache.mark_updated

    def marked(cache, num_blocks):
        for layer in cache.cross_attention_cache.layers:
            layer.keys, layer.values = change(layer.keys), change(layer.values)
        mark(cache, num_blocks)

    monkeypatch.setattr(XAttnCache, "mark_updated", marked)


def test_caches_of_a_fresh_model_can_fail(monkeypatch):
    """A lie about images that a model without trained blocks hides."""
    changing_when_kept(monkeypatch, lambda part: 2 * part)
    (result,) = checked(make_model(random=False), "cache-dynamic").values()
    assert result.status == BROKEN


def test_projected_twice(monkeypatch):
    """Keys projected again at some step, or a vision tower that runs again."""
    model = make_model()
    (result,) = checked(model, "projected-once").values()
    assert (result.status, result.measured, result.allowed) == (HOLDS, 1, 1)
    project = GatedCrossAttention.project_key_value
    with monkeypatch.context() as patch:
        twice = lambda *args, **named: (project(*args), project(*args, **named))[1]  # noqa: E731
        patch.setattr(GatedCrossAttention, "project_key_value", twice)
        (result,) = checked(model, "projected-once").values()
    assert (result.status, result.measured) == (BROKEN, 2) and "k_proj of block 0 ran 2 times" in result.line
    assert "4 of 5 modules" in result.line
    outputs = ImageEncoder.outputs
    twice = lambda *args, **named: (outputs(*args), outputs(*args, **named))[1]  # noqa: E731
    monkeypatch.setattr(ImageEncoder, "outputs", twice)
    (result,) = checked(model, "projected-once").values()
    assert (result.status, result.measured) == (BROKEN, 2) and "vision tower ran 2 times" in result.line


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
    """No cache at all, which equals no cache, and an image that is projected at every step (as MPT's configuration
    asks).
    """
    model = make_model()
    model.config.text_config.use_cache = model.generation_config.use_cache = False
    results = checked(model, "projected-once", "cache-dynamic", "cache-encoded")
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
    monkeypatch.setattr("hf_xattn.checks.caches.LONGEST_WINDOW", 5)
    (result,) = checked(make_model("gemma3"), "cache-sliding").values()
    assert result.status == NOT_CHECKED and result.line == "its window of 6 tokens is longer than 5"


@pytest.mark.parametrize("adapter_only", [False, True])
def test_saved_otherwise(adapter_only, tmp_path, monkeypatch):
    """A saved model that comes back with another weight, without one, in another dtype, or with another setting."""
    make_text().save_pretrained(tmp_path)
    model = make_model(vision=False)
    model.config.text_config.name_or_path = str(tmp_path)
    (result,) = checked(model, "save-load", adapter_only=adapter_only).values()
    assert result.status == HOLDS and ("adapter-only" in result.line) == adapter_only

    @torch.no_grad()
    def change(loaded):
        loaded.blocks[0].attn_gate[0] += 1e-6
        loaded.blocks[0].mlp_gate = None
        loaded.model.text_model.lm_head.double()
        loaded.config.image_visibility = "latest"
        return loaded

    load = lambda folder: change(reload(folder))  # noqa: E731
    monkeypatch.setattr("hf_xattn.checks.weights.listed", ", ".join)
    (result,) = checked(model, "save-load", load=load, adapter_only=adapter_only).values()
    assert result.status == BROKEN and result.measured == 4 and "4 differ: " in result.line
    block = "model.text_model.model.layers.1.cross_attention_block"
    for what in (
        f"{block}.attn_gate",
        f"{block}.mlp_gate (missing)",
        "model.text_model.lm_head.weight (torch.float32, loaded as torch.float64)",
        "config.image_visibility",
    ):
        assert what in result.line


def test_saving_that_is_refused(monkeypatch):
    """A full disk, or a model without the name of a base, that is called broken."""
    model = make_model()
    (result,) = checked(model, "save-load", adapter_only=True).values()
    assert result.status == NOT_CHECKED and "was refused: `adapter_only=True`" in result.line
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    (result,) = checked(model, "save-load").values()
    assert result.status == NOT_CHECKED and "`--adapter-only`" in result.line


def test_a_model_that_raises():
    """A traceback in the place of the other checks."""
    model = make_model()

    def fail(*args):
        raise IndexError("nothing there")

    model.blocks[0].register_forward_hook(fail)
    results = checked(model, "text-only", "blocks-alive", "save-load")
    assert (
        results["blocks-alive"].status == BROKEN and results["blocks-alive"].line == "raised IndexError: nothing there"
    )
    assert results["text-only"].status == results["save-load"].status == HOLDS


def test_two_models_at_most():
    """A base that stays in memory beside the model and the saved model."""
    bases = []

    def load_base():
        base = make_text()
        bases.append(weakref.ref(base))
        return base

    def load(folder):
        gc.collect()
        assert bases[0]() is None
        return reload(folder)

    results = list(run_checks(make_model(), load, load_base, skip=CACHES))
    assert results[-1].status == HOLDS and results[0].status == HOLDS


def test_unknown_names():
    """A check that someone wants to leave out and misspells, after an hour of others."""
    with pytest.raises(ValueError, match="Expected `--skip` to be one of base-weights, .*, got 'caches'"):
        run_checks(make_model(), reload, skip=["caches"])


def test_a_head_that_is_no_longer_tied():
    """A changed head that is passed over, because the base has its name for the embedding."""
    text = make_text("llama_tied")
    untied = AutoModelForCausalLM.from_config(
        type(text.config)(**{**text.config.to_dict(), "tie_word_embeddings": False})
    )
    untied.load_state_dict(text.state_dict())
    with torch.no_grad():
        untied.lm_head.weight += 0.1
    result = checked(retrofit(untied).eval(), "base-weights", base=text)["base-weights"]
    assert result.status == BROKEN and "lm_head.weight" in result.line


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
