"""Adapters (PEFT) on a retrofit: only where they were asked for, and the image path stays right."""

import json
import logging
from functools import partial

import pytest
import torch
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils.logging import warning_once

from helpers.models.quantized_bases import EXPECTED, METHODS, folder, parts_of, quantization
from helpers.models.tiny_models import make_model, pixels, token_ids
from hf_xattn import XAttnForConditionalGeneration, added_modules, lora_targets, retrofit
from hf_xattn.utils.transformers_api import has


peft = pytest.importorskip("peft")

IDS, PIXELS = token_ids(), pixels()
GENERATE = {"max_new_tokens": 5, "do_sample": False}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with a retrofit of 28 linear layers: PEFT shortens lists of more than 20 names."""
    path = tmp_path_factory.mktemp("base") / "model"
    make_model(cross_attention_layers=[1, 4]).save_pretrained(path)
    return path


def load(path):
    return XAttnForConditionalGeneration.from_pretrained(path)


def train(model, steps=3):
    model.train()
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.5)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=IDS, pixel_values=PIXELS.to(model.dtype), labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    assert losses[-1] < losses[0]
    return losses


@torch.no_grad()
def logits_of(model):
    return model(input_ids=IDS, pixel_values=PIXELS.to(model.dtype)).logits


def tuned(model):
    """Parts of the model that hold an adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    found = set()
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            parts = ("vision_tower", "connector", "cross_attention_block", "lm_head", "text_model")
            found.add(next(part for part in parts if part in name))
    return found


PLACES = {
    "text": {"text_model"},
    "blocks": {"cross_attention_block"},
    "both": {"text_model", "cross_attention_block"},
    "vision": {"vision_tower"},
}


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("saved", [False, True], ids=["adapter", "beside_modules_to_save"])
@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_adapter_from_training_to_merging(where, saved, task, base, tmp_path):
    """An adapter in the tower that nobody asked for, that is lost on the way, or that merges wrongly.

    https://github.com/huggingface/peft/issues/2615
    """
    if saved and where in ("blocks", "both"):
        saved = ["connector"]  # a block that trains whole needs no adapter
    else:
        saved = added_modules(load(base)) if saved else None
    config = peft.LoraConfig(
        target_modules=lora_targets(load(base), where), modules_to_save=saved, task_type=task, init_lora_weights=True
    )
    model = peft.get_peft_model(load(base), config)
    assert tuned(model) == PLACES[where]
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert all("lora_" in name or ".modules_to_save." in name for name in trained)
    assert len(model.get_base_model().blocks) == 2
    train(model)
    expected, answers = logits_of(model), model.generate(input_ids=IDS, pixel_values=PIXELS, **GENERATE)
    model.save_pretrained(tmp_path)
    record = json.loads((tmp_path / "adapter_config.json").read_text())
    assert record["base_model_name_or_path"] == str(base)

    fresh = load(base)
    again = peft.PeftModel.from_pretrained(fresh, tmp_path).eval()
    assert tuned(again) == PLACES[where]
    assert torch.equal(logits_of(again), expected)
    if saved and not has("modules_to_save"):
        for opened in (lambda: load(tmp_path), lambda: load(base).load_adapter(tmp_path)):
            with pytest.raises(
                ValueError, match="`modules_to_save` of the adapter .* needs transformers 5.18.0 or newer"
            ):
                opened()
    else:
        assert torch.equal(logits_of(load(tmp_path)), expected)  # an adapter's folder names its base

    fresh.enable_image_store()
    assert again.generate(input_ids=IDS, pixel_values=PIXELS, **GENERATE).equal(answers)
    merged = again.merge_and_unload()
    assert merged is fresh and not tuned(merged) and len(merged.blocks) == 2
    torch.testing.assert_close(logits_of(merged), expected, atol=1e-5, rtol=1e-4)
    assert merged.generate(IDS, pixel_values=PIXELS, **GENERATE).equal(answers)
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits_of(load(tmp_path / "merged")), expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_names_stand_for_one_module_each():
    """A name that ends like another one, a head or a router among the targets, or names of another root."""
    model = make_model(cross_attention_layers=[1, 4])
    names = dict(model.named_modules())
    text, blocks = lora_targets(model, "text"), lora_targets(model, "blocks")
    assert len(text) == 4 * 7 and len(blocks) == 2 * 7 and not {*text} & {*blocks}
    assert {*lora_targets(model, "both")} == {*text, *blocks}
    assert all(isinstance(names[name], torch.nn.Linear) for name in (*text, *blocks))
    for name in (*text, *blocks, *lora_targets(model, "vision"), *added_modules(model)):
        assert [other for other in names if other == name or other.endswith(f".{name}")] == [name]
    assert added_modules(model) == [
        "model.text_model.model.layers.1.cross_attention_block",
        "model.text_model.model.layers.3.cross_attention_block_after",
        "model.connector",
    ]
    assert [f"model.{name}" for name in lora_targets(model.model, "both")] == lora_targets(model, "both")
    only = lora_targets(model, "both", projections=["q_proj", "o_proj"])
    assert len(only) == 2 * 6 and {name.rpartition(".")[2] for name in only} == {"q_proj", "o_proj"}
    with pytest.raises(ValueError, match=r"`projections` must be among \['down_proj'.*got \['c_attn'\]"):
        lora_targets(model, projections=["c_attn"])
    with pytest.raises(ValueError, match="needs a model with a vision tower"):
        lora_targets(make_model(vision=False), "vision")
    assert added_modules(make_model(vision=False))[-1].endswith("cross_attention_block")


@pytest.mark.parametrize("name", ["gpt2", "opt", "mixtral", "gpt_neox", "phi3", "llama_tied"])
def test_lora_finds_the_layers_of_other_decoders(name):
    """A decoder whose layers have other names, or classes that are no `nn.Linear`."""
    model = make_model(name)
    base = logits_of(model)
    for where in ("text", "both"):
        targets = lora_targets(make_model(name), where)
        tuned_model = peft.get_peft_model(make_model(name), peft.LoraConfig(target_modules=targets)).eval()
        assert tuned(tuned_model) == PLACES[where]
        assert torch.equal(logits_of(tuned_model), base)  # an adapter starts at zero
        train(tuned_model, steps=2)


@torch.no_grad()
@pytest.mark.parametrize("saved", [False, True])
def test_images_of_another_adapter_are_refused(saved, base):
    """Keys and values that an adapter encoded, read after it was switched off, trained or merged."""
    targets = lora_targets(
        load(base), "text" if saved else "blocks"
    )  # then the connector alone is on the way of images
    config = peft.LoraConfig(
        target_modules=targets, modules_to_save=["connector"] if saved else None, init_lora_weights=saved
    )
    original = load(base)
    model = peft.get_peft_model(original, config).eval()
    with torch.enable_grad():
        train(model)
    for change in ("disabled", "other", "merged"):
        encoded = original.encode_images(pixel_values=PIXELS)
        expected = model.generate(input_ids=IDS, pixel_values=PIXELS, **GENERATE)
        assert model.generate(input_ids=IDS, cache=encoded, **GENERATE).equal(expected)
        original.enable_image_store()
        model.generate(input_ids=IDS, pixel_values=PIXELS, **GENERATE)
        if change == "disabled":
            with model.disable_adapter():
                with pytest.raises(ValueError, match="with other weights"):
                    model.generate(input_ids=IDS, cache=encoded, **GENERATE)
                plain = load(base).generate(IDS, pixel_values=PIXELS, **GENERATE)
                assert model.generate(input_ids=IDS, pixel_values=PIXELS, **GENERATE).equal(plain)
            continue
        if change == "other":
            model.add_adapter("second", config)
            model.set_adapter("second")
        else:
            model.set_adapter("default")
            encoded = original.encode_images(pixel_values=PIXELS)
            expected = model.generate(input_ids=IDS, pixel_values=PIXELS, **GENERATE)
            model = model.merge_and_unload()
        with pytest.raises(ValueError, match="with other weights"):
            model.generate(input_ids=IDS, cache=encoded, **GENERATE)
        if change == "merged":
            assert model.generate(IDS, pixel_values=PIXELS, **GENERATE).equal(expected)


def test_blocks_that_train_whole(base):
    """Blocks counted twice: PEFT keeps the original beside the copy that trains."""
    model = load(base)
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=lora_targets(model, "text"), modules_to_save=added_modules(model))
    )
    copies = model.blocks
    assert len(copies) == 2 and all(weight.requires_grad for weight in copies[0].parameters())
    wrapped.disable_adapter_layers()
    assert len(model.blocks) == 2 and model.blocks[0] is not copies[0]
    wrapped.enable_adapter_layers()
    assert model.blocks == copies
    wrapped.train()
    wrapped.gradient_checkpointing_enable()
    wrapped(input_ids=IDS, pixel_values=PIXELS, labels=IDS).loss.backward()
    checkpointed = [weight.grad.clone() for weight in model.blocks[0].parameters()]
    wrapped.zero_grad()
    wrapped.gradient_checkpointing_disable()
    wrapped(input_ids=IDS, pixel_values=PIXELS, labels=IDS).loss.backward()
    for one, other in zip(checkpointed, model.blocks[0].parameters()):
        torch.testing.assert_close(one, other.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("where", ["text", "blocks", "both"])
def test_adapters_get_gradients_under_checkpointing(where, base):
    """Adapters that silently get no gradient, because nothing in front of them requires one."""
    model = load(base)
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=lora_targets(model, where), init_lora_weights=False)
    ).train()
    wrapped(input_ids=IDS, pixel_values=PIXELS, labels=IDS).loss.backward()
    expected = {name: weight.grad for name, weight in wrapped.named_parameters() if weight.requires_grad}
    assert all(gradient is not None for gradient in expected.values())
    wrapped.zero_grad()
    wrapped.enable_input_require_grads()
    wrapped.gradient_checkpointing_enable()
    wrapped(input_ids=IDS, pixel_values=PIXELS, labels=IDS).loss.backward()
    for name, weight in wrapped.named_parameters():
        if weight.requires_grad:
            torch.testing.assert_close(weight.grad, expected[name], atol=1e-6, rtol=1e-4)


@torch.no_grad()
def test_integration_of_transformers(base, tmp_path):
    """`add_adapter` and its like of transformers, which keep adapters on the model itself."""
    pytest.importorskip("peft", minversion=MIN_PEFT_VERSION)
    model, plain = load(base), logits_of(load(base))
    model.add_adapter(
        peft.LoraConfig(target_modules=lora_targets(model, "both"), init_lora_weights=False), adapter_name="first"
    )
    first = logits_of(model.eval())
    assert not torch.equal(first, plain)
    model.save_pretrained(tmp_path)
    record = json.loads((tmp_path / "adapter_config.json").read_text())
    assert record["base_model_name_or_path"] == str(base)
    assert not (tmp_path / "model.safetensors").exists()
    model.disable_adapters()
    assert torch.equal(logits_of(model), plain)
    model.enable_adapters()
    assert torch.equal(logits_of(model), first)

    again = load(base)
    again.load_adapter(tmp_path, adapter_name="loaded")
    assert tuned(again) == PLACES["both"]
    assert torch.equal(logits_of(again), first)
    encoded = again.encode_images(pixel_values=PIXELS)
    again.add_adapter(
        peft.LoraConfig(target_modules=lora_targets(again, "blocks"), init_lora_weights=False), adapter_name="second"
    )
    again.set_adapter("second")
    assert not torch.equal(logits_of(again), first)
    with pytest.raises(ValueError, match="with other weights"):
        again(IDS, cache=encoded)
    again.set_adapter("loaded")
    assert torch.equal(logits_of(again), first)
    again.delete_adapter("second")
    assert torch.equal(logits_of(load(tmp_path)), first)


def test_names_of_the_base(base, tmp_path):
    """An adapter that records no base, or the text model, which has no blocks."""
    model = make_model()
    assert not model.name_or_path
    model.save_pretrained(tmp_path / "model")
    assert model.name_or_path == str(tmp_path / "model")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=lora_targets(model)))
    assert wrapped.peft_config["default"].base_model_name_or_path == str(tmp_path / "model")
    model = make_model()
    for folder_name in ("checkpoint", "final"):
        model.save_pretrained(tmp_path / folder_name)
    assert model.name_or_path == str(tmp_path / "final")  # not a checkpoint with other weights
    model = load(base)
    model.save_pretrained(tmp_path / "copy")
    assert model.name_or_path == str(base)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("where", ["text", "both"])
def test_lora_on_a_quantized_base(method, where, tmp_path):
    """QLoRA: a base whose quantized layers are no targets, or blocks that `prepare_model_for_kbit_training` cannot
    handle.
    """
    model = retrofit(
        folder() / "text", folder() / "vision", every=1, dtype=torch.bfloat16, quantization_config=quantization(method)
    )
    model.save_pretrained(tmp_path / "base")
    model = load(tmp_path / "base")
    model = peft.prepare_model_for_kbit_training(model)
    assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    wrapped = peft.get_peft_model(
        model,
        peft.LoraConfig(
            target_modules=lora_targets(model, where),
            modules_to_save=added_modules(model) if where == "text" else ["connector"],
        ),
    )
    assert tuned(wrapped) == PLACES[where]
    train(wrapped)
    assert all(weight.grad is None for name, weight in wrapped.named_parameters() if not weight.requires_grad)
    wrapped.save_pretrained(tmp_path / "adapter")
    expected = logits_of(wrapped)
    again = peft.PeftModel.from_pretrained(
        peft.prepare_model_for_kbit_training(load(tmp_path / "base")), tmp_path / "adapter"
    ).eval()
    assert torch.equal(logits_of(again), expected)


@pytest.mark.parametrize("method", METHODS)
def test_an_adapter_whose_base_is_quantized_while_it_loads(method, tmp_path):
    """A skip list that is not filled in where the folder holds an adapter alone."""
    model = load(folder() / "model")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=lora_targets(model), init_lora_weights=False))
    wrapped.save_pretrained(tmp_path)
    loaded = XAttnForConditionalGeneration.from_pretrained(
        tmp_path, quantization_config=quantization(method), dtype=torch.bfloat16
    )
    parts = parts_of(loaded)
    assert {name: parts[name] for name in parts if name != "decoder"} == {
        name: kept for name, kept in EXPECTED.items() if name != "decoder"
    }
    assert tuned(loaded) == {"text_model"}
    logits_of(loaded)


@pytest.mark.parametrize("way", ["get_peft_model", "add_adapter"])
def test_an_adapter_that_trains_the_tower_too_is_told_of(way, base, caplog, monkeypatch):
    """Short names that mean layers of the vision tower as well, trained without a word; a warning where the tower was
    asked for.
    """
    if way == "add_adapter":
        pytest.importorskip("peft", minversion=MIN_PEFT_VERSION)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)

    def train_with(targets):
        warning_once.cache_clear()
        caplog.clear()
        model = load(base)
        config = peft.LoraConfig(r=2, target_modules=targets(model) if callable(targets) else targets)
        tuned_model = peft.get_peft_model(model, config) if way == "get_peft_model" else model
        if way == "add_adapter":
            model.add_adapter(config)
        tuned_model.train()
        tuned_model.eval().train()
        return [record.message for record in caplog.records if "vision tower" in record.message]

    (told,) = train_with(["q_proj", "v_proj"])
    assert "4 layers of the vision tower" in told and "(q_proj, v_proj)" in told and "lora_targets(model)" in told
    assert train_with(lora_targets) == []
    assert train_with(lambda model: lora_targets(model, "vision")) == []
    assert train_with(r".*(text_model|vision_tower).*\.q_proj") == []


def test_blocks_that_train_beside_an_adapter_are_told_of(base, tmp_path, caplog, monkeypatch):
    """`add_adapter`, then `requires_grad_` of the blocks: `save_pretrained` leaves the blocks out, without a word."""
    pytest.importorskip("peft", minversion=MIN_PEFT_VERSION)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)

    def told(act):
        warning_once.cache_clear()
        caplog.clear()
        act()
        return [record.message for record in caplog.records if "outside of the adapter" in record.message]

    for options in ({"modules_to_save": added_modules(load(base))}, {"bias": "all"}):
        model = load(base)
        model.add_adapter(peft.LoraConfig(target_modules=lora_targets(model), **options), adapter_name="whole")
        assert told(model.train) == [] and told(partial(model.save_pretrained, tmp_path / "whole")) == []
    plain, model = load(base), load(base)
    for each in (plain, model):
        each.add_adapter(peft.LoraConfig(target_modules=lora_targets(model)))
    assert told(plain.train) == []
    for block in model.blocks:
        block.requires_grad_()
    count = sum(1 for block in model.blocks for _ in block.parameters())
    for act in (model.train, partial(model.save_pretrained, tmp_path / "adapter")):
        (message,) = told(act)
        assert message.startswith(f"{count} weights train outside of the adapter, such as model.text_model")
        assert "modules_to_save=hf_xattn.added_modules(model)" in message


def test_an_adapter_beside_another_model(base, tmp_path):
    """An adapter that is loaded on the model whose folder it was saved in, and not on its own base."""
    pytest.importorskip("peft", minversion=MIN_PEFT_VERSION)
    config = peft.LoraConfig(target_modules=["q_proj"])
    make_model(cross_attention_layers=[0]).save_pretrained(tmp_path / "other")
    model = load(base)
    model.add_adapter(config)
    files = sorted(path.name for path in (tmp_path / "other").iterdir())
    with pytest.raises(ValueError, match=r"other holds a whole model \(model.safetensors\), .*its base \(.*model\)"):
        model.save_pretrained(tmp_path / "other")
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == files
    model.save_pretrained(tmp_path / "adapter")
    model.save_pretrained(tmp_path / "adapter")
    own = make_model()
    own.save_pretrained(tmp_path / "own")
    own = load(tmp_path / "own")
    own.add_adapter(config)
    own.save_pretrained(tmp_path / "own")  # beside its own base
    assert tuned(load(tmp_path / "own"))
