"""The hidden states of a text model at words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..decoders.decoder import find_decoder


WORD = re.compile(r"\w+(?:['’-]\w+)*")


class _Reached(Exception):
    """All hidden states that are asked for are there."""


@torch.no_grad()
def states_in_front(
    text_model: PreTrainedModel, layers: Sequence[int], input_ids: list[list[int]]
) -> dict[int, list[torch.Tensor]]:
    """The hidden states in front of layers, for each text `(tokens, hidden_size)`, in float32. Later layers do not run.

    Args:
        input_ids (`list[list[int]]`): texts. They are padded at the right end, where no causal decoder looks.
    """
    _, decoder = find_decoder(text_model)
    found: dict[int, torch.Tensor] = {}

    def keeper(layer: int) -> Any:
        def keep(_: nn.Module, args: Any, kwargs: Any) -> None:
            found[layer] = (args[0] if args else kwargs["hidden_states"]).detach()
            if layer == max(layers):
                raise _Reached

        return keep

    longest = max(map(len, input_ids))
    padded = torch.tensor([[*each, *[each[-1]] * (longest - len(each))] for each in input_ids])
    hooks = [decoder[layer].register_forward_pre_hook(keeper(layer), with_kwargs=True) for layer in {*layers}]
    try:
        text_model(input_ids=padded.to(text_model.device), use_cache=False)
    except _Reached:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    for layer, rows in found.items():
        if rows.shape[:-1] != padded.shape:
            raise ValueError(
                f"Expected hidden states (batch, text_len, hidden_size) in front of layer {layer} of the text model, "
                f"got shape {tuple(rows.shape)}: `align_connector` knows one stream of them."
            )
    return {layer: [row[: len(ids)].float() for row, ids in zip(rows, input_ids)] for layer, rows in found.items()}


def word_states(
    text_model: PreTrainedModel,
    tokenizer: Any,
    layer: int,
    words: Sequence[str],
    prompts: Sequence[str],
    at_once: int = 1,
) -> torch.Tensor:
    """The hidden states in front of a layer at the ends of words, the mean over `prompts`, `(words, hidden_size)`.

    Args:
        prompts (`Sequence[str]`): texts in front of the word.
        at_once (`int`): texts in a batch.
    """
    texts = [prompt + word for word in words for prompt in prompts]
    states: list[torch.Tensor] = []
    for start in range(0, len(texts), at_once):
        ids = tokenizer(texts[start : start + at_once], add_special_tokens=False)["input_ids"]
        states += [each[-1].cpu() for each in states_in_front(text_model, [layer], ids)[layer]]
    return torch.stack(states).unflatten(0, (len(words), len(prompts))).mean(1)


def told_apart(states: torch.Tensor) -> torch.Tensor:
    """The states of two words or more without their mean, each with a mean square of 1: what tells them apart."""
    different = states - states.mean(0)
    return different / different.square().mean(-1, keepdim=True).sqrt()
