"""Models that follow image markers, what their text may see by each rule, and short calls of `generate`."""

import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from helpers.models.tiny_architectures import tiny_config
from helpers.models.tiny_models import make_model, make_text, pixels, randomize, strengthen, token_ids, vision_config
from hf_xattn import XAttnConfig, XAttnForConditionalGeneration


MARKER = 3
GREEDY = {"max_new_tokens": 6, "do_sample": False}
NEW = 5
RULES = ["all", "previous", "latest", "latest_group"]


def generate(model, ids, **kwargs):
    return model.generate(ids, **{"max_new_tokens": NEW, "do_sample": False, **kwargs})


def fresh_cache():
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


def marked(rule="latest", name="llama", **kwargs):
    """A model that follows image markers."""
    return make_model(name, image_token_id=MARKER, image_visibility=rule, **kwargs)


def marked_model(rule="latest"):
    """A model whose text sees images by their markers, and ids with markers only where they are asked for."""
    model = strengthen(marked(rule))

    def ids(length, *markers, seed=0):
        drawn = token_ids(1, length, seed=seed)
        drawn[drawn == MARKER] = MARKER + 1
        drawn[0, list(markers)] = MARKER
        return drawn

    return model, ids


def strong_model():
    """A model whose weights are large enough that each image shows in the logits."""
    text = strengthen(make_text())
    torch.manual_seed(2)
    config = XAttnConfig(text_config=text.config, vision_config=vision_config(), cross_attention_layers=[1, 3])
    return randomize(XAttnForConditionalGeneration(config, text_model=text).eval())


def turn(model, **options):
    """A turn about one image."""
    return model.generate(token_ids(1), pixel_values=pixels(1, 1), return_dict_in_generate=True, **GREEDY, **options)


def close(first, second):
    return torch.allclose(first, second, atol=1e-4)


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
