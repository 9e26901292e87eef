"""A tiny model of transformers' Idefics, with random weights in every tensor, and its processor."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import IdeficsConfig, IdeficsForVisionText2Text, IdeficsProcessor, PreTrainedTokenizerFast
from transformers.models.idefics.image_processing_pil_idefics import IdeficsImageProcessorPil
from transformers.models.idefics.modeling_idefics import IdeficsGatedCrossAttentionLayer


VOCAB, ADDED = 96, 4
FAKE, MARKER = VOCAB, VOCAB + 1

VISION = {
    "embed_dim": 24,
    "image_size": 16,
    "intermediate_size": 48,
    "patch_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def make_idefics(dtype=torch.float32, **changes):
    torch.manual_seed(0)
    fields = {
        "vocab_size": VOCAB,
        "additional_vocab_size": ADDED,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "cross_layer_interval": 2,
        "vision_config": VISION,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    model = IdeficsForVisionText2Text(IdeficsConfig(**fields | changes)).to(dtype).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name or "layrnorm" in name or ".ln." in name:
                parameter.add_(noise * 0.1)
            else:
                parameter.copy_(noise if "alpha" in name else noise * 0.2)
    return model


def make_idefics_processor():
    markers = ["<fake_token_around_image>", "<image>"]
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{index}" for index in range(VOCAB - 4)), *markers]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.add_special_tokens({"additional_special_tokens": markers})
    return IdeficsProcessor(IdeficsImageProcessorPil(image_size=16), fast)


def stop_idefics(model):
    """Transformers' gated layer, with its MLP branch off where its attention branch is."""

    def forward(self, hidden_states, *args, cross_attention_gate=None, **kwargs):
        seen = IdeficsGatedCrossAttentionLayer.forward(
            self, hidden_states, *args, cross_attention_gate=cross_attention_gate, **kwargs
        )
        return torch.where(cross_attention_gate[..., None] != 0, seen, hidden_states)

    for layer in model.model.gated_cross_attn_layers:
        layer.forward = forward.__get__(layer)
    return model
