"""What of a model is served on vLLM. What is not is refused by name when the model loads. Imports no vLLM.

An engine that leaves something out would give wrong text without an error. So every field of the configurations stands
in a table here, and a field that stands in none must have its default.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from ..configuration_xattn import CrossAttentionConfig, PerceiverConfig, XAttnConfig
from ..utils.config_checks import own_fields
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


# The fields of a model, a perceiver and a block whose every value is served, but for what [`why_not_served`] names.
FIELDS = (
    (
        CrossAttentionConfig,
        frozenset(
            """
            hidden_size num_attention_heads context_size num_key_value_heads head_dim intermediate_size qk_norm_eps
            hidden_act mlp_type norm_type norm_eps attention_bias mlp_bias attention_dropout gate gate_options
            gate_granularity gate_init zero_init qk_norm context_norm quiet_softmax initializer_range position_bias
            position_bias_num_buckets position_bias_max_distance position position_options
            """.split()
        ),
    ),
    (
        PerceiverConfig,
        frozenset(
            """
            hidden_size intermediate_size num_latents num_image_positions num_hidden_layers num_attention_heads head_dim
            hidden_act qk_norm norm_eps
            """.split()
        ),
    ),
    (
        XAttnConfig,
        frozenset(
            """
            text_config vision_config cross_attention_config cross_attention_layers perceiver_config image_token_id
            image_visibility additional_vocab_size additional_vocab_in_head additional_vocab_scaled connector_type
            connector_options connector_hidden_act connector_bias vision_feature_select_strategy vision_feature_layer
            vision_hidden_size source_config
            """.split()
        ),
    ),
)


def why_not_served(config: PreTrainedConfig) -> str | None:
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
    for part, (config_class, known) in zip((block, config.perceiver_config, config), FIELDS):
        for name, default in own_fields(config_class).items() if part is not None else ():
            if name not in known and getattr(part, name) != default:
                return f"`{name}={getattr(part, name)!r}`, which this version does not know how to serve"
    return None


def check_served(config: PreTrainedConfig) -> None:
    """Raises a `ValueError` that names what of a model is not served on vLLM."""
    if reason := why_not_served(config):
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
