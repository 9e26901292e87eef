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
SIZES = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size".split()
SHAPES: dict[str, tuple[type, tuple[int, ...], bool]] = {  # class, sizes, whether the head is tied to the embeddings
    "SmolLM2-135M": (LlamaConfig, (576, 1536, 30, 9, 3, 49152), True),
    "Qwen2.5-0.5B": (Qwen2Config, (896, 4864, 24, 14, 2, 151936), True),
    "Llama-3.2-1B": (LlamaConfig, (2048, 8192, 16, 32, 8, 128256), True),
    "Llama-2-7B": (LlamaConfig, (4096, 11008, 32, 32, 32, 32000), False),
}


def row(name: str) -> str:
    config_class, sizes, tied = SHAPES[name]
    config = XAttnConfig(
        text_config=config_class(**dict(zip(SIZES, sizes)), tie_word_embeddings=tied),
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
    for name in SHAPES:
        print(row(name))


if __name__ == "__main__":
    main()
