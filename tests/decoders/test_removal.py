"""`remove_blocks` gives a text model back, and a text model that contains blocks saves what it saved before."""

import copy
import gc
import json
import pickle
import weakref
from itertools import chain
from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig
from transformers.integrations.peft import MIN_PEFT_VERSION

from helpers.models.quantized_bases import METHODS, folder, quantized_text
from helpers.models.tiny_composites import make_composite as make_vlm
from helpers.models.tiny_models import make_model, make_text, pixels, randomize, token_ids, vision_config
from hf_xattn import XAttnConfig, XAttnForConditionalGeneration, freeze, remove_blocks, retrofit


IDS, PIXELS = token_ids(), pixels()
# Fields of a configuration that say where a model is, or who wrote it.
OF_THE_FILE = "_name_or_path name_or_path transformers_version auto_map architectures dtype torch_dtype".split()
ADDED_TOKENS = {"additional_vocab_size": 2, "additional_vocab_in_head": True}
GIVEN = {"model": lambda model: model, "body": lambda model: model.model, "text": lambda model: model.model.text_model}


def state_of(model):
    """All that can be found out about a model: classes, attributes, configurations, tensors and their attributes."""
    found = {}
    for name, part in chain(model.named_modules(), model.named_parameters(), model.named_buffers()):
        found[name, "class"], found[name, "id"] = type(part), id(part)
        for attribute, value in vars(part).items():
            found[name, attribute] = copy.copy(value) if isinstance(value, (dict, set, list)) else value
        if isinstance(part, torch.Tensor):
            found[name, "values"] = part.detach().clone()
        if hasattr(part, "config"):
            found[name, "config attributes"] = dict(vars(part.config))
            found[name, "config"] = part.config.to_dict()
    found["", "generation_config"] = model.generation_config.to_dict()
    return found


def differing(before, after):
    def same(one, other):
        return torch.equal(one, other) if isinstance(one, torch.Tensor) else one is other or one == other

    return [
        key
        for key in before.keys() | after.keys()
        if not (key in before and key in after and same(before[key], after[key]))
    ]


def text_of(name, loaded, tmp_path):
    text = make_text(name)
    if loaded:
        text.save_pretrained(tmp_path / "loaded")
        text = AutoModelForCausalLM.from_pretrained(tmp_path / "loaded")
    return text


def files_in(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


@pytest.mark.parametrize("added", [{}, ADDED_TOKENS], ids=["", "tokens"])
@pytest.mark.parametrize("loaded", [False, True], ids=["built", "loaded"])
@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2", "mixtral"])
def test_the_text_model_is_what_it_was(name, loaded, added, tmp_path, monkeypatch):
    """A class, an attribute, a tie or a setting that stays behind; a text model that cannot be retrofitted twice."""
    text = text_of(name, loaded, tmp_path)
    monkeypatch.chdir(tmp_path)  # a retrofit notes where the text model came from
    if loaded:
        text.config.name_or_path = "loaded"
    before = state_of(text)
    with torch.no_grad():
        expected = text(IDS).logits
    for given, take in GIVEN.items():
        tower = AutoModel.from_config(vision_config())
        model = randomize(retrofit(text, tower, cross_attention_layers=[1, 1, 4], **added))
        assert differing(before, state_of(text))
        assert remove_blocks(take(model)) is text
        assert differing(before, state_of(text)) == [], given
        with torch.no_grad():
            assert torch.equal(text(IDS).logits, expected)


@pytest.mark.parametrize("added", [{}, ADDED_TOKENS], ids=["", "tokens"])
@pytest.mark.parametrize("name", ["llama_tied", "mixtral", "opt"])
@pytest.mark.parametrize(
    "options", [{}, {"max_shard_size": "20KB"}, {"variant": "small"}], ids=["", "shards", "variant"]
)
def test_the_text_model_saves_what_it_saved(name, added, options, tmp_path):
    """Tensors of blocks in the folder of a text-only model, which every later load of it calls unexpected."""
    text = make_text(name)
    parts = {"text": text, "decoder": text.base_model}
    for part, saved in parts.items():
        saved.save_pretrained(tmp_path / part, **options)
    model = retrofit(text, AutoModel.from_config(vision_config()), cross_attention_layers=[1, 1, 4], **added)
    for part, saved in parts.items():
        saved.save_pretrained(tmp_path / f"{part} with blocks", **options)
        before, after = files_in(tmp_path / part), files_in(tmp_path / f"{part} with blocks")
        if "max_shard_size" in options:  # transformers counts what the model holds, and nothing reads the number
            for files in (before, after):
                files["model.safetensors.index.json"] = json.loads(files["model.safetensors.index.json"])
                del files["model.safetensors.index.json"]["metadata"]["total_parameters"]
        assert before == after
    assert set(dict(text.named_parameters())) <= set(text.state_dict())  # no hook hides a weight
    assert model.model.text_model is text


def test_blocks_that_were_put_on_are_left_out_and_the_whole_model_is_saved_whole(tmp_path):
    """Blocks of a folder in that of a text-only model; a model that is saved without its blocks."""
    text = text_of("llama", True, tmp_path)
    randomize(retrofit(tmp_path / "loaded", cross_attention_layers=[0, 2])).save_pretrained(
        tmp_path / "set", adapter_only=True
    )
    text = remove_blocks(retrofit(text, cross_attention_layers=[1, 3]))
    model = XAttnForConditionalGeneration.from_pretrained(tmp_path / "set", text_base=text)
    text.save_pretrained(tmp_path / "alone")
    assert files_in(tmp_path / "alone") == files_in(tmp_path / "loaded")
    model.save_pretrained(tmp_path / "whole")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    states = torch.randn(2, 3, 32)
    with torch.no_grad():
        expected = model(IDS, cross_attention_states=states).logits
        assert torch.equal(again(IDS, cross_attention_states=states).logits, expected)


def test_a_vision_language_model_whose_text_half_was_taken(tmp_path):
    """Blocks in the folder of the model that the text half came from."""
    vlm = make_vlm("gemma3")
    vlm.save_pretrained(tmp_path / "before")
    model = retrofit(vlm)
    vlm.save_pretrained(tmp_path / "after")
    assert files_in(tmp_path / "after") == files_in(tmp_path / "before")
    remove_blocks(model)
    vlm.save_pretrained(tmp_path / "removed")
    assert files_in(tmp_path / "removed") == files_in(tmp_path / "before")


@pytest.mark.parametrize("again", [False, True], ids=["", "retrofitted again"])
def test_a_model_without_its_blocks_says_so(again, tmp_path):
    """Answers without images, or with the blocks of another model; a checkpoint without blocks."""
    text = make_text()
    model = retrofit(text, AutoModel.from_config(vision_config()))
    cache = model.encode_images(pixel_values=PIXELS)
    remove_blocks(text)
    if again:
        other = randomize(retrofit(text, AutoModel.from_config(vision_config())))
        with torch.no_grad():
            other(IDS, pixel_values=PIXELS)
    calls = {
        "text": lambda: model(IDS),
        "images": lambda: model.model(IDS, pixel_values=PIXELS),
        "cache": lambda: model.generate(IDS, cache=cache, max_new_tokens=2),
        "generate": lambda: model.generate(IDS, max_new_tokens=2),
        "encode_images": lambda: model.encode_images(pixel_values=PIXELS),
        "features": lambda: model.get_image_features(PIXELS),
        "save": lambda: model.save_pretrained(tmp_path / "model"),
        "save adapter": lambda: model.save_pretrained(tmp_path / "model", adapter_only=True),
        "blocks": lambda: model.blocks,
        "remove": lambda: remove_blocks(model),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match="blocks `remove_blocks` has taken out"):
            call()
            pytest.fail(name)
    assert not (tmp_path / "model").exists()


def test_a_loaded_model_gives_its_text_model(tmp_path):
    """A text model of a loaded model with the first settings of generation, other ties or other files."""
    text = make_text("llama_tied")
    text.generation_config = GenerationConfig(eos_token_id=[5, 6], pad_token_id=0, bos_token_id=1)
    text.save_pretrained(tmp_path / "text")
    randomize(retrofit(text, AutoModel.from_config(vision_config()), **ADDED_TOKENS)).save_pretrained(
        tmp_path / "model"
    )
    loaded = remove_blocks(AutoModelForImageTextToText.from_pretrained(tmp_path / "model"))
    loaded.save_pretrained(tmp_path / "again")
    before, after = files_in(tmp_path / "text"), files_in(tmp_path / "again")
    for files in (before, after):
        files["config.json"] = {
            name: value for name, value in json.loads(files["config.json"]).items() if name not in OF_THE_FILE
        }
    assert before == after


def test_what_a_user_has_changed_stays():
    """A setting, a mode or frozen weights of the user's, taken back together with the blocks."""
    text = make_text()
    model = retrofit(text).train()
    freeze(model)
    text.config.use_cache = False
    model.generation_config.max_new_tokens = 3
    remove_blocks(model)
    assert all(part.training for part in text.modules())
    assert not any(weight.requires_grad for weight in text.parameters())
    assert text.config.use_cache is False and text.generation_config.max_new_tokens == 3


def test_a_copy_loses_its_own_blocks():
    """A copy whose blocks are removed from the original, or which cannot tell what it was."""
    model = randomize(retrofit(make_text("llama_tied"), cross_attention_layers=[1], **ADDED_TOKENS))
    plain, states = make_text("llama_tied"), torch.randn(2, 3, 32)
    expected = model(IDS, cross_attention_states=states).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        text = remove_blocks(other)
        assert torch.equal(text(IDS).logits, plain(IDS).logits)
        assert [type(part) for part in text.modules()] == [type(part) for part in plain.modules()]
        assert vars(text).keys() == vars(plain).keys() and text.all_tied_weights_keys == plain.all_tied_weights_keys
        assert text._keys_to_ignore_on_save == set()
        assert torch.equal(model(IDS, cross_attention_states=states).logits, expected)


def make_adapter(model):
    peft = pytest.importorskip("peft", minversion=MIN_PEFT_VERSION)
    model.add_adapter(peft.LoraConfig(target_modules=["o_proj"]))
    return "LoRA layers"


def dispatch(model):
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    return "hook of accelerate"


def parametrize(model):
    class Same(nn.Module):
        def forward(self, weight):
            return weight

    torch.nn.utils.parametrize.register_parametrization(model.get_input_embeddings(), "weight", Same())
    return "is a Parametrized"


@pytest.mark.parametrize("change", [make_adapter, dispatch, parametrize])
def test_what_stands_in_the_way_is_named(change):
    """Half of the blocks gone, or layers that go on with a `forward` of another class."""
    model = retrofit(make_text(), **ADDED_TOKENS)
    words = change(model)
    before = state_of(model)
    with pytest.raises(ValueError, match=words):
        remove_blocks(model)
    assert differing(before, state_of(model)) == []


def test_what_is_no_model_with_blocks():
    """An error from the depths, or a text model that is returned as if blocks had been removed."""
    for given in (make_text(), make_model().model.connector, make_model().blocks[0]):
        with pytest.raises(ValueError, match="`model` to be a model with blocks"):
            remove_blocks(given)


def test_a_retrofit_that_fails_changes_nothing():
    """A text model with half of the blocks, which can be retrofitted no more."""
    text = make_text()
    before = state_of(text)
    unknown = {"model_type": "unknown", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Tower"}}
    config = XAttnConfig(text_config=text.config, vision_config=unknown, cross_attention_layers=[1, 4], **ADDED_TOKENS)
    with pytest.raises(ValueError, match="'unknown' part"):
        XAttnForConditionalGeneration(config, text_model=text)
    assert differing(before, state_of(text)) == []
    retrofit(text)


def test_memory_is_given_back_at_once():
    """A model that refers to itself, whose memory on a GPU waits for the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        model = retrofit(make_text())
        text = weakref.ref(model.model.text_model)
        del model
        assert text() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("method", METHODS)
def test_a_quantized_text_model(method, tmp_path):
    """A quantized text model whose own files no longer say how it was quantized."""
    text = quantized_text(method)
    before = text.config.to_dict()
    text.save_pretrained(tmp_path / "before")
    model = retrofit(text, every=1)
    text.save_pretrained(tmp_path / "after")
    before_files, after_files = files_in(tmp_path / "before"), files_in(tmp_path / "after")
    if method.startswith("torchao"):  # whose header differs from save to save
        again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "after", output_loading_info=True)
        assert not any(info.values()) and torch.equal(again(IDS).logits, text(IDS).logits)
        del before_files["model.safetensors"], after_files["model.safetensors"]
    assert after_files == before_files
    assert remove_blocks(model) is text and text.config.to_dict() == before
    loaded = XAttnForConditionalGeneration.from_pretrained(
        folder() / "model", quantization_config=text.hf_quantizer.quantization_config, dtype=torch.bfloat16
    )
    with torch.no_grad():
        expected = text(IDS).logits
        remove_blocks(loaded).save_pretrained(tmp_path / "again")
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "again")(IDS).logits, expected)
