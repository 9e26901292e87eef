"""State dicts as OpenFlamingo and KempnerForge save them, with random weights."""

import torch
from transformers import CLIPVisionConfig, CLIPVisionModel

from helpers.models.tiny_models import VOCAB_SIZE, make_text


HIDDEN, VISION, HEADS, HEAD_DIM = 32, 24, 2, 8
INNER = HEADS * HEAD_DIM
MARKER = 5


def random_state(shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        state[name] = (
            noise * 0.1 + 1 if "norm" in name and "weight" in name else noise * (0.2 if len(shape) > 1 else 0.5)
        )
    return state


def flamingo_block_state(seed=0, hidden=HIDDEN):
    return random_state(
        {
            "attn.norm.weight": (hidden,),
            "attn.norm.bias": (hidden,),
            "attn.to_q.weight": (INNER, hidden),
            "attn.to_kv.weight": (2 * INNER, VISION),
            "attn.to_out.weight": (hidden, INNER),
            "attn_gate": (1,),
            "ff.0.weight": (hidden,),
            "ff.0.bias": (hidden,),
            "ff.1.weight": (4 * hidden, hidden),
            "ff.3.weight": (hidden, 4 * hidden),
            "ff_gate": (1,),
        },
        seed,
    )


def perceiver_state(latents=3, depth=2):
    shapes = {"latents": (latents, VISION), "norm.weight": (VISION,), "norm.bias": (VISION,)}
    for index in range(depth):
        for name in ("norm_media", "norm_latents"):
            shapes[f"layers.{index}.0.{name}.weight"] = shapes[f"layers.{index}.0.{name}.bias"] = (VISION,)
        shapes[f"layers.{index}.0.to_q.weight"] = (INNER, VISION)
        shapes[f"layers.{index}.0.to_kv.weight"] = (2 * INNER, VISION)
        shapes[f"layers.{index}.0.to_out.weight"] = (VISION, INNER)
        shapes[f"layers.{index}.1.0.weight"] = shapes[f"layers.{index}.1.0.bias"] = (VISION,)
        shapes[f"layers.{index}.1.1.weight"] = (4 * VISION, VISION)
        shapes[f"layers.{index}.1.3.weight"] = (VISION, 4 * VISION)
    return random_state(shapes, 7)


def language_state():
    """Embeddings with rows for added tokens, as OpenFlamingo trains them."""
    return random_state(
        {"model.embed_tokens.weight": (VOCAB_SIZE + 3, HIDDEN), "lm_head.weight": (VOCAB_SIZE + 3, HIDDEN)}, 8
    )


def flamingo_checkpoint(layout="published"):
    """As `filter_state_dict_to_trainable` leaves it, or all that the model has, wrapped."""
    checkpoint = {f"perceiver.{name}": tensor for name, tensor in perceiver_state().items()}
    checkpoint |= {f"lang_encoder.{name}": tensor for name, tensor in language_state().items()}
    for index in (0, 2):
        for name, tensor in flamingo_block_state(index).items():
            checkpoint[f"lang_encoder.model.layers.{index}.gated_cross_attn_layer.{name}"] = tensor
            if layout == "whole":
                checkpoint[f"lang_encoder.gated_cross_attn_layers.{index}.{name}"] = tensor
    if layout == "whole":
        for name, tensor in make_text().model.state_dict().items():
            if name.startswith("layers."):
                _, index, rest = name.split(".", 2)
                inner = "decoder_layer." if index in "02" else ""
                checkpoint[f"lang_encoder.model.layers.{index}.{inner}{rest}"] = tensor
                checkpoint[f"lang_encoder.old_decoder_blocks.{index}.{rest}"] = tensor
        checkpoint["lang_encoder.model.layers.0.decoder_layer.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
        checkpoint["vision_encoder.proj"] = torch.zeros(3, 3)
        checkpoint = {
            f"module.{name}".replace("layers.0", "layers.0._checkpoint_wrapped_module"): tensor
            for name, tensor in checkpoint.items()
        }
    return checkpoint


def make_clip():
    torch.manual_seed(0)
    config = CLIPVisionConfig(
        hidden_size=VISION,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    return CLIPVisionModel(config).eval()


def kempner_block_state(seed=0, hidden_act="silu", kv_heads=1, hidden=HIDDEN):
    shapes = {
        "attn_norm.weight": (hidden,),
        "attn.q_proj.weight": (INNER, hidden),
        "attn.k_proj.weight": (kv_heads * HEAD_DIM, hidden),
        "attn.v_proj.weight": (kv_heads * HEAD_DIM, hidden),
        "attn.o_proj.weight": (hidden, INNER),
        "mlp_norm.weight": (hidden,),
        "mlp.up_proj.weight": (48, hidden),
        "mlp.down_proj.weight": (hidden, 48),
    }
    if hidden_act == "silu":
        shapes["mlp.gate_proj.weight"] = (48, hidden)
    return random_state(shapes, seed)
