"""A small model of each decoder type that is served, and its retrofit without a vision tower."""

import warnings

import torch
from transformers import AutoModelForCausalLM

from helpers.models.tiny_architectures import tiny_config
from hf_xattn import XAttnConfig, XAttnForConditionalGeneration
from hf_xattn.decoders.decoder import find_decoder
from hf_xattn.utils.architectures import architecture, causal_model_types


SERVED = [name for name in causal_model_types() if architecture(name).refused is None]
CONTEXT_SIZE = 16


def make_tiny(model_type, dtype=torch.float32):
    """The text model of a decoder type."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tiny sizes leave special tokens outside the vocabulary
        return AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=dtype).eval()


def retrofitted(text):
    """The text model with two blocks, for images given as `cross_attention_states` of width `CONTEXT_SIZE`."""
    config = XAttnConfig(
        text_config=text.config,
        cross_attention_layers=[1, len(find_decoder(text)[1])],  # in front of a layer, and after the last one
        cross_attention_config={"context_size": CONTEXT_SIZE},
    )
    return XAttnForConditionalGeneration(config, text_model=text).eval()
