"""Reads sizes from the configurations of text decoders and vision towers, whose field names differ."""

from __future__ import annotations

from transformers import PreTrainedConfig

from .architectures import architecture


# Vision towers that read an image as tiles, with aspect ratios. The width of their output is `vision_output_dim`.
TILED_VISION_TYPES = ("mllama_vision_model",)


def text_num_hidden_layers(text_config: PreTrainedConfig) -> int:
    """Returns the number of layers of the decoder."""
    decoder = text_config.get_text_config(decoder=True)
    return getattr(decoder, architecture(decoder.model_type).layer_count)


def text_hidden_size(text_config: PreTrainedConfig) -> int:
    """Returns the hidden size of the decoder."""
    return text_config.get_text_config(decoder=True).hidden_size


def vision_hidden_size(vision_config: PreTrainedConfig) -> int:
    """Returns the width of a vision model's `last_hidden_state`.

    Raises:
        ValueError: if the configuration has no such width.
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
        f"`vision_config` of type {vision_config.model_type!r} names no `hidden_size`: expected `hidden_size` or "
        "`hidden_sizes`, the width of the vision model's features."
    )


def shared_size(config: PreTrainedConfig, field: str) -> int | None:
    """Returns a size that all layers of a decoder share. Returns None if there is no such field or layers differ in it."""
    try:
        value = getattr(config, field, None)
    except RuntimeError:  # raised by transformers for a field that differs between layers
        return None
    return value if isinstance(value, int) and value > 0 else None
