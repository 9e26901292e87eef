"""Keyword arguments of `forward`: a decoder's own pass, and no other is taken without a word."""

import pytest
import torch
from transformers.utils import TransformersKwargs

from helpers.models.custom_decoder import CustomDecoderConfig, CustomDecoderForCausalLM
from helpers.models.tiny_models import TEXT_CONFIGS, make_model, make_text, pixels, token_ids
from hf_xattn import retrofit
from hf_xattn.utils.keywords import suggestion
from hf_xattn.utils.transformers_api import CACHE


MISSPELT = {
    "pixel_value": "pixel_values",
    "images": "pixel_values",
    "image_masks": "image_mask",
    "cross_attention_state": "cross_attention_states",
    "attention_masks": "attention_mask",
    "output_attention": "output_attentions",
    "cache_params": CACHE,
}
# What `generate`, `Trainer`, collators and tokenizers of transformers hand to a decoder.
EXTRAS = {
    "cache_position": torch.arange(7),
    "num_items_in_batch": torch.tensor(14),
    "output_hidden_states": True,
    "return_dict": True,
    "use_cache": False,
    "cu_seq_lens_q": None,
    "max_length_q": None,
    "seq_idx": None,
}


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_misspelt_arguments_are_refused(name):
    """An answer without the image, because the argument that holds it was ignored."""
    model = make_model(name)
    for caller in (model, model.model):
        for wrong, right in MISSPELT.items():
            message = rf"forward\(\) got an unexpected keyword argument `{wrong}`\. Did you mean `{right}`\?"
            with pytest.raises(TypeError, match=message):
                caller(token_ids(), **{wrong: pixels()})
        with pytest.raises(TypeError, match=r"unexpected keyword argument `bogus`\.$"):
            caller(token_ids(), bogus=1)
    with pytest.raises(TypeError, match="`cross_attention_context`"):
        model(token_ids(), cross_attention_context=1)
    with pytest.raises(TypeError, match=r"XAttnModel.forward\(\).*`labels`"):
        model.model(token_ids(), labels=token_ids())


def test_features_of_the_tower_have_a_name_of_their_own():
    """What a vision tower has returned, passed as image tokens, and an error that names a shape alone."""
    model, features = make_model(), torch.randn(2, 16, 24)
    for call in (model, model.model.encode_images, lambda ids, **given: model.generate(ids, max_new_tokens=2, **given)):
        arguments = () if call == model.model.encode_images else (token_ids(),)
        with pytest.raises(ValueError, match=r"got \(2, 16, 24\).*width of the vision tower.*`vision_features`"):
            call(*arguments, cross_attention_states=features)
        call(*arguments, vision_features=features)
    with pytest.raises(ValueError, match=r"context_size=32.*got \(2, 16, 7\)"):
        model(token_ids(), cross_attention_states=torch.randn(2, 16, 7))


@torch.no_grad()
@pytest.mark.parametrize("name", TEXT_CONFIGS)
def test_what_decoders_take_passes(name):
    """An argument of transformers' own that the check does not know."""
    model, base = make_model(name, random=False), make_text(name)
    assert torch.equal(model(token_ids(), **EXTRAS).logits, base(token_ids(), **EXTRAS).logits)
    hidden = model.model(token_ids(), **{**EXTRAS, "output_hidden_states": True}).hidden_states
    assert len(hidden) == 5
    assert model.model._interface.keywords >= TransformersKwargs.__optional_keys__


@torch.no_grad()
def test_arguments_of_one_decoder():
    """An argument that only one decoder has, refused with it or taken without it."""
    ids = token_ids()
    types = torch.zeros_like(ids)
    gpt2 = make_model("gpt2", random=False)
    assert torch.equal(gpt2(ids, token_type_ids=types).logits, make_text("gpt2")(ids, token_type_ids=types).logits)
    outputs = make_model("mixtral")(ids, output_router_logits=True)
    assert len(outputs.router_logits) == 4
    with pytest.raises(TypeError, match="task_type_ids"):
        gpt2(ids, task_type_ids=types)


@torch.no_grad()
def test_custom_code_may_read_other_names():
    """A keyword that only the code of a custom decoder knows, refused; a misspelt image argument beside it, taken."""
    model = retrofit(CustomDecoderForCausalLM(CustomDecoderConfig()), every=2)
    model(token_ids(), packing="rows")
    with pytest.raises(TypeError, match="pixel_values"):
        model(token_ids(), pixel_value=pixels())


def test_a_misspelt_name_gets_a_suggestion():
    """A name of another library's, or one far from all known."""
    assert suggestion("images", ["pixel_values", "image_mask"]) == " Did you mean `pixel_values`?"
    assert suggestion("dtpye", ["dtype", "device_map"]) == " Did you mean `dtype`?"
    assert suggestion("bogus", ["dtype", "device_map"]) == ""
