"""Random inputs of the checks, all seeded: text without special tokens, and images or features."""

from __future__ import annotations

from typing import Any

import torch

from ..images.vision import blank_image


ROWS, LENGTH = 2, 9
FEATURES = 6  # tokens of an image, without a vision tower
SEED = 0


def random_text(model: Any, length: int = LENGTH) -> torch.Tensor:
    """Ids of the base's vocabulary, `(ROWS, length)`, without special tokens and image markers."""
    config = model.config.text_config
    size = min(config.vocab_size, model.get_input_embeddings().weight.shape[0])
    special: set[int] = set()
    for source in (config, model.config, getattr(model, "generation_config", None)):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
            value = getattr(source, name, None)
            special.update([value] if isinstance(value, int) else value if isinstance(value, list) else [])
    words = torch.tensor([token for token in range(size) if token not in special] or [0])
    chosen = torch.randint(len(words), (ROWS, length), generator=torch.Generator().manual_seed(SEED))
    return words[chosen].to(model.get_input_embeddings().weight.device)


def mark_images(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The text with an image marker at the second token of the first row, where the model knows one."""
    marker, ids = model.config.image_token_id, ids.clone()
    if marker is not None:
        ids[0, 1] = marker
    return ids


def image_of_first_row(model: Any) -> dict[str, torch.Tensor]:
    """Arguments of `forward`, `generate` and `encode_images`: an image for the first row, none for the second."""
    generator = torch.Generator().manual_seed(SEED + 1)
    vision = model.config.vision_config
    device = model.get_input_embeddings().weight.device
    has_image = torch.tensor([[True], [False]], device=device)
    if vision is None:
        width = model.config.cross_attention_config.context_size
        states = torch.randn(ROWS, FEATURES, width, generator=generator).to(device)
        return {"cross_attention_states": states, "cross_attention_mask": has_image.expand(-1, FEATURES).clone()}
    blank, tiles = blank_image(vision, torch.device("cpu"), torch.float32)
    pixels = torch.randn(ROWS, *blank.shape[1:], generator=generator).to(device)
    images = {"pixel_values": pixels, "image_mask": has_image}
    if tiles is not None:
        images.update({name: value.repeat_interleave(ROWS, 0).to(device) for name, value in tiles._asdict().items()})
    return images
