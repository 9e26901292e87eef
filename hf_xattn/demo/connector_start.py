"""Starts the connector with a map from the features of a patch to the hidden states of its words: `seven`, `top`.

A block's queries come from text and its keys from the picture, through random projections at first. So it takes long
until the word `seven` looks at the patch with a seven. It takes fewer steps if both are near each other before the
projections. So the connector's first weights are a ridge regression from the features of patches to the language
model's hidden states at the words for these patches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..modeling_xattn import XAttnForConditionalGeneration
from ..processing_xattn import XAttnProcessor
from .canvases import HEIGHT, PATCH, WIDTH, WORDS, DigitPool, patch_labels, to_pixel_values
from .questions import COLUMNS, PHRASINGS, ROWS, region


CANVASES = 1000
BACKGROUND = 0.2  # share of the patches without a digit that count, as they are the most
# standard deviation of what is added: what no word names must pass too, such as how many digits stand left of a patch
RANDOM = 0.05
PENALTY = 1.0


@torch.no_grad()
def start_connector(
    model: XAttnForConditionalGeneration, base: PreTrainedModel, processor: XAttnProcessor, pool: DigitPool, seed: int
) -> None:
    """Sets the weights of a linear connector, in place.

    The tower of `model` was trained on digits. `base` is the language model before the retrofit.
    """
    rng = np.random.default_rng((seed, 7))
    canvases = [pool.canvas(rng) for _ in range(CANVASES)]
    pixel_values = torch.cat([to_pixel_values(canvas) for canvas in canvases]).to(model.device)
    tower: Any = model.model.vision_tower
    connector: Any = model.model.connector
    features = tower(pixel_values=pixel_values).last_hidden_state[:, 1:].flatten(0, 1).cpu()  # without the class token
    digits = torch.cat([patch_labels(canvas)[0] for canvas in canvases])
    kept = (digits < len(WORDS)) | torch.from_numpy(rng.random(len(digits)) < BACKGROUND)
    first = min(model.config.cross_attention_layers)
    of_digit = word_states(base, processor, first, WORDS)
    targets = torch.cat([of_digit, torch.zeros_like(of_digit[:1])])[digits]  # zeros for background
    corners = [(row, column) for row in range(0, HEIGHT, PATCH) for column in range(0, WIDTH, PATCH)]
    words = [region(*corner).split() for corner in corners]  # `top left`, ... of each patch of a canvas
    for part, names in enumerate((ROWS, COLUMNS)):
        place = word_states(base, processor, first, names)[[names.index(each[part]) for each in words]]
        targets = targets + place.repeat(CANVASES, 1) * (digits < len(WORDS))[:, None]
    weight, bias = ridge(features[kept], targets[kept])
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)) * RANDOM
    connector.layers[0].weight.copy_(weight + noise)
    connector.layers[0].bias.copy_(bias)


@torch.no_grad()
def word_states(base: PreTrainedModel, processor: XAttnProcessor, layer: int, words: tuple[str, ...]) -> torch.Tensor:
    """Returns the hidden states of two words or more in front of a layer, `(words, hidden_size)`.

    Their mean is subtracted, and each has a mean square of 1: this tells them apart.
    """
    tokenizer: Any = processor.tokenizer
    states = []
    for word in words:
        of_word = []
        for phrasing in PHRASINGS["read"]:
            chat = [{"role": "user", "content": phrasing}]
            asked = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(asked + word, add_special_tokens=False, return_tensors="pt")["input_ids"]
            output: Any = base(input_ids=ids.to(base.device), output_hidden_states=True)
            of_word.append(output.hidden_states[layer][0, -1].float().cpu())
        states.append(torch.stack(of_word).mean(0))
    different = torch.stack(states) - torch.stack(states).mean(0)
    return different / different.square().mean(-1, keepdim=True).sqrt()


def ridge(features: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Solves `min |features @ weight.T + bias - targets|² + PENALTY (|weight|² + |bias|²)`.

    `features` are `(count, inputs)`, `targets` `(count, outputs)`. Returns the weight `(outputs, inputs)` and the bias
    `(outputs,)` in float32.
    """
    inputs = torch.cat([features, torch.ones_like(features[:, :1])], dim=1).double()
    penalty = PENALTY * torch.eye(inputs.shape[1], dtype=inputs.dtype)
    solved = torch.linalg.solve(inputs.T @ inputs + penalty, inputs.T @ targets.double()).float()
    return solved[:-1].T, solved[-1]
