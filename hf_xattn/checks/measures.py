"""What a check finds, how two tensors of logits are compared, and the inputs: random, seeded text and images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..images.vision import blank_image


HOLDS, BROKEN, FRESH, NOT_CHECKED = "holds", "BROKEN", "note", "not checked"

# Largest difference that rounding makes, as a share of the largest logit. In half precision a mixture of experts may
# choose other experts for a token after rounding.
ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
ROUNDING_OF_EXPERTS = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 0.2, torch.bfloat16: 0.2}


@dataclass(frozen=True)
class Result:
    name: str  # of the check
    status: str  # `HOLDS`, `BROKEN`, `FRESH` (holds, with something to know) or `NOT_CHECKED`
    line: str  # what was measured, in words
    measured: float | None = None
    allowed: float | None = None  # the largest or, for calls, the only number with which the promise holds


def largest_difference(first: torch.Tensor, second: torch.Tensor) -> float:
    """Largest difference of two tensors of one shape: 0 for equal infinities, and infinity for NaN."""
    first, second = first.detach().double().cpu(), second.detach().double().cpu()
    differences = torch.where(first == second, 0.0, (first - second).abs())
    return float(torch.nan_to_num(differences, nan=float("inf")).max()) if differences.numel() else 0.0


def largest(tensor: torch.Tensor) -> float:
    """Largest absolute value that is finite."""
    tensor = tensor.detach().double().abs()
    return float(torch.where(tensor.isfinite(), tensor, 0.0).max())


def has_experts(model: nn.Module) -> bool:
    """Whether a decoder has a mixture of experts, whose layers multiply the tokens of all rows together."""
    return any("experts" in name.rpartition(".")[2].lower() for name, _ in model.named_modules())


def why_rows_mix(model: Any) -> str | None:
    """Why rounding may depend on the other rows of a batch; None where each row is computed alone."""
    text = model.base_model.text_model
    if has_experts(text):
        return "its experts multiply the tokens of all rows together"
    if any(getattr(part, "is_loaded_in_8bit", False) for part in (model, text)):
        return "bitsandbytes chooses the 16-bit columns of 8-bit layers by the values of all rows"
    return None


def rounding_of(model: Any) -> float:
    """Share of the largest logit by which rounding may change the logits of a model."""
    text = model.base_model.text_model
    return (ROUNDING_OF_EXPERTS if has_experts(text) else ROUNDING).get(text.dtype, ROUNDING[torch.bfloat16])


def number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def listed(names: list[str], most: int = 3) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


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
