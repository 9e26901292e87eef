"""The designs of `compare_designs.py`: blocks, or image tokens in the prompt, over the same text model and tower."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from llava_peer import LlavaChats, llava_of
from torch import nn
from transformers import AutoProcessor, ViTConfig
from transformers.modeling_outputs import BaseModelOutput

from hf_xattn import (
    XAttnDataCollator,
    XAttnForConditionalGeneration,
    XAttnProcessor,
    align_connector,
    freeze_base,
    remove_blocks,
    retrofit,
)
from hf_xattn.training.freezing import starts_at_zero


DESIGNS = BLOCKS, PROJECTOR, LORA = ("blocks", "projector", "lora")
IMAGE_TOKEN = "<image>"
IGNORED = -100


class Features(nn.Module):
    """A convolutional tower as Llava reads one: its features `(batch, places, channels)`, row by row.

    Args:
        tower (`PreTrainedModel`): its output is `(batch, channels, height, width)`.
        size (`tuple[int, int]`): height and width of a picture in pixels.
    """

    def __init__(self, tower: Any, size: tuple[int, int]):
        super().__init__()
        self.tower, self.dtype = tower, tower.dtype
        with torch.no_grad():
            channels = tower(torch.zeros(1, 3, *size, dtype=tower.dtype)).last_hidden_state.shape[1]
        # Llava asks the configuration for these sizes; the tower that it makes of it is replaced.
        sizes = {"num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 1}
        self.config = ViTConfig(hidden_size=channels, image_size=size, **sizes)

    def forward(self, pixel_values: torch.Tensor, **options: Any) -> BaseModelOutput:
        features = self.tower(pixel_values.to(self.dtype)).last_hidden_state.flatten(2).transpose(1, 2)
        return BaseModelOutput(last_hidden_state=features, hidden_states=(features,))


class Design:
    """A model that trains, and what makes its batches and its prompts.

    Args:
        name (`str`): of `DESIGNS`.
        fresh (`Path`): folder of the retrofitted model.
        parameters (`int`, *optional*): about so many train; not for the blocks, which are as they are.
        dtype (`torch.dtype`): of the frozen weights and of the computation. Weights are float32 while they train.
        device (`str`): where it runs.
        words_of (`Sequence`, *optional*): rows by whose words connector and blocks, or the projector, start.
    """

    def __init__(
        self,
        name: str,
        fresh: Path,
        parameters: int = 0,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        words_of: Sequence[Any] | None = None,
    ):
        self.name = name
        processor: Any = AutoProcessor.from_pretrained(fresh)
        seeing = XAttnForConditionalGeneration.from_pretrained(fresh, dtype=torch.float32)
        if words_of is not None and name == BLOCKS:
            align_connector(seeing, processor, words_of)
        started = started_projector(seeing, processor, words_of) if words_of is not None and name != BLOCKS else None
        seeing = seeing.to(dtype)
        if name == BLOCKS:
            self.model: Any = freeze_base(seeing)
            self.body, self.head = seeing.model, seeing.get_output_embeddings()
            self.chats: Any = processor
        else:
            processor = with_marker(processor)
            self.model, self.body, self.head = self._llava(seeing, processor, parameters, started)
            self.chats = LlavaChats(processor, self.model.config.image_seq_length)
        self.model.to(device)
        self.trained = [each for each in self.model.parameters() if each.requires_grad]
        self._dtypes = [each.dtype for each in self.trained]
        for each in self.trained:
            each.data = each.data.float()
        new = {id(each) for each in starts_at_zero(seeing)}
        self.started = [each for each in self.trained if id(each) not in new] if name == BLOCKS else []
        self._autocast = torch.autocast(torch.device(device).type, dtype, enabled=dtype != torch.float32)
        self.tokenizer = processor.tokenizer
        self._collate = XAttnDataCollator(processor, padding_side="right")

    def _llava(
        self, seeing: Any, processor: XAttnProcessor, parameters: int, started: list[nn.Linear] | None
    ) -> tuple[Any, Any, Any]:
        tower = seeing.model.vision_tower
        if not hasattr(tower.config, "hidden_size"):
            size = processor.image_processor.size
            tower = Features(tower, (size["height"], size["width"]))
        base = remove_blocks(seeing)
        model = llava_of(base, tower, processor.image_token_id)
        projector, sizes = model.model.multi_modal_projector, (tower.config.hidden_size, base.config.hidden_size)
        inner = max(1, round((parameters - sizes[1]) / (sum(sizes) + 1))) if self.name == PROJECTOR else sizes[1]
        projector.linear_1, projector.linear_2 = started or (nn.Linear(sizes[0], inner), nn.Linear(inner, sizes[1]))
        projector.to(base.dtype)
        if self.name == PROJECTOR:
            return model, model.model, model.lm_head
        from peft import LoraConfig, get_peft_model

        linear = [each for each in model.model.language_model.modules() if isinstance(each, nn.Linear)]
        left = parameters - sum(each.numel() for each in projector.parameters())
        rank = max(1, round(left / sum(each.in_features + each.out_features for each in linear)))
        targets = r".*language_model.*(q|k|v|o|gate|up|down)_proj"
        lora = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))
        projector.requires_grad_(True)
        return lora, lora.base_model.model.model, lora.base_model.model.lm_head

    @property
    def parameters(self) -> int:
        return sum(each.numel() for each in self.trained)

    def batch(self, rows: Sequence[Any]) -> dict[str, Any]:
        """The inputs of [`Design.loss`]."""
        batch: dict[str, Any] = self._collate(list(rows))
        return batch if self.name == BLOCKS else self._in_the_prompt(batch)

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        """The mean over the labels of a batch."""
        batch = {name: value.to(self.model.device) for name, value in batch.items()}
        labels = nn.functional.pad(batch.pop("labels")[:, 1:], (0, 1), value=IGNORED)
        with self._autocast:
            hidden = self.body(**batch, use_cache=False).last_hidden_state
            logits = self.head(hidden[labels != IGNORED]).float()
        return nn.functional.cross_entropy(logits, labels[labels != IGNORED])

    def ready(self) -> None:
        """Gives the trained weights the dtypes in which they are used, and adds LoRA to the weights that it is for."""
        self.model.eval()
        for each, dtype in zip(self.trained, self._dtypes):
            each.data = each.data.to(dtype)
        if self.name == LORA:
            self.model = self.model.merge_and_unload()

    def _in_the_prompt(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch with so many image tokens in place of each marker, padded again."""
        made: dict[str, list[torch.Tensor]] = {"input_ids": [], "attention_mask": [], "labels": []}
        for row, ids in enumerate(batch["input_ids"]):
            real = batch["attention_mask"][row].bool()
            counts = self.chats.counts(ids[real])
            for name, rows in made.items():
                rows.append(batch[name][row][real].repeat_interleave(counts))
        padding = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED}
        padded = {
            name: nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding[name])
            for name, rows in made.items()
        }
        if "pixel_values" in batch:
            pixels, mask = batch["pixel_values"], batch.get("image_mask")
            padded["pixel_values"] = pixels.flatten(0, 1) if mask is None else pixels[mask]
        return padded


def started_projector(seeing: Any, processor: XAttnProcessor, rows: Sequence[Any]) -> list[nn.Linear]:
    """The two layers of Llava's projector, started by words as blocks are: an image token is near the embeddings of the
    words that tell what it shows. The inner width is Llava's, the hidden size of the text model.
    """
    tower = copy.deepcopy(seeing.model.vision_tower)
    text = remove_blocks(copy.deepcopy(seeing))
    read = retrofit(text, tower, cross_attention_layers=[0], connector_type="mlp")  # the states in front of layer 0
    align_connector(read, processor, rows, blocks=False)
    embeddings: torch.Tensor = text.get_input_embeddings().weight.detach()
    mean = embeddings.mean(0)
    size = (embeddings - mean).square().mean().sqrt()
    layers = []
    for layer in (each for each in read.model.connector.layers if isinstance(each, nn.Linear)):
        layers.append(nn.Linear(layer.in_features, layer.out_features))
        layers[-1].load_state_dict(layer.state_dict())
    with torch.no_grad():  # the image tokens have a mean of zero and the size 1, as a block's norm makes states
        layers[-1].weight *= size
        layers[-1].bias.mul_(size).add_(mean)
    return layers


def with_marker(processor: XAttnProcessor) -> XAttnProcessor:
    """The same processor, which renders a picture as a marker: Llava's image tokens come in its place."""
    if processor.image_token is not None:
        return processor
    tokenizer = copy.deepcopy(processor.tokenizer)
    tokenizer.add_tokens([IMAGE_TOKEN], special_tokens=True)
    return XAttnProcessor(
        processor.image_processor, tokenizer, chat_template=processor.chat_template, image_token=IMAGE_TOKEN
    )
