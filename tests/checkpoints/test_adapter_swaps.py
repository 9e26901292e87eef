"""Folders of `adapter_only=True` on one loaded text model, one after the other: each answers as it does on its own."""

import copy
import pickle

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.integrations.peft import MIN_PEFT_VERSION

from helpers.models.quantized_bases import METHODS, quantization
from helpers.models.quantized_bases import folder as quantized_folder
from helpers.models.saved_models import make, make_base
from helpers.models.tiny_models import pixels, randomize, token_ids
from hf_xattn import XAttnForConditionalGeneration, XAttnModel, lora_targets, remove_blocks, retrofit
from hf_xattn.cache.image_cache import select_images
from hf_xattn.utils.transformers_api import CACHE


IMAGES = {"pixel_values": pixels()}
GREEDY = {"max_new_tokens": 5, "do_sample": False}
STEP = token_ids(length=1)


MARKED = token_ids()
MARKED[:, 1] = MARKED[0, 1]  # an image marker of `c`


@torch.no_grad()
def logits_of(model, **images):
    return model(MARKED, **(images or IMAGES)).logits


def same_model(model, loaded):
    mine, others = model.state_dict(), loaded.state_dict()
    assert list(mine) == list(others)
    assert [n for n in mine if mine[n].dtype != others[n].dtype or not torch.equal(mine[n], others[n])] == []
    assert torch.equal(logits_of(model.eval()), logits_of(loaded.eval()))


@pytest.fixture
def folders(tmp_path, vision):
    """A (every kind of block like B), B, and C: other layers, sizes, connector and a tower that was trained too."""
    for seed, name in enumerate("ab"):
        make(tmp_path, vision, seed=seed).save_pretrained(tmp_path / name, adapter_only=True)
    model = retrofit(
        tmp_path / "text-llama",
        vision,
        cross_attention_layers=[0, 3, 4, 4],
        cross_attention={"num_key_value_heads": 1, "gate_granularity": "channel", "qk_norm": True},
        connector_type="linear",
        image_visibility="latest",
        image_token_id=int(MARKED[0, 1]),
        additional_vocab_size=2,
        additional_vocab_in_head=True,
    )
    randomize(model, 5)
    next(model.model.vision_tower.parameters()).data.mul_(1.1)
    model.generation_config.repetition_penalty = 1.5
    model.save_pretrained(tmp_path / "c", adapter_only=True)
    return tmp_path


def own(folders, name, **options):
    return XAttnForConditionalGeneration.from_pretrained(folders / name, **options)


def on(text, folders, name, **options):
    """The folder on a text model that is loaded."""
    return own(folders, name, text_base=text, **options)


def differing(one, other):
    one, other = one.config.to_dict(), other.config.to_dict()
    return [name for name in {*one, *other} if one.get(name) != other.get(name)]


def test_folders_answer_as_on_their_own(folders):
    """Weights or settings of one folder that stay when another one follows; a base that changes or is copied."""
    base = AutoModelForCausalLM.from_pretrained(folders / "text-llama")
    alone = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    expected = base(token_ids()).logits, base.generate(token_ids(), **GREEDY)
    for name in "abcacb":
        model, fresh = on(base, folders, name), own(folders, name)
        assert model.model.text_model is base and not model.training
        assert (model.name_or_path, differing(model, fresh)) == (str(folders / name), [])
        same_model(fresh, model)
        with torch.no_grad():
            answers = [each.generate(MARKED, **IMAGES, **GREEDY) for each in (model, fresh)]
        assert torch.equal(*answers) and model.image_identity() == fresh.image_identity()
        base = remove_blocks(model)
        assert base.state_dict().keys() == alone.keys()
        assert all(torch.equal(tensor, alone[name]) for name, tensor in base.state_dict().items())
        assert torch.equal(base(token_ids()).logits, expected[0])
        assert torch.equal(base.generate(token_ids(), **GREEDY), expected[1])


def test_the_text_model_of_a_loaded_model(folders):
    """The same, where the text model came out of a model that was loaded whole; models without a head."""
    text = remove_blocks(own(folders, "c"))
    same_model(own(folders, "a"), on(text, folders, "a"))
    text = remove_blocks(text)
    body = XAttnModel.from_pretrained(folders / "b", text_base=text)
    with torch.no_grad():
        expected = own(folders, "b").model(token_ids(), **IMAGES).last_hidden_state
        assert torch.equal(body(token_ids(), **IMAGES).last_hidden_state, expected)
    body.save_pretrained(folders / "body", adapter_only=True)
    same_model(own(folders, "b"), on(remove_blocks(body), folders, "body"))


def test_auto_classes_use_the_loaded_text_model_itself(folders):
    """A text model that an Auto class copies, and that is then left without blocks."""
    base = AutoModelForCausalLM.from_pretrained(folders / "text-llama")
    model = AutoModelForImageTextToText.from_pretrained(folders / "a", text_base=base)
    assert model.model.text_model is base and torch.equal(logits_of(model), logits_of(own(folders, "a")))


def test_parts_have_the_dtypes_that_they_have_beside_a_loaded_base(folders, caplog):
    """Blocks, connector or tower in another dtype than beside a text model that is loaded with them."""
    transformers.logging.enable_propagation()
    for name in "ca":
        caplog.clear()
        base = AutoModelForCausalLM.from_pretrained(folders / "text-llama", dtype=torch.bfloat16)
        expected, model = own(folders, name, dtype=torch.bfloat16), on(base, folders, name)
        assert {n: t.dtype for n, t in model.state_dict().items()} == {
            n: t.dtype for n, t in expected.state_dict().items()
        }
        assert torch.equal(logits_of(model), logits_of(expected)) and differing(model, expected) == []
        assert "was not checked" not in caplog.text  # the names of the bases are equal
        base.config.name_or_path = "elsewhere"
        on(remove_blocks(model), folders, name)
        assert "in torch.bfloat16, so whether it is the base" in caplog.text


def test_a_model_on_a_loaded_base_saves_everything_again(folders):
    """A model that was put onto a text model and is saved without its base, its tower or its trained weights."""
    base = AutoModelForCausalLM.from_pretrained(folders / "text-llama")
    for name in "ca":
        model = on(base, folders, name)
        randomize(model, 9)
        for options in ({}, {"adapter_only": True}):
            folder = folders / f"{name}{len(options)}"
            model.save_pretrained(folder, **options)
            same_model(model, own(folders, folder.name))
        base = remove_blocks(model)


def filled(model):
    """Caches of images alone, and of conversations about them."""
    with torch.no_grad():
        talk = model.encode_images(**IMAGES)
        model(token_ids(), cache=talk)
        said = model.generate(token_ids(), **IMAGES, **GREEDY, return_dict_in_generate=True)[CACHE]
        return {
            "encoded": model.encode_images(**IMAGES),
            "talk about encoded images": talk,
            "forward": model(token_ids(), **IMAGES, use_cache=True)[CACHE],
            "generate": said,
            "int8": model.generate(
                token_ids(), cache=model.encode_images(**IMAGES, cache_dtype="int8"), return_dict_in_generate=True
            )[CACHE],
            "images of a talk": select_images(said, [0, 1]),
            "encoded behind text": model.encode_images(**IMAGES, cache=model(token_ids(), use_cache=True)[CACHE]),
        }


@pytest.mark.parametrize("name", ["b", "memory"])
def test_caches_of_another_folder(name, folders, vision):
    """Keys, values or hidden states of one folder's model that another folder's reads."""
    caches = filled(own(folders, "a"))
    base = AutoModelForCausalLM.from_pretrained(folders / "text-llama")
    if name == "memory":  # a model of no folder
        model = randomize(retrofit(base, vision, cross_attention_layers=[1, 3]), 8).eval()
    else:
        model = on(base, folders, name)
    for kind, cache in caches.items():
        length = cache.self_attention_cache.get_seq_length()
        text = torch.cat([token_ids(), token_ids(length=20)], dim=1)[:, : length + 1]
        for call in (
            lambda cache=cache: model(STEP, cache=cache),
            lambda cache=cache, text=text: model.generate(text, cache=cache, **GREEDY),
            lambda cache=cache: model.encode_images(**IMAGES, cache=cache),
        ):
            with torch.no_grad(), pytest.raises(ValueError, match="another model|another `adapter_only=True` folder"):
                call()
                pytest.fail(kind)
        assert cache.self_attention_cache.get_seq_length() == length
    with torch.no_grad():
        model(token_ids(), **IMAGES, use_cache=True)
        for cache in filled(model).values():
            with pytest.raises(ValueError, match="another model|another `adapter_only=True` folder"):
                own(folders, "a")(STEP, cache=cache)


def test_caches_of_the_same_folder(folders):
    """A conversation that is refused although the same folder's model goes on with it, in another process."""
    model = own(folders, "a")
    caches = pickle.loads(pickle.dumps(filled(model)))
    with torch.no_grad():
        expected = {kind: model(STEP, cache=copy.deepcopy(cache)).logits for kind, cache in caches.items()}
    again = on(AutoModelForCausalLM.from_pretrained(folders / "text-llama"), folders, "a")
    for kind, cache in caches.items():
        with torch.no_grad():
            assert torch.equal(again(STEP, cache=cache).logits, expected[kind]), kind
    empty = model(token_ids(), use_cache=True)[CACHE]  # text alone is the base's
    again(token_ids(), **IMAGES, cache=empty)
    empty.reset()
    own(folders, "b")(token_ids(), **IMAGES, cache=empty)


def test_the_store_of_an_earlier_model_gives_no_images(folders):
    """Images that a store of the model before holds."""
    model = own(folders, "a")
    model.enable_image_store()
    model.generate(token_ids(), **IMAGES, **GREEDY)
    model = on(remove_blocks(model), folders, "b")
    model.enable_image_store()
    expected = own(folders, "b").generate(token_ids(), **IMAGES, **GREEDY)
    assert torch.equal(model.generate(token_ids(), **IMAGES, **GREEDY), expected)


def test_what_does_not_fit(folders, caplog):
    """Blocks on a base that they were not trained on, and a text model that is half changed after an error."""
    peft = pytest.importorskip("peft")
    transformers.logging.enable_propagation()
    base = AutoModelForCausalLM.from_pretrained(folders / "text-llama")
    expected, attributes = base(token_ids()).logits, vars(base).copy()
    changed = own(folders, "a")
    changed.get_output_embeddings().weight.data.mul_(2)
    changed.save_pretrained(folders / "changed", adapter_only=True)
    cut = AutoModelForCausalLM.from_pretrained(folders / "text-llama", num_hidden_layers=3)
    randomize(retrofit(cut, every=2)).save_pretrained(folders / "cut", adapter_only=True)
    randomize(retrofit(make_base(folders / "wide", "mixtral"), every=2)).save_pretrained(
        folders / "wide-added", adapter_only=True
    )
    own(folders, "a").save_pretrained(folders / "whole")
    with_lora = AutoModelForCausalLM.from_pretrained(folders / "text-llama")
    peft.get_peft_model(with_lora, peft.LoraConfig(target_modules=["q_proj"]))
    for text, name, options, message in (
        (base, "changed", {}, "changed changes weights of its text model.*without `text_base`"),
        (base, "cut", {}, "cut changes weights of its text model"),
        (base, "wide-added", {}, "wide, and `text_base` .*text-llama is another one: `attention_bias`"),
        (base, "whole", {}, "`text_base` is for folders of"),
        (base, "a", {"dtype": torch.bfloat16}, "does not take `dtype` beside a `text_base`.*got torch.bfloat16"),
        (base, "a", {"image_visibility": "latest"}, "does not take `image_visibility` beside"),
        (base, "a", {"vision_base": folders / "text-llama"}, "Expected `vision` to be a vision model"),
        (changed.model.text_model, "a", {}, "already has cross-attention blocks"),
        (with_lora, "a", {}, "holds LoRA layers.*Merge the adapter"),
    ):
        with pytest.raises(ValueError, match=message):
            on(text, folders, name, **options)
    with pytest.raises(ValueError, match="pass other arguments by name"):
        XAttnForConditionalGeneration.from_pretrained(folders / "a", base, text_base=base)
    assert vars(base).keys() == attributes.keys() and torch.equal(base(token_ids()).logits, expected)
    caplog.clear()
    remove_blocks(on(base, folders, "a"))
    assert caplog.text == ""
    with pytest.raises(ValueError, match="`text_base` .* is another one: its weights differ"):
        on(remove_blocks(changed), folders, "a")


def test_a_folder_without_a_tower_follows_one_with_a_tower(folders):
    """A folder without a tower after one with a tower."""
    features = randomize(retrofit(folders / "text-llama", every=2), 8)
    features.save_pretrained(folders / "features", adapter_only=True)
    model = on(remove_blocks(own(folders, "a")), folders, "features")
    states = {"cross_attention_states": torch.randn(2, 5, 32)}
    assert torch.equal(logits_of(model, **states), logits_of(features.eval(), **states))
    assert model.model.vision_tower is None
    same_model(own(folders, "a"), on(remove_blocks(model), folders, "a"))


def test_an_adapter_on_top(folders):
    """An adapter (PEFT) on such a folder, loaded onto a text model."""
    peft = pytest.importorskip("peft", minversion=MIN_PEFT_VERSION)
    model = own(folders, "a")
    model.add_adapter(peft.LoraConfig(target_modules=lora_targets(model, "both"), init_lora_weights=False))
    model.save_pretrained(folders / "lora")
    base = AutoModelForCausalLM.from_pretrained(folders / "text-llama")
    assert torch.equal(logits_of(on(base, folders, "lora")), logits_of(own(folders, "lora")))


@pytest.mark.parametrize("method", METHODS)
def test_a_quantized_text_model(method, tmp_path, caplog):
    """A text model that is taken for another one because its weights are packed, or a base that nobody compares
    without a word.
    """
    transformers.logging.enable_propagation()
    for seed, name in enumerate("ab"):
        model = randomize(retrofit(quantized_folder() / "text", quantized_folder() / "vision", every=1), seed)
        model.save_pretrained(tmp_path / name, adapter_only=True)
    images = {"pixel_values": pixels().bfloat16()}
    options = {"quantization_config": quantization(method)}
    model = own(tmp_path, "a", **options)
    for name in "ba":
        model = on(remove_blocks(model), tmp_path, name)
        expected = logits_of(model, **images)
        assert torch.equal(expected, logits_of(own(tmp_path, name, **options), **images))
    model.save_pretrained(tmp_path / "again", adapter_only=True)
    assert torch.equal(logits_of(own(tmp_path, "again"), **images), expected)
    assert "was not checked" not in caplog.text
    copied = tmp_path / "copied"
    AutoModelForCausalLM.from_pretrained(quantized_folder() / "text").save_pretrained(copied)
    model = own(tmp_path, "a", text_base=copied, **options)
    on(remove_blocks(model), tmp_path, "b")
    assert "was not checked" in caplog.text
