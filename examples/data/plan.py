"""A real run on paper: FLOP of a row, memory of a GPU, hours and steps, beside image tokens in the prompt.

python examples/data/plan.py [--gpus 8] [--utilisation 0.35] [--flops 989e12] [--text-tokens 220] [--rows 665000]

Shapes are those of Llama-3.2-1B and SigLIP so400m/14 at 384 pixels. The models lie on the meta device: torch counts the
floating point operations of their matrix products, and nothing is computed. `--utilisation` is the share of the GPU's
`--flops` that a run reaches; it is an assumption, as is the length of the texts.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, SiglipVisionConfig

import hf_xattn


TEXT = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
TOWER = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
    "vision_use_head": False,
}
IMAGE_TOKENS = (384 // 14) ** 2
GIB = 2**30


def blocks() -> torch.nn.Module:
    """Text model and tower frozen; a block in front of every fourth layer, and the connector, train."""
    config = hf_xattn.XAttnConfig(
        text_config=LlamaConfig(**TEXT),
        vision_config=SiglipVisionConfig(**TOWER),
        cross_attention_layers=list(range(3, 16, 4)),
    )
    with torch.device("meta"):
        return hf_xattn.freeze_base(hf_xattn.XAttnForConditionalGeneration(config)).train()


def image_tokens() -> torch.nn.Module:
    """LLaVA's way: the tower frozen, projector and text model train."""
    config = LlavaConfig(
        text_config=LlamaConfig(**TEXT),
        vision_config=SiglipVisionConfig(**TOWER),
        image_token_index=128255,
        vision_feature_select_strategy="full",
    )
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(config).train()
    model.model.vision_tower.requires_grad_(False)
    return model


def flop_of_a_row(model: torch.nn.Module, text_tokens: int, batch: int) -> float:
    """Of a forward and a backward pass, `text_tokens` long, with one picture."""
    model.set_attn_implementation("eager")  # the masks of others look at values, which are not there
    in_prompt = isinstance(model, LlavaForConditionalGeneration)
    length = text_tokens + IMAGE_TOKENS * in_prompt
    ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
    pixels = torch.zeros(batch, *([] if in_prompt else [1]), 3, 384, 384, device="meta")
    mask = torch.ones_like(ids)
    with FlopCounterMode(display=False) as counter:
        if in_prompt:  # which tokens are of the picture is read from ids, which have no values here
            features = model.get_image_features(pixel_values=pixels).pooler_output
            embeddings = torch.cat(
                [torch.stack(tuple(features)), model.get_input_embeddings()(ids[:, :text_tokens])], 1
            )
            loss = model.lm_head(model.model.language_model(inputs_embeds=embeddings, attention_mask=mask)[0]).sum()
        else:
            loss = model(input_ids=ids, attention_mask=mask, pixel_values=pixels, use_cache=False).logits.sum()
        loss.backward()
    return counter.get_total_flops() / batch


def memory(model: torch.nn.Module) -> dict[str, float]:
    """GiB on each GPU under DDP: frozen weights in bfloat16; trained ones, gradients and AdamW in float32."""
    train = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    frozen = sum(weight.numel() for weight in model.parameters()) - train
    return {"trained, million": train / 1e6, "weights": (2 * frozen + 4 * train) / GIB, "optimizer": 12 * train / GIB}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--utilisation", type=float, default=0.35)
    parser.add_argument("--flops", type=float, default=989e12, help="of a GPU in bfloat16, a second")
    parser.add_argument("--text-tokens", type=int, default=220, help="of a row, on average")
    parser.add_argument("--rows", type=int, default=665_000)
    parser.add_argument("--batch-size", type=int, default=16, help="of each GPU")
    options = parser.parse_args(arguments)
    print("| | blocks (text model frozen) | image tokens (text model trains) |\n|---|---|---|")
    columns = []
    for model in (blocks(), image_tokens()):
        flop = flop_of_a_row(model, options.text_tokens, 2)
        held = memory(model)
        hours = flop * options.rows / (options.gpus * options.flops * options.utilisation) / 3600
        columns.append([f"{flop / 1e12:.2f}", f"{held['trained, million']:.0f}", f"{held['weights']:.1f}", f"{held['optimizer']:.1f}", f"{hours:.2f}"])  # fmt: skip  # noqa: E501
    titles = (
        "TFLOP of a row, forward and backward",
        "parameters that train, million",
        "weights on a GPU, GiB",
        "gradients and AdamW on a GPU, GiB",
        f"hours of an epoch on {options.gpus} GPUs at {options.utilisation:.0%} of {options.flops / 1e12:.0f} TFLOP/s",
    )
    for title, values in zip(titles, zip(*columns)):
        print(f"| {title} | {' | '.join(values)} |")
    steps = math.ceil(options.rows / (options.gpus * options.batch_size))
    rate = options.rows / (float(columns[0][-1]) * 3600)
    print(f"with blocks {rate:.0f} pictures a second have to be read, or {rate / options.gpus:.0f} for each GPU")
    print(f"{steps} steps of {options.gpus * options.batch_size} rows; {IMAGE_TOKENS} image tokens a picture")


if __name__ == "__main__":
    main()
