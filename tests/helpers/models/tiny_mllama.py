"""A tiny model of transformers' Mllama, with random weights in every tensor, its inputs and its processor."""

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    MllamaConfig,
    MllamaForConditionalGeneration,
    MllamaImageProcessor,
    MllamaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.mllama.modeling_mllama import MllamaCrossAttentionDecoderLayer


VOCAB, MARKER = 96, 96
TILES = 4

VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_global_layers": 1,
    "attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "max_num_tiles": TILES,
    "intermediate_layers_indices": [0, 2],
    "vision_output_dim": 48,
}

TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "cross_attention_layers": [1, 4],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def make_mllama(dtype=torch.float32, **text):
    torch.manual_seed(0)
    config = MllamaConfig(vision_config=VISION, text_config=TEXT | text, image_token_index=MARKER)
    config._attn_implementation = "eager"
    model = MllamaForConditionalGeneration(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "gate" in name and "proj" not in name:  # zero in a fresh model, of the vision tower too
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        elif "norm" in name:
            parameter.data.add_(torch.randn(parameter.shape, generator=generator).to(dtype) * 0.1)
        else:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def mllama_inputs(ids, tiles, seed=2):
    """What `MllamaProcessor` makes: a row of ids each, and for each row how many tiles each of its images has."""
    ids = torch.tensor(ids)
    generator = torch.Generator().manual_seed(seed)
    images = max(len(row) for row in tiles)
    pixels = torch.randn(len(ids), images, TILES, 3, 28, 28, generator=generator)
    ratios = torch.zeros(len(ids), images, dtype=torch.long)
    mask = torch.zeros(len(ids), images, TILES, dtype=torch.long)
    mask[:, :, 0] = 1  # the image processor gives padding images one tile
    cross = torch.zeros(len(ids), ids.shape[1], images, TILES, dtype=torch.long)
    for row, counts in enumerate(tiles):
        markers = (ids[row] == MARKER).nonzero()[:, 0].tolist()
        for image, count in enumerate(counts):
            ratios[row, image] = count  # 1 x count
            mask[row, image, :count] = 1
            pixels[row, image, count:] = 0
            end = image + 1
            while end < len(markers) and markers[end] == markers[end - 1] + 1:
                end += 1
            stop = markers[end] if end < len(markers) else ids.shape[1]
            cross[row, markers[image] : stop, image, :count] = 1
    return {
        "input_ids": ids,
        "pixel_values": pixels,
        "aspect_ratio_ids": ratios,
        "aspect_ratio_mask": mask,
        "cross_attention_mask": cross,
    }


TILED = {
    "one": mllama_inputs([[MARKER, 5, 6, 7, 8, 9]], [[1]]),
    "tiles": mllama_inputs([[MARKER, 5, 6, 7, 8, 9]], [[3]]),
    "several": mllama_inputs([[MARKER, 5, 6, MARKER, 8, 9, 10]], [[2, 4]]),
    "consecutive": mllama_inputs([[MARKER, MARKER, 6, 7, MARKER, 9, 10]], [[1, 4, 2]]),
    "batch": mllama_inputs([[MARKER, 5, 6, 7, MARKER, 9], [MARKER, 11, 12, 13, 14, 15]], [[2, 1], [4]]),
}


def stop_mllama(model):
    """Transformers' cross-attention layer, with its attention branch off where its MLP branch is."""

    def forward(self, hidden_states, full_text_row_masked_out_mask=None, **kwargs):
        seen = MllamaCrossAttentionDecoderLayer.forward(
            self, hidden_states, full_text_row_masked_out_mask=full_text_row_masked_out_mask, **kwargs
        )
        return torch.where(full_text_row_masked_out_mask[:, 0] != 0, seen, hidden_states)

    for layer in model.model.language_model.layers:
        if isinstance(layer, MllamaCrossAttentionDecoderLayer):
            layer.forward = forward.__get__(layer)
    return model


MIXED = mllama_inputs([[5, 6, 7, MARKER, 8, 9], [10, 11, 12, 13, 14, 15]], [[3], []])


def make_mllama_processor():
    words = ["<pad>", "<s>", "<unk>", *(f"w{index}" for index in range(VOCAB - 3)), "<|image|>", "<|python_tag|>"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", unk_token="<unk>", padding_side="left"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|image|>"]})
    image_processor = MllamaImageProcessor(size={"height": 28, "width": 28}, max_image_tiles=TILES)
    return MllamaProcessor(image_processor, fast)


def picture(width, height, seed):
    generator = np.random.default_rng(seed)
    return Image.fromarray(generator.integers(0, 255, (height, width, 3), dtype=np.uint8))
