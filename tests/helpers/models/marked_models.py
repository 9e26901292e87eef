"""Models that follow image markers, what their text may see by each rule, and short calls of `generate`."""

import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from helpers.models.tiny_architectures import tiny_config
from helpers.models.tiny_models import make_model, randomize, strengthen, vision_config
from hf_xattn import XAttnConfig, XAttnForConditionalGeneration


MARKER = 3
NEW = 5
RULES = ["all", "previous", "latest", "latest_group"]


def generate(model, ids, **kwargs):
    return model.generate(ids, **{"max_new_tokens": NEW, "do_sample": False, **kwargs})


def fresh_cache():
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


def marked(rule="latest", name="llama", **kwargs):
    """A model that follows image markers."""
    return make_model(name, image_token_id=MARKER, image_visibility=rule, **kwargs)


def close(first, second):
    return torch.allclose(first, second, atol=1e-4)


def sees_of(ids, rule, num_images, tokens=16):
    """`(batch, text_len, num_images * tokens)` by the rule, counted with loops."""
    mask = torch.zeros(*ids.shape, num_images, dtype=torch.bool)
    for row, line in enumerate(ids.tolist()):
        count = 0
        for step, token in enumerate(line):
            count = min(count + (token == MARKER), num_images)
            first = {"previous": 0, "latest": max(count - 1, 0)}[rule]
            mask[row, step, first:count] = True
    return mask.repeat_interleave(tokens, dim=-1)


def states_of(model, images):
    """The features of images, `(batch, num_images, tokens, context_size)`."""
    with torch.no_grad():
        return model.model.image_encoder.features(images)


def state_space(name, rule="all", **config):
    """A state-space decoder with blocks in front of layers 1 and 3."""
    torch.manual_seed(0)
    text = strengthen(AutoModelForCausalLM.from_config(tiny_config(name)).eval())
    text.generation_config.eos_token_id = None
    config = XAttnConfig(
        text_config=text.config,
        vision_config=vision_config(),
        cross_attention_layers=[1, 3],
        image_token_id=MARKER,
        image_visibility=rule,
        **config,
    )
    return randomize(XAttnForConditionalGeneration(config, text_model=text).eval())
