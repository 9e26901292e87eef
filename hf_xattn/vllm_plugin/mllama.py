"""Llama 3.2 Vision (`MllamaForConditionalGeneration`) on vLLM, which lost this model after 0.10.2.

The engine gets the model that the importer would make of the checkpoint (see `importers/mllama.py`). The answers are
those of transformers' Mllama, which differs in one point from a model of this package: a text position that sees no
image attends to all image tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import AutoConfig, MllamaConfig, MllamaProcessor
from transformers.models.mllama.processing_mllama import build_string_from_input

from ..configuration_xattn import XAttnConfig
from ..importers.mllama import recipe
from ..processing_xattn import XAttnProcessor


if TYPE_CHECKING:
    from vllm.config import ModelConfig

ARCHITECTURE = "MllamaForConditionalGeneration"


def is_mllama(config: XAttnConfig) -> bool:
    """Whether the checkpoint is an original Mllama checkpoint, and not one that the importer wrote."""
    return config.architectures == [ARCHITECTURE]


def as_xattn(config: MllamaConfig) -> XAttnConfig:
    """Returns the configuration of the model that the importer would make.

    Raises a `ValueError` if the importer cannot import such a model.
    """
    target = recipe(config).config
    target.architectures = [ARCHITECTURE]
    return target


def as_saved(weights: Iterable[tuple[str, torch.Tensor]], config: XAttnConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the weights of an Mllama checkpoint, with the names that they have in a folder of this package.

    Raises:
        ValueError: for a name that Mllama does not have.
    """
    made = recipe(cast(MllamaConfig, AutoConfig.for_model(**(config.source_config or {}))))
    for name, weight in weights:
        targets = made.targets(name)
        if targets is None:
            raise ValueError(f"Expected weights of Llama 3.2 Vision, got {name!r}.")
        for target in targets:
            yield target.name, weight[target.rows]


def processor_of(model_config: ModelConfig) -> XAttnProcessor:
    """Loads the processor of the folder that the engine serves. `model_config` is the engine's.

    It is the processor that one would use with `generate`.
    """
    options = {"revision": model_config.tokenizer_revision, "trust_remote_code": model_config.trust_remote_code}
    if is_mllama(model_config.hf_config):
        given: Any = MllamaProcessor.from_pretrained(model_config.tokenizer, **options)
        return XAttnProcessor(
            given.image_processor, given.tokenizer, chat_template=given.chat_template, image_token=given.image_token
        )
    return XAttnProcessor.from_pretrained(model_config.tokenizer, **options)


def written_prompt(text: str, processor: XAttnProcessor) -> str:
    """Returns a plain text as `MllamaProcessor` writes it: the BOS token comes after the markers at the beginning."""
    marker: Any = processor.image_token
    return build_string_from_input(text, processor.tokenizer.bos_token, marker)
