"""Sizes that configurations of text decoders and of vision towers name, each under a name of its own."""

from __future__ import annotations

from transformers import PreTrainedConfig

from .architectures import architecture


# Vision towers that read an image as tiles, with aspect ratios, and whose output is as wide as `vision_output_dim`.
TILED_VISION_TYPES = ("mllama_vision_model",)


def text_num_hidden_layers(text_config: PreTrainedConfig) -> int:
    """Number of layers of the decoder's stack."""
    decoder = text_config.get_text_config(decoder=True)
    return getattr(decoder, architecture(decoder.model_type).layer_count)


def text_hidden_size(text_config: PreTrainedConfig) -> int:
    """Width of the text stream."""
    return text_config.get_text_config(decoder=True).hidden_size


def vision_hidden_size(vision_config: PreTrainedConfig) -> int:
    """Width of `last_hidden_state` of a vision model.

    Raises:
        ValueError: where the configuration names no width.
    """
    for config in (vision_config, getattr(vision_config, "vision_config", None)):
        width = "vision_output_dim" if getattr(config, "model_type", None) in TILED_VISION_TYPES else "hidden_size"
        size = getattr(config, width, None)
        if isinstance(size, int):
            return size
        sizes = getattr(config, "hidden_sizes", None)
        if sizes:
            return sizes[-1]
    raise ValueError(
        f"`vision_config` of type {vision_config.model_type!r} names no `hidden_size`, so the width of its features "
        "is unknown. Use a vision model with `hidden_size` or `hidden_sizes`."
    )


def shared_size(config: PreTrainedConfig, field: str) -> int | None:
    """A size that all layers of a decoder share; None where it has none, or another one for each layer."""
    try:
        value = getattr(config, field, None)
    except RuntimeError:  # transformers' answer for a field that differs between layers
        return None
    return value if isinstance(value, int) and value > 0 else None
