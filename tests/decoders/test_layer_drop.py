"""LayerDrop: decoders that leave out layers at random in training do not while they have blocks."""

import copy
import json
import pickle

import pytest
import torch

from helpers.models.tiny_decoders import CONTEXT_SIZE, make_tiny
from helpers.models.tiny_models import randomize
from hf_xattn import XAttnConfig, XAttnForConditionalGeneration, remove_blocks
from hf_xattn.decoders.decoder import find_decoder
from hf_xattn.utils.transformers_api import CACHE


IDS = torch.randint(4, 90, (2, 7), generator=torch.Generator().manual_seed(1))
STATES = torch.randn(2, 5, CONTEXT_SIZE, generator=torch.Generator().manual_seed(2))
TYPES = ["opt", "xglm", "biogpt"]


def dropping(model_type="opt"):
    """A model on a base that would leave out most of its layers."""
    text = make_tiny(model_type)
    text.config.layerdrop = find_decoder(text)[0].layerdrop = 0.9
    config = XAttnConfig(
        text_config=text.config,
        cross_attention_layers=[0, 1, 2, 3],
        cross_attention_config={"context_size": CONTEXT_SIZE},
    )
    return randomize(XAttnForConditionalGeneration(config, text_model=text)).train()


@pytest.mark.parametrize("model_type", TYPES)
def test_no_layer_is_left_out(model_type):
    """Blocks that do not run, and a cache with keys and values of some layers alone."""
    model = dropping(model_type)
    for seed in range(4):
        torch.manual_seed(seed)
        model.zero_grad()
        outputs = model(IDS, cross_attention_states=STATES, labels=IDS, use_cache=True)
        assert outputs[CACHE].get_seq_length() == 7
        later = model(IDS[:, :1], cache=outputs[CACHE]).logits.sum()
        (outputs.loss + later).backward()
        assert all(block.attn.k_proj.weight.grad.any() for block in model.blocks)


@pytest.mark.parametrize("how", ["as it is", "copied", "pickled", "loaded"])
@pytest.mark.parametrize("model_type", TYPES)
def test_the_base_gets_it_back(model_type, how, tmp_path):
    """A base that trains in another way when its blocks are gone, or a saved configuration without its value."""
    model = dropping(model_type)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["text_config"]["layerdrop"] == 0.9
    if how == "copied":
        model = copy.deepcopy(model)
    elif how == "pickled":
        model = pickle.loads(pickle.dumps(model))
    elif how == "loaded":
        model = XAttnForConditionalGeneration.from_pretrained(tmp_path)
    assert find_decoder(model.model.text_model)[0].layerdrop == 0
    text = remove_blocks(model)
    assert find_decoder(text)[0].layerdrop == text.config.layerdrop == 0.9


def test_layer_drop_is_turned_off_with_a_warning(caplog):
    """A setting that is changed without a word."""
    with caplog.at_level("WARNING"):
        dropping()
    assert "`layerdrop` of OPTForCausalLM (model_type 'opt') is 0 instead of 0.9" in caplog.text


def test_layers_that_get_nothing_are_told():
    """A decoder that does not hand the images on."""
    model = dropping()
    model.model._interface = model.model._interface._replace(receives_keywords=False)
    for training in (True, False):
        model.train(training)
        with pytest.raises(
            RuntimeError, match="all 4 blocks to run, got 0: OPTForCausalLM did not pass the images to its layers"
        ):
            model(IDS, cross_attention_states=STATES)
