"""Several sets of blocks on one base: each answers as its own model does, and nothing of one reaches another."""

import copy
import os
import pickle

import pytest
import torch
import transformers
from quantized_bases import METHODS, quantization
from quantized_bases import folder as quantized_folder
from saved_models import make, make_base
from tiny_models import pixels, randomize, token_ids
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.cache_utils import DynamicCache
from transformers.integrations.peft import MIN_PEFT_VERSION

from hf_xattn import freeze, lora_targets, retrofit
from hf_xattn.utils.transformers_api import CACHE


IMAGES = {"pixel_values": pixels()}
GREEDY = {"max_new_tokens": 5, "do_sample": False}


@torch.no_grad()
def logits_of(model, **images):
    return model(token_ids(), **(images or IMAGES)).logits


@pytest.fixture
def folders(tmp_path, vision):
    """A (every kind of block like B), B, and C: other layers, sizes, connector and a tower that was trained too."""
    for seed, name in enumerate("ab"):
        make(tmp_path, vision, seed=seed).save_pretrained(tmp_path / name, adapter_only=True)
    model = retrofit(
        tmp_path / "text-llama",
        vision,
        cross_attention_layers=[0, 3, 4],
        cross_attention={"num_key_value_heads": 1, "gate_granularity": "channel", "qk_norm": True},
        connector_type="linear",
        image_visibility="latest",
        image_token_id=int(token_ids()[0, 1]),
    )
    randomize(model, 5)
    next(model.model.vision_tower.parameters()).data.mul_(1.1)
    model.save_pretrained(tmp_path / "c", adapter_only=True)
    return tmp_path


def own(folders, name):
    return AutoModelForImageTextToText.from_pretrained(folders / name)


def test_sets_answer_as_their_models(folders):
    """Weights or settings of one set that stay when another is active; a base that changes."""
    model = own(folders, "a")
    assert (model.cross_attention_names, model.active_cross_attention) == (["default"], "default")
    for name in "bc":
        model.load_cross_attention(folders / name, name)
        assert model.active_cross_attention == name
    assert model.cross_attention_names == ["default", "b", "c"]
    base = AutoModelForCausalLM.from_pretrained(folders / "text-llama")
    marked = token_ids()
    marked[:, 1] = marked[0, 1]  # an image marker of `c`
    for name in ("default", "c", None, "b", "c", "default", None, "b"):
        model.set_cross_attention(name)
        if name is None:
            with torch.no_grad():
                assert torch.equal(model(token_ids()).logits, base(token_ids()).logits)
                assert torch.equal(model.generate(token_ids(), **GREEDY), base.generate(token_ids(), **GREEDY))
            assert model.blocks == []
            continue
        expected = own(folders, {"default": "a"}.get(name, name))
        with torch.no_grad():
            assert torch.equal(model(marked, **IMAGES).logits, expected(marked, **IMAGES).logits)
            assert torch.equal(
                model.generate(marked, **IMAGES, **GREEDY), expected.generate(marked, **IMAGES, **GREEDY)
            )
        assert model.state_dict().keys() == expected.state_dict().keys()
        assert model.config.to_dict()["cross_attention_layers"] == expected.config.to_dict()["cross_attention_layers"]
        assert model.image_identity() == expected.image_identity()


def test_the_tower_is_shared_where_it_is_the_same(folders):
    """A tower in memory for every set; or one tower for sets that were trained with different ones."""
    model = own(folders, "a")
    tower = model.model.vision_tower
    model.load_cross_attention(folders / "b", "b")
    assert model.model.vision_tower is tower
    model.load_cross_attention(folders / "c", "c")
    assert model.model.vision_tower is not tower
    model.set_cross_attention("b")
    assert model.model.vision_tower is tower


def test_caches_of_another_set(folders):
    """Keys, values or hidden states of one set that another one reads, or that the bare base overlooks."""
    model = own(folders, "a")
    with torch.no_grad():
        encoded = model.encode_images(**IMAGES)
        before = model(token_ids(), **IMAGES, use_cache=True)[CACHE]
        model.load_cross_attention(folders / "b", "b")
        talked = model(token_ids(), **IMAGES, use_cache=True)[CACHE]
        fork = model.encode_images(**IMAGES).fork(DynamicCache(config=model.config.get_text_config(decoder=True)))
    step = token_ids(length=1)
    for active, caches in (
        ("b", (encoded, before)),
        (None, (encoded, before, talked, fork)),
        ("default", (talked, fork)),
    ):
        model.set_cross_attention(active)
        for cache in caches:
            text = torch.cat([token_ids(), step], dim=1)
            for call in (
                lambda cache=cache: model(step, cache=cache),
                lambda cache=cache, text=text: model.generate(text, cache=cache, **GREEDY),
                lambda cache=cache: model.encode_images(**IMAGES, cache=cache),
            ):
                with torch.no_grad(), pytest.raises(ValueError, match="another set of blocks|another model|is active"):
                    call()
    for active, cache in (("default", before), ("b", talked)):
        model.set_cross_attention(active)
        expected = own(folders, {"default": "a"}.get(active, active))
        full = torch.cat([token_ids(), step], dim=1)
        with torch.no_grad():
            last = model(step, cache=cache).logits[:, -1]
            assert torch.allclose(last, expected(full, **IMAGES).logits[:, -1], atol=1e-5)


def test_image_store(folders):
    """Images that the store holds from another set."""
    model = own(folders, "a")
    model.enable_image_store()
    model.generate(token_ids(), **IMAGES, **GREEDY)
    model.load_cross_attention(folders / "b", "b")
    for active, name in (("b", "b"), ("default", "a"), ("b", "b")):
        model.set_cross_attention(active)
        expected = own(folders, name).generate(token_ids(), **IMAGES, **GREEDY)
        assert torch.equal(model.generate(token_ids(), **IMAGES, **GREEDY), expected)


def test_images_without_a_set(folders):
    """Images that are dropped without a word."""
    model = own(folders, "a")
    model.set_cross_attention(None)
    for call in (
        lambda: model(token_ids(), **IMAGES),
        lambda: model.generate(token_ids(), **IMAGES, **GREEDY),
        lambda: model.encode_images(**IMAGES),
        lambda: model.get_image_features(**IMAGES),
        lambda: model.save_pretrained(folders / "nothing"),
    ):
        with pytest.raises(ValueError, match="No cross-attention is active"):
            call()
    model.set_cross_attention("default")
    assert torch.equal(logits_of(model), logits_of(own(folders, "a")))


def test_the_active_set_is_what_is_saved_and_trained(folders):
    """Weights of a set that was not asked for in a file or an optimizer, or a trained set that is saved untrained."""
    model = own(folders, "a")
    model.load_cross_attention(folders / "c", "c")
    optimizer = torch.optim.SGD(model.model.blocks[0].parameters(), lr=1.0)
    model.train()
    ids = token_ids()
    ids[:, 1] = ids[0, 1]
    model(ids, **IMAGES, labels=ids).loss.backward()
    optimizer.step()
    model.eval()
    model.set_cross_attention("default")
    assert torch.equal(logits_of(model), logits_of(own(folders, "a")))
    model.set_cross_attention("c")
    for options in ({}, {"adapter_only": True}):
        folder = folders / f"saved{len(options)}"
        model.save_pretrained(folder, **options)
        loaded = AutoModelForImageTextToText.from_pretrained(folder)
        with torch.no_grad():
            assert torch.equal(loaded(ids, **IMAGES).logits, model(ids, **IMAGES).logits)
    with torch.no_grad():
        assert not torch.equal(loaded(ids, **IMAGES).logits, own(folders, "c")(ids, **IMAGES).logits)


def test_frozen_parts_of_a_set_stay_in_evaluation_mode(folders):
    """A frozen tower whose batch norms a switch thaws."""
    model = freeze(own(folders, "a"), blocks=True).train()
    for name in ("b", "c"):
        model.load_cross_attention(folders / name, name)
        freeze(model, blocks=True)
    for name in ("default", "b", None, "c"):
        model.set_cross_attention(name)
        assert model.model.training and not model.model.vision_tower.training
        assert not any(block.training for block in model.blocks)


def test_copies_and_dtypes(folders):
    """A copy that shares sets with its original, or a set that stays behind when the model moves."""
    model = own(folders, "a")
    model.load_cross_attention(folders / "b", "b")
    model.set_cross_attention("default")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.set_cross_attention("b")
        assert torch.equal(logits_of(other), logits_of(own(folders, "b")))
    assert model.active_cross_attention == "default"
    half = AutoModelForImageTextToText.from_pretrained(folders / "a", dtype=torch.bfloat16)
    half.load_cross_attention(folders / "b", "b")
    expected = AutoModelForImageTextToText.from_pretrained(folders / "b", dtype=torch.bfloat16)
    assert {n: t.dtype for n, t in half.state_dict().items()} == {n: t.dtype for n, t in expected.state_dict().items()}
    assert torch.equal(logits_of(half), logits_of(expected))


def test_body_alone(folders):
    """The same without a head."""
    body = AutoModel.from_pretrained(folders / "a")
    body.load_cross_attention(folders / "b", "b")
    with torch.no_grad():
        expected = own(folders, "b").model(token_ids(), **IMAGES).last_hidden_state
        assert torch.equal(body(token_ids(), **IMAGES).last_hidden_state, expected)


def test_deleting(folders):
    """A set that is gone and still answers."""
    model = own(folders, "a")
    model.load_cross_attention(folders / "b", "b")
    model.delete_cross_attention("default")
    assert (model.cross_attention_names, model.active_cross_attention) == (["b"], "b")
    model.delete_cross_attention("b")
    assert (model.cross_attention_names, model.active_cross_attention) == ([], None)
    model.load_cross_attention(folders / "a", "default")
    assert torch.equal(logits_of(model), logits_of(own(folders, "a")))


def test_sets_that_do_not_fit(folders, caplog):
    """Blocks on a base that they were not trained on, and a model that is half changed after an error."""
    transformers.logging.enable_propagation()
    model = own(folders, "a")
    changed = own(folders, "a")
    changed.get_output_embeddings().weight.data.mul_(2)
    changed.save_pretrained(folders / "changed", adapter_only=True)
    randomize(retrofit(make_base(folders / "wide", "mixtral"), every=2)).save_pretrained(
        folders / "wide-added", adapter_only=True
    )
    words = randomize(retrofit(folders / "text-llama", every=2, additional_vocab_size=2))
    words.save_pretrained(folders / "words", adapter_only=True)
    model.save_pretrained(folders / "whole")
    for folder, name, message in (
        ("changed", "b", "changes weights of the text model.*lm_head"),
        ("wide-added", "b", "has another shape"),
        ("words", "b", "2 tokens behind its vocabulary"),
        ("whole", "b", "Expected `folder` to be saved with `adapter_only=True`"),
        ("b", "default", "Expected `name` to be new, got 'default'"),
        ("b", "", "Expected `name` to be new, got ''"),
    ):
        with pytest.raises(ValueError, match=message):
            model.load_cross_attention(folders / folder, name)
    with pytest.raises(ValueError, match="`name` must be one of.*'default'.*got 'b'"):
        model.set_cross_attention("b")
    assert model.cross_attention_names == ["default"] and torch.equal(logits_of(model), logits_of(own(folders, "a")))
    assert "are not those of the base" not in caplog.text
    changed.load_cross_attention(folders / "b", "b")
    assert "The weights of this text model are not those of the base" in caplog.text


def test_features_and_pixels(folders):
    """A set without a tower beside one with a tower."""
    features = randomize(retrofit(folders / "text-llama", every=2), 8)
    features.save_pretrained(folders / "features", adapter_only=True)
    model = own(folders, "a")
    model.load_cross_attention(folders / "features", "features")
    states = {"cross_attention_states": torch.randn(2, 5, 32)}
    assert torch.equal(logits_of(model, **states), logits_of(features.eval(), **states))
    assert model.model.vision_tower is None
    model.set_cross_attention("default")
    assert torch.equal(logits_of(model), logits_of(own(folders, "a")))
    assert os.path.isdir(folders / "a")


def test_lora_stands_in_the_way(folders):
    """Blocks with layers of an adapter that vanish on a switch, or a base that is bare but for a LoRA."""
    peft = pytest.importorskip("peft", minversion=MIN_PEFT_VERSION)
    model = own(folders, "a")
    model.load_cross_attention(folders / "b", "b")
    model.add_adapter(peft.LoraConfig(target_modules=lora_targets(model, "both"), init_lora_weights=False))
    expected = logits_of(model.eval())
    for call in (
        lambda: model.set_cross_attention("default"),
        lambda: model.set_cross_attention(None),
        lambda: model.delete_cross_attention("b"),
        lambda: model.load_cross_attention(folders / "a", "third"),
    ):
        with pytest.raises(ValueError, match="holds LoRA layers.*Merge the adapter first"):
            call()
    assert model.cross_attention_names == ["default", "b"] and torch.equal(logits_of(model), expected)
    model = own(folders, "a")
    model.load_cross_attention(folders / "b", "b")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=lora_targets(model, "blocks")))
    wrapped.merge_and_unload()
    model.set_cross_attention("default")
    assert torch.equal(logits_of(model), logits_of(own(folders, "a")))


@pytest.mark.parametrize("method", METHODS)
def test_sets_on_a_quantized_base(method, tmp_path, caplog):
    """A text model that is taken for another one because its weights are packed, or a base that nobody compares
    without a word.
    """
    transformers.logging.enable_propagation()
    for seed, name in enumerate("ab"):
        model = randomize(retrofit(quantized_folder() / "text", quantized_folder() / "vision", every=1), seed)
        model.save_pretrained(tmp_path / name, adapter_only=True)
    images = {"pixel_values": pixels().bfloat16()}
    options = {"quantization_config": quantization(method)}
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "a", **options)
    model.load_cross_attention(tmp_path / "b", "b")
    for active, name in (("b", "b"), ("default", "a")):
        model.set_cross_attention(active)
        expected = AutoModelForImageTextToText.from_pretrained(tmp_path / name, **options)
        assert torch.equal(logits_of(model, **images), logits_of(expected, **images))
    assert "was not checked" not in caplog.text
    copied = tmp_path / "copied"
    AutoModelForCausalLM.from_pretrained(quantized_folder() / "text").save_pretrained(copied)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "a", text_base=copied, **options)
    model.load_cross_attention(tmp_path / "b", "b")
    assert "was not checked" in caplog.text


def test_where_the_tower_of_a_set_is(folders, vision):
    """A tower in a subfolder that is looked for above it when the model is saved again."""
    (folders / "towers").mkdir()
    vision.rename(folders / "towers" / "v")
    text = AutoModelForCausalLM.from_pretrained(folders / "text-llama")
    model = retrofit(text, folders / "towers", subfolder="v", cross_attention_layers=[1])
    next(model.model.vision_tower.parameters()).data.mul_(1.1)
    model.save_pretrained(folders / "d", adapter_only=True)
    text_only = randomize(retrofit(folders / "text-llama", every=2))
    text_only.load_cross_attention(folders / "d", "d")
    text_only.save_pretrained(folders / "again", adapter_only=True)
    assert torch.equal(logits_of(own(folders, "again")), logits_of(model))
