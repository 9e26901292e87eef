"""A LLaVA-style model over the demo's frozen language model and tower: transformers' own Llava, its inputs and its
training.

Llava puts the projected features of a picture into the prompt, each in the place of an image token. So the language
model reads other embeddings from its first layer on, and nothing can be remembered for a text but its beginning: the
tokens in front of the picture.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import BatchFeature, LlavaConfig, LlavaForConditionalGeneration, PreTrainedModel

from hf_xattn import XAttnProcessor
from hf_xattn.demo.checkpoints import optimize
from hf_xattn.demo.language_training import Batch, Rows, round_frozen, training_dtype
from hf_xattn.demo.upper_layers import Beginning, autocast


def llava_of(base: PreTrainedModel, tower: PreTrainedModel, image_token_id: int) -> LlavaForConditionalGeneration:
    """Joins a language model and a tower, both frozen, by a new projector. Its text-only logits are the language
    model's.

    Args:
        base ([`PreTrainedModel`]): a causal language model. The result uses its modules.
        tower ([`PreTrainedModel`]): its output has `last_hidden_state`.
        image_token_id (`int`): stands for a feature of a picture in the prompt. May be beyond the vocabulary.
    """
    # Llava takes hidden states by their index. The last ones are those behind the tower's last norm, as for the blocks.
    tower.config.tie_last_hidden_states = True
    config = LlavaConfig(
        vision_config=copy.deepcopy(tower.config),
        text_config=copy.deepcopy(base.config),
        image_token_index=image_token_id,
        image_seq_length=num_image_tokens(tower),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    model = LlavaForConditionalGeneration(config)
    body: Any = base.get_decoder()
    embedding: Any = body.get_input_embeddings()
    missing = image_token_id + 1 - embedding.num_embeddings
    if missing > 0:  # rows for lookup only, which a feature replaces; the head has none
        mean = embedding.weight.detach().mean(0, keepdim=True)
        body.set_input_embeddings(
            nn.Embedding.from_pretrained(torch.cat([embedding.weight.detach(), mean.expand(missing, -1)]))
        )
    model.model.language_model, model.model.vision_tower = body, tower
    model.lm_head = base.get_output_embeddings()
    model.model.multi_modal_projector.to(base.dtype)
    model.generation_config = base.generation_config
    model.requires_grad_(False)
    model.model.multi_modal_projector.requires_grad_(True)
    return model.eval()


@torch.no_grad()
def num_image_tokens(tower: PreTrainedModel) -> int:
    """Tokens that a tower makes of a picture, the class token among them."""
    size = tower.config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return tower(pixel_values=torch.zeros(1, 3, height, width, dtype=tower.dtype)).last_hidden_state.shape[1]


class LlavaChats:
    """Makes Llava's inputs of chats: the prompts that the demo's processor renders, with several image tokens for a
    picture.

    Args:
        processor ([`XAttnProcessor`]): renders a picture as one image token.
        num_tokens (`int`): image tokens a picture.
    """

    def __init__(self, processor: XAttnProcessor, num_tokens: int):
        self.processor, self.num_tokens = processor, num_tokens
        self.batch_decode = processor.batch_decode

    def apply_chat_template(self, chats: list, **kwargs) -> BatchFeature:
        inputs = self.processor.apply_chat_template(chats, **kwargs)
        counts = self.counts(inputs["input_ids"])
        made = {
            name: torch.stack([row.repeat_interleave(count) for row, count in zip(inputs[name], counts)])
            for name in ("input_ids", "attention_mask")
        }
        if "pixel_values" in inputs:
            made["pixel_values"] = inputs["pixel_values"].flatten(0, 1)
        return BatchFeature(made)

    def counts(self, ids: torch.Tensor) -> torch.Tensor:
        """How often Llava's prompt holds each token of a prompt."""
        return torch.where(ids == self.processor.image_token_id, self.num_tokens, 1)


class LlavaTraining:
    """Computes the loss of the demo's rows.

    Args:
        model ([`LlavaForConditionalGeneration`]): the one to train.
        chats ([`LlavaChats`]): knows the image tokens.
        rows ([`Rows`]): of the demo.
        dtype (`torch.dtype`, *optional*): of the training; the frozen decoder layers are rounded to it. Default: the
            demo's.
    """

    def __init__(
        self, model: LlavaForConditionalGeneration, chats: LlavaChats, rows: Rows, dtype: torch.dtype | None = None
    ):
        self.model, self.chats = model, chats
        self.dtype = dtype or training_dtype(model.device)
        round_frozen(model.model.language_model.layers, self.dtype)
        self.beginning = Beginning(model.model.language_model, rows.beginning, self.dtype)

    def loss(self, batch: Batch) -> torch.Tensor:
        """Returns the mean loss of the trained tokens."""
        ids, labels = [], []
        for example in batch.examples:
            tokens = torch.tensor(example.ids)
            counts = self.chats.counts(tokens)
            ids.append(tokens.repeat_interleave(counts))
            labels.append(torch.tensor(example.labels).repeat_interleave(counts))
        mask = [torch.ones(self.beginning.length + len(row), dtype=torch.long) for row in ids]
        pixel_values = batch.pixel_values.flatten(0, 1)
        if batch.image_mask is not None:
            pixel_values = pixel_values[batch.image_mask.flatten()]
        device, pad = self.model.device, nn.utils.rnn.pad_sequence
        targets = pad(labels, batch_first=True, padding_value=-100)[:, 1:].to(device)  # of the token in front
        with autocast(device, self.dtype):
            hidden = self.model.model(
                input_ids=pad(ids, batch_first=True).to(device),
                attention_mask=pad(mask, batch_first=True).to(device),
                pixel_values=pixel_values.to(device),
                past_key_values=self.beginning.cache(len(ids)),
                use_cache=True,
            ).last_hidden_state
            logits = self.model.lm_head(hidden[:, :-1][targets != -100])
        return nn.functional.cross_entropy(logits.float(), targets[targets != -100])

    def train(self, batch_of: Callable[[int], Batch], steps: int, learning_rate: float, name: str) -> list[float]:
        """Trains the projector as the demo trains the blocks: AdamW, its schedule, its clipping. Returns the losses."""
        losses = []

        def loss_of_step(step: int) -> torch.Tensor:
            loss = self.loss(batch_of(step))
            losses.append(loss.item())
            return loss

        projector = self.model.model.multi_modal_projector
        optimize(projector.parameters(), steps, learning_rate, loss_of_step, name, clip=1.0)
        return losses
