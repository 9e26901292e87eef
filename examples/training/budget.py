"""Prints how much memory the weights take while blocks train, for text models of several sizes, as a Markdown table.

python examples/training/budget.py

The models have the shapes of known checkpoints, SigLIP base as the vision tower, and no values, so nothing is
downloaded and no memory is taken. The frozen weights are in bfloat16. Weights that train are in float32, with their
gradients and the two averages of AdamW: 16 bytes for each. Activations come on top: they depend on the length of the
texts and on the batch.
"""

import torch
from transformers import LlamaConfig, Qwen2Config, SiglipVisionConfig

from hf_xattn import XAttnConfig, XAttnForConditionalGeneration, freeze_base


FROZEN, TRAINED = 2, 16  # bytes of a weight
SHAPES = {
    "SmolLM2-135M": LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
    ),
    "Qwen2.5-0.5B": Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
    ),
    "Llama-3.2-1B": LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=True,
    ),
    "Llama-2-7B": LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        vocab_size=32000,
    ),
}


def row(name: str, text: LlamaConfig | Qwen2Config) -> str:
    config = XAttnConfig(
        text_config=text,
        vision_config=SiglipVisionConfig(),
        cross_attention_config={"gate": "token"},  # as `hf_xattn.retrofit` has it, and the connector
        connector_type="mlp_2d",
    )
    with torch.device("meta"):
        model = freeze_base(XAttnForConditionalGeneration(config))
    weights = {id(weight): weight for weight in model.parameters()}.values()
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    frozen = sum(weight.numel() for weight in weights if not weight.requires_grad)
    own = sum(weight.numel() for weight in model.model.text_model.parameters() if not weight.requires_grad)
    memory = f"{frozen * FROZEN / 1e9:.2f} + {trained * TRAINED / 1e9:.2f} GB"
    return f"| {name} | {own / 1e6:,.0f} | {trained / 1e6:,.0f} ({trained / own:.0%}) | {memory} |"


def main() -> None:
    print("| text model | parameters, million | trained (share) | memory of frozen and of trained weights |")
    print("|---|---|---|---|")
    for name, text in SHAPES.items():
        print(row(name, text))


if __name__ == "__main__":
    main()
