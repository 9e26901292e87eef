"""What of a model is served on vLLM. What is not is refused by name when the model loads. Imports no vLLM.

An engine that leaves something out would give wrong text without an error. So every field of the configurations stands
in a table of `tests/vllm_plugin/test_served.py`: a new one must be served, or refused here, before it is added there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from ..configuration_xattn import XAttnConfig
from ..utils.parts import named_parts


class Decoder(NamedTuple):
    """A text model of vLLM."""

    architecture: str  # the class, by its name in vLLM's registry
    layers: str = "model.layers"  # where the class keeps its layers
    embedding: str = "model.embed_tokens"  # the embedding, and with `head` the head, by their names in a checkpoint
    head: str = "lm_head"


# By `model_type`. Each was compared with `generate`; a test runs all of them.
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
SCALED = ("gemma2", "gemma3_text")  # those that multiply what their embedding returns


def _why_not_served(config: PreTrainedConfig) -> str | None:
    """Why a model with this configuration is not served on vLLM, or None."""
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
        # vLLM scales all rows of one table.
        return f"`additional_vocab_scaled=False` with the decoder {decoder!r}, whose embedding is scaled"
    for parts, name in named_parts(config):
        if parts.is_own(name):
            return f"`{parts.field}={name!r}`, a {parts.kind} of your own"
    return None


def check_served(config: PreTrainedConfig) -> None:
    """Raises a `ValueError` that names what of a model is not served on vLLM."""
    if reason := _why_not_served(config):
        raise ValueError(f"hf_xattn does not serve this model on vLLM, because of {reason}. `hf-xattn serve` does.")


def check_markers(processor: Any, tokens: list[int], num_images: int) -> None:
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
    """How many images, the last ones, the text sees that follows a prompt.

    Args:
        rule (`str`): `image_visibility`.
        markers (`list[bool]`): of each token of the prompt, whether it is an image marker. Markers beyond the number
            of images count for none.
        num_images (`int`): of the request.

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
    if rule == "previous":
        return num_images
    if rule == "latest":
        return 1
    places = [place for place, marker in enumerate(markers) if marker][:num_images]
    count = 1
    while count < num_images and places[-count - 1] == places[-count] - 1:
        count += 1
    return count
