"""Says which models vLLM can serve. Any other model raises an error that names the reason when it is loaded.

An engine that ignored a setting of a model would give wrong text without an error. So a table in
`tests/vllm_plugin/test_served.py` lists every field of the configurations. A new field must be served, or refused here,
before it is added to that table. This file does not import vLLM.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from ..configuration_xattn import XAttnConfig
from ..processing_xattn import XAttnProcessor
from ..utils.parts import named_parts
from .steps import images_seen


class Decoder(NamedTuple):
    """A text model of vLLM."""

    architecture: str  # name of the class in vLLM's registry
    layers: str = "model.layers"  # attribute in which the class keeps its layers
    embedding: str = "model.embed_tokens"  # name of the embedding in a checkpoint
    head: str = "lm_head"  # name of the head in a checkpoint


# The decoders that are served, by `model_type`. A test compares each of them with `generate`.
DECODERS = {
    "gemma2": Decoder("Gemma2ForCausalLM"),
    "gemma3_text": Decoder("Gemma3ForCausalLM"),
    "gpt2": Decoder("GPT2LMHeadModel", layers="transformer.h", embedding="transformer.wte"),
    "granite": Decoder("GraniteForCausalLM"),
    "llama": Decoder("LlamaForCausalLM"),
    "mistral": Decoder("MistralForCausalLM"),
    "mixtral": Decoder("MixtralForCausalLM"),
    "olmo2": Decoder("Olmo2ForCausalLM"),
    "opt": Decoder("OPTForCausalLM", layers="model.decoder.layers", embedding="model.decoder.embed_tokens"),
    "phi3": Decoder("Phi3ForCausalLM"),
    "qwen2": Decoder("Qwen2ForCausalLM"),
    "qwen3": Decoder("Qwen3ForCausalLM"),
    "qwen3_moe": Decoder("Qwen3MoeForCausalLM"),
}
SCALED = ("gemma2", "gemma3_text")  # decoders that scale the output of their embedding


def _why_not_served(config: PreTrainedConfig) -> str | None:
    """Returns the reason why a model with this configuration is not served on vLLM. None if it is served."""
    if not isinstance(config, XAttnConfig):
        return f"a configuration of type {type(config).__name__}"
    block, decoder = config.cross_attention_config, config.text_config.model_type
    if block.position_bias:
        return "`position_bias=True`: vLLM's attention kernels take no bias"
    if block.context_norm:
        return "`context_norm=True`: it was not compared with vLLM"
    if config.vision_config is None:
        return "`vision_config=None`: a request brings pictures, and this model takes `cross_attention_states`"
    if decoder not in DECODERS:
        return f"the decoder {decoder!r}: it was not compared with vLLM. Served are {', '.join(sorted(DECODERS))}"
    if decoder in SCALED and config.additional_vocab_size and not config.additional_vocab_scaled:
        # vLLM keeps added rows in the same table, and scales all rows of it.
        return f"`additional_vocab_scaled=False` with the decoder {decoder!r}, whose embedding is scaled"
    for parts, name in named_parts(config):
        if parts.is_own(name):
            return f"`{parts.field}={name!r}`, a {parts.kind} of your own"
    return None


def check_served(config: PreTrainedConfig) -> None:
    """Raises a `ValueError` with the reason if a model is not served on vLLM."""
    if reason := _why_not_served(config):
        raise ValueError(f"hf_xattn does not serve this model on vLLM, because of {reason}. `hf-xattn serve` does.")


def check_markers(processor: XAttnProcessor, tokens: list[int], num_images: int) -> None:
    """Raises a `ValueError` if a prompt does not have one marker for each image, where the processor has markers."""
    if processor.image_token is None:
        return
    found = sum(token == processor.image_token_id for token in tokens)
    if found != num_images:
        raise ValueError(
            f"Expected one image marker ({processor.image_token!r}) in the prompt for each image, got {found} markers "
            f"and {num_images} images."
        )


def last_seen(rule: str, markers: list[bool], num_images: int) -> int:
    """Returns the number of images that the text after a prompt sees. These are always the last images.

    Args:
        rule (`str`): `image_visibility`.
        markers (`list[bool]`): whether each token of the prompt is an image marker. Markers beyond the number of images
            do not count.
        num_images (`int`): number of images of the request.

    Raises:
        ValueError: if the rule follows markers, and the prompt has too few.
    """
    if rule == "all" or num_images == 0:
        return num_images
    if sum(markers) < num_images:
        raise ValueError(
            f"Expected one image marker in the prompt for each image, because of `image_visibility={rule!r}`, got "
            f"{sum(markers)} markers and {num_images} images."
        )
    return int(images_seen(rule, torch.tensor(markers), num_images)[-1].sum())
