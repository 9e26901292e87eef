"""Every way of saving a model, on every kind of base: it loads with equal logits, or is refused before anything is
written.
"""

import functools
import json
import tempfile
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.integrations.peft import MIN_PEFT_VERSION

from helpers.models.quantized_bases import METHODS, folder, quantization, quantized_text
from helpers.models.tiny_models import pixels, randomize, token_ids
from hf_xattn import XAttnForConditionalGeneration, lora_targets, remove_blocks, retrofit
from hf_xattn.checkpoints.folders import MANIFEST


IDS, PIXELS = token_ids(), pixels().bfloat16()
BASES = ("float", *METHODS, "saved_8bit", "saved_4bit")
FOLDERS = tempfile.TemporaryDirectory()  # removed when the tests end


@functools.cache
def text_folder(base):
    """The checkpoint of a text model; `saved_*` is one that holds quantized weights."""
    if not base.startswith("saved"):
        return folder() / "text"
    path = Path(FOLDERS.name) / base
    quantized_text(f"bitsandbytes_{base.removeprefix('saved_')}").save_pretrained(path)
    return path


@functools.cache
def other_blocks():
    """Other blocks for the text model in full precision."""
    path = Path(FOLDERS.name) / "other"
    model = randomize(retrofit(folder() / "text", folder() / "vision", cross_attention_layers=[1]), 8)
    model.save_pretrained(path, adapter_only=True)
    return path


def make(base):
    """Blocks that see, on a base that was loaded as its name says."""
    if base.startswith("saved"):
        pytest.importorskip("bitsandbytes")
    options = {"quantization_config": quantization(base)} if base in METHODS else {}
    model = retrofit(text_folder(base), folder() / "vision", every=1, dtype=torch.bfloat16, **options)
    generator = torch.Generator().manual_seed(3)
    for weight in model.model.connector.parameters():
        weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    return randomize(model).eval()


@torch.no_grad()
def logits_of(model):
    return model.eval()(IDS, pixel_values=PIXELS).logits


def content(path):
    return {file.name: file.read_bytes() for file in path.iterdir()} if path.is_dir() else {}


def lora(model, where="text"):
    return peft.LoraConfig(target_modules=lora_targets(model, where), init_lora_weights=False)


def in_peft_model(model, path):
    peft.get_peft_model(model, lora(model, "both"))
    return {}


def own_adapter(model, path):
    pytest.importorskip("peft", minversion=MIN_PEFT_VERSION)
    base = path.parent / "base"
    model.save_pretrained(base)
    model.config.name_or_path = model.name_or_path = str(base)
    model.add_adapter(lora(model))
    return {}


def given_weights(model, path):
    return {"state_dict": dict(model.state_dict())}


def weights_with_a_gap(model, path):
    weights = dict(model.state_dict())
    del weights["model.connector.layers.0.weight"]
    return {"state_dict": weights}


def beside(name):
    def write(model, path):
        path.mkdir()
        (path / name).write_text("{}")
        return {}

    return write


def over(**options):
    def save_before(model, path):
        model.save_pretrained(path, **options)
        randomize(model, 6)
        return {}

    return save_before


def a_file(model, path):
    path.write_text("mine")
    return {}


# What is done before, as arguments of `save_pretrained` or a function; what happens in a whole save, and in one with
# `adapter_only`.
EQUAL, NOTHING = "equal logits", "nothing is written"
CASES = {
    "plain": ({}, EQUAL, EQUAL),
    "with_code": ({"with_code": True}, EQUAL, EQUAL),
    "shards": ({"max_shard_size": "60KB"}, EQUAL, EQUAL),
    "not_main": ({"is_main_process": False}, NOTHING, NOTHING),
    "variant": ({"variant": "new"}, EQUAL, "does not work together with `variant`"),
    "other_blocks": ({}, EQUAL, EQUAL),
    "in_peft_model": (in_peft_model, "`save_pretrained` cannot save.*LoRA", "`adapter_only=True` cannot save.*LoRA"),
    "own_adapter": (own_adapter, EQUAL, "`adapter_only=True` cannot save.*LoRA"),
    "given_weights": (given_weights, EQUAL, EQUAL),
    "weights_with_a_gap": (weights_with_a_gap, None, "1 are missing, such as model.connector.layers.0.weight"),
    "beside_a_tokenizer": (beside("tokenizer.json"), EQUAL, EQUAL),
    "beside_lora": (beside("adapter_config.json"), "holds an adapter of PEFT", "holds an adapter of PEFT"),
    "over_whole": (over(), EQUAL, "holds a whole model"),
    "over_shards": (over(max_shard_size="60KB"), EQUAL, "holds a whole model"),
    "over_adapter_only": (over(adapter_only=True), EQUAL, EQUAL),
    "a_file": (a_file, "to be a folder, got", "to be a folder, got"),
}
# On a quantized base transformers would save the model's weights in place of those that are given.
QUANTIZED = {"given_weights": ("Expected no `state_dict` for a quantized model", EQUAL)}


# Methods of quantization differ in these cases alone. The other blocks are trained on one checkpoint, the float one.
BY_METHOD = ("plain", "other_blocks", "own_adapter", "shards")
PAIRS = [
    (case, base)
    for case in CASES
    for base in BASES
    if (base in ("float", "bitsandbytes_8bit") or case in BY_METHOD)
    and not (str(base).startswith("saved") and case == "other_blocks")
]


@pytest.mark.parametrize(("case", "base"), PAIRS)
def test_every_save_loads_with_equal_logits_or_is_refused(case, base, tmp_path):
    """A folder that loads as another model, or a folder that is spoilt by a save that fails."""
    prepare, *expected = CASES[case]
    if base != "float":
        expected = QUANTIZED.get(case, expected)
    for adapter_only, outcome in zip((False, True), expected):
        model, path = make(base), tmp_path / f"saved{adapter_only}"
        if case == "other_blocks":  # put onto the text model in place of its own
            model = XAttnForConditionalGeneration.from_pretrained(other_blocks(), text_base=remove_blocks(model))
        options = prepare if isinstance(prepare, dict) else prepare(model, path)
        options = {**options, "adapter_only": adapter_only}
        if outcome is None:
            continue
        if outcome not in (EQUAL, NOTHING):
            before = content(path)
            with pytest.raises((ValueError, TypeError), match=outcome):
                model.save_pretrained(path, **options)
            assert content(path) == before and [file.name for file in tmp_path.glob(".*")] == []
            continue
        before = logits_of(model)
        model.save_pretrained(path, **options)
        # Saving 4-bit weights that have computed on a CPU, bitsandbytes rounds their scales. Those of the base are not
        # rounded.
        from_base = base.endswith("4bit") and (adapter_only or case == "own_adapter")
        expected_logits = before if from_base else logits_of(model)
        assert (path / MANIFEST).exists() == (adapter_only and outcome == EQUAL)
        if outcome == NOTHING:
            assert content(path) == {}
            continue
        variant = {"variant": options["variant"]} if "variant" in options else {}
        for loader in (XAttnForConditionalGeneration, AutoModelForImageTextToText):
            loaded = loader.from_pretrained(path, **variant)
            assert torch.equal(logits_of(loaded), expected_logits)
        if case == "beside_a_tokenizer":
            assert (path / "tokenizer.json").read_text() == "{}"


def test_more_shards_or_fewer(tmp_path):
    """Weights of an earlier save, which transformers leaves in the folder and takes first."""
    model = make("float")
    for seed, size in enumerate(("50GB", "60KB", "30KB", "50GB")):
        randomize(model, seed).save_pretrained(tmp_path, max_shard_size=size)
        assert torch.equal(logits_of(XAttnForConditionalGeneration.from_pretrained(tmp_path)), logits_of(model))
        assert (tmp_path / "model.safetensors").exists() == (size == "50GB")
        assert (tmp_path / "model.safetensors.index.json").exists() == (size != "50GB")


@pytest.mark.parametrize("method", METHODS)
def test_quantizing_the_base_of_an_adapter_only_folder(method, tmp_path):
    """Blocks in 8 bit, a base that stays in full precision, or one that cannot be had in full precision again."""
    make("float").save_pretrained(tmp_path / "float", adapter_only=True)
    expected = make(method)
    logits = logits_of(expected)
    expected.save_pretrained(tmp_path / "quantized", adapter_only=True)
    assert "quantization_config" not in json.loads((tmp_path / "quantized" / "config.json").read_text())
    for name, options in (("float", {"quantization_config": quantization(method)}), ("quantized", {})):
        for loader in (XAttnForConditionalGeneration, AutoModelForCausalLM):
            loaded = loader.from_pretrained(tmp_path / name, **options)
            assert torch.equal(logits_of(loaded), logits)
        loaded.save_pretrained(tmp_path / "again", adapter_only=True)
        assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), logits)
    body = AutoModel.from_pretrained(tmp_path / "quantized")
    with torch.no_grad():  # with gradients, bitsandbytes takes another kernel
        states = body(IDS, pixel_values=PIXELS).last_hidden_state
        assert torch.equal(body.get_output_embeddings()(states), logits)
    precise = XAttnForConditionalGeneration.from_pretrained(tmp_path / "quantized", quantization_config=None)
    assert torch.equal(logits_of(precise), logits_of(make("float")))
    kernels = {"attn_implementation": "eager", "device_map": "cpu", "dtype": torch.float32}
    loaded = XAttnForConditionalGeneration.from_pretrained(
        tmp_path / "float", quantization_config=quantization(method), **kernels
    )
    assert loaded.blocks[0].attn.q_proj.weight.dtype == torch.float32
    assert loaded.config.text_config._attn_implementation == loaded.config._attn_implementation == "eager"


def test_what_was_trained_beside_a_quantized_base(tmp_path):
    """A norm or a head that was trained, and is taken from the base again."""
    model = make("bitsandbytes_4bit")
    text = model.model.text_model
    text.model.norm.weight.data[0] = 3
    text.lm_head.weight.data[5] *= 2
    model.save_pretrained(tmp_path, adapter_only=True)
    assert torch.equal(logits_of(XAttnForConditionalGeneration.from_pretrained(tmp_path)), logits_of(model))


@pytest.mark.parametrize("method", METHODS)
def test_quantized_weights_that_are_not_the_bases(method, tmp_path):
    """An adapter that was merged into quantized weights, and is lost without a word."""
    model = make(method)
    wrapped = peft.get_peft_model(model, lora(model))
    merged = wrapped.merge_and_unload()
    with pytest.raises(ValueError, match="quantized weights of the text_model differ.*Save the whole model"):
        merged.save_pretrained(tmp_path / "added", adapter_only=True)
    assert not (tmp_path / "added").exists()
    merged.save_pretrained(tmp_path / "whole")
    expected = logits_of(merged)
    assert torch.equal(logits_of(XAttnForConditionalGeneration.from_pretrained(tmp_path / "whole")), expected)


def test_other_scales_of_quantized_weights_are_saved(tmp_path):
    """Weights whose packed values are those of the base, and whose scales are not: they would load as the base."""
    model = make("saved_4bit")
    weight = model.model.text_model.get_submodule("model.layers.0.self_attn.q_proj").weight
    weight.quant_state.absmax.mul_(2)
    model.save_pretrained(tmp_path / "added", adapter_only=True)
    loaded = XAttnForConditionalGeneration.from_pretrained(tmp_path / "added")
    assert torch.equal(logits_of(loaded), logits_of(model))


def test_lora_on_an_adapter_only_folder(tmp_path):
    """Blocks that are deleted by a LoRA beside them, or a LoRA that is dropped because its base is such a folder."""
    pytest.importorskip("peft", minversion=MIN_PEFT_VERSION)
    make("float").save_pretrained(tmp_path / "added", adapter_only=True)
    model = XAttnForConditionalGeneration.from_pretrained(tmp_path / "added")
    plain = logits_of(model)
    model.add_adapter(lora(model, "both"))
    expected = logits_of(model)
    for name in ("lora", "added"):
        model.save_pretrained(tmp_path / name)
        for loader in (XAttnForConditionalGeneration, AutoModelForImageTextToText):
            assert torch.equal(logits_of(loader.from_pretrained(tmp_path / name)), expected)
    named = XAttnForConditionalGeneration.from_pretrained(tmp_path / "lora", adapter_name="mine")
    assert named.active_adapters() == ["mine"]
    model.disable_adapters()
    assert torch.equal(logits_of(model), plain)
    with pytest.raises(ValueError, match="`with_code=True`: an adapter"):
        model.save_pretrained(tmp_path / "code", with_code=True)
    assert not (tmp_path / "code").exists()


def test_a_quantized_tower_and_what_the_error_advises(tmp_path):
    """An error that names a way out which is none."""
    pytest.importorskip("bitsandbytes")
    tower = AutoModel.from_pretrained(folder() / "vision", quantization_config=quantization("bitsandbytes_8bit"))
    model = randomize(retrofit(AutoModelForCausalLM.from_pretrained(folder() / "text"), tower, every=1))
    for adapter_only in (False, True):
        with pytest.raises(ValueError, match=r"The vision tower is quantized.*`model.base_model.vision_tower = tower`"):
            model.save_pretrained(tmp_path / "model", adapter_only=adapter_only)
        assert not (tmp_path / "model").exists()
    model.base_model.vision_tower = AutoModel.from_pretrained(folder() / "vision")
    for adapter_only in (False, True):
        path = tmp_path / str(adapter_only)
        model.save_pretrained(path, adapter_only=adapter_only)
        assert torch.equal(logits_of(XAttnForConditionalGeneration.from_pretrained(path)), logits_of(model))


def test_weights_quantized_by_hand_and_what_the_error_advises(tmp_path):
    """An error that names a way out which is none."""
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    text = AutoModelForCausalLM.from_pretrained(folder() / "text")
    quantize_(text, Int8WeightOnlyConfig())
    model = randomize(retrofit(text, folder() / "vision", every=1, dtype=torch.bfloat16))
    for adapter_only in (False, True):
        with pytest.raises(ValueError, match=r"quantized without a quantizer.*`load_state_dict\(weights, strict=False"):
            model.save_pretrained(tmp_path / "model", adapter_only=adapter_only)
    precise = retrofit(folder() / "text", folder() / "vision", every=1)
    weights = {name: weight for name, weight in model.state_dict().items() if "block" in name or "connector" in name}
    precise.load_state_dict(weights, strict=False)
    precise.save_pretrained(tmp_path / "added", adapter_only=True)
    loaded = XAttnForConditionalGeneration.from_pretrained(tmp_path / "added")
    quantize_(loaded.model.text_model, Int8WeightOnlyConfig(), lambda part, name: _of_text(part, name))
    assert torch.equal(logits_of(loaded), logits_of(model))


def _of_text(part, name):
    return isinstance(part, torch.nn.Linear) and "cross_attention_block" not in name
