"""Parity with blocks that no package here holds, written from their published source, which each test names."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPTJConfig, GPTJForCausalLM

from helpers.models.foreign_blocks import (
    HEAD_DIM,
    HEADS,
    MARKER,
    VISION,
    flamingo_block_state,
    flamingo_checkpoint,
    make_clip,
)
from helpers.models.tiny_models import VOCAB_SIZE, make_model, make_text, pixels
from hf_xattn import CrossAttentionConfig, GatedCrossAttentionBlock
from hf_xattn.importers.kempnerforge import import_kempnerforge, kempnerforge_block_config
from hf_xattn.importers.open_flamingo import import_open_flamingo


def rms_norm(states, weight, eps):
    return states * torch.rsqrt(states.pow(2).mean(dim=-1, keepdim=True) + eps) * weight


def split(states, heads):
    return states.unflatten(-1, (heads, -1)).transpose(1, 2)


@torch.no_grad()
def randomized(module, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.3
        parameter.copy_(noise + 1 if "norm" in name and name.endswith("weight") else noise)
    return module.eval()


def torchtune_layer(x, states, mask, block, config, head_eps=1e-5, eps=1e-6):
    """`TransformerCrossAttentionLayer` of torchtune's `modules/transformer.py`, as its `llama3_2_vision_decoder`
    builds it.

    The norms of the layer keep the default of `modules/rms_norm.py`, 1e-6. Those of queries and keys get 1e-5. A text
    position whose mask is all False adds neither attention nor MLP.
    """
    weights = dict(block.named_parameters())
    skip = None if mask is None else (~mask).all(dim=-1, keepdim=True)
    if mask is not None:
        mask = mask.masked_fill(skip, True)[:, None]
    normed = rms_norm(x, weights["attn_norm.weight"], eps)
    query = rms_norm(
        split(normed @ weights["attn.q_proj.weight"].T, config.num_attention_heads),
        weights["attn.q_norm.weight"],
        head_eps,
    )
    repeats = config.num_attention_heads // config.num_key_value_heads
    key, value = (
        split(states @ weights[f"attn.{letter}_proj.weight"].T, config.num_key_value_heads).repeat_interleave(
            repeats, 1
        )
        for letter in "kv"
    )
    key = rms_norm(key, weights["attn.k_norm.weight"], head_eps)
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2).flatten(2)
    attended = attended @ weights["attn.o_proj.weight"].T
    attended = attended if skip is None else attended.masked_fill(skip, 0)
    h = torch.tanh(weights["attn_gate"]) * attended + x
    normed = rms_norm(h, weights["mlp_norm.weight"], eps)
    gate, up = (normed @ weights[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    inner = (F.silu(gate) * up) @ weights["mlp.down_proj.weight"].T
    inner = inner if skip is None else inner.masked_fill(skip, 0)
    return h + torch.tanh(weights["mlp_gate"]) * inner


@torch.no_grad()
@pytest.mark.parametrize("seed", range(20))
def test_a_block_gives_the_output_of_torchtune(seed):
    """Norms of queries and keys with the block's epsilon: 0.05 off on states as small as these."""
    draw = random.Random(seed)
    heads, kv_heads = draw.choice([(4, 2), (4, 1), (2, 2), (6, 3)])
    config = CrossAttentionConfig(
        hidden_size=24,
        context_size=24,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=draw.choice([4, 8]),
        intermediate_size=40,
        norm_eps=1e-6,
        qk_norm=True,
        qk_norm_eps=1e-5,
    )
    block = randomized(GatedCrossAttentionBlock(config), seed)
    torch.manual_seed(seed)
    block.attn.k_proj.weight.mul_([1e-3, 1.0][seed % 2])  # keys so small that their norm shows its epsilon
    text, states = torch.randn(2, 5, 24), torch.randn(2, 7, 24)
    for mask in (None, torch.rand(2, 5, 7) < 0.3):
        expected = torchtune_layer(text, states, mask, block, config)
        assert torch.allclose(block(text, states, mask), expected, atol=1e-5)
    if seed == 0:
        wrong = torchtune_layer(text, states, None, block, config, head_eps=1e-6)
        assert (block(text, states) - wrong).abs().max() > 0.05


def test_qk_norm_eps_survives_a_file(tmp_path):
    """An epsilon that a saved configuration loses, or that follows another one."""
    sizes = {"hidden_size": 24, "num_attention_heads": 2}
    assert CrossAttentionConfig(**sizes, norm_eps=1e-3).qk_norm_eps == 1e-3
    for eps in (1e-6, 1e-3):  # 1e-6 is also what a fresh configuration has
        config = CrossAttentionConfig(**sizes, qk_norm=True, norm_eps=1e-5, qk_norm_eps=eps)
        GatedCrossAttentionBlock(config).save_pretrained(tmp_path)
        attn = GatedCrossAttentionBlock.from_pretrained(tmp_path).attn
        assert attn.q_norm.eps == attn.k_norm.eps == eps
    old = {name: value for name, value in config.to_dict().items() if name != "qk_norm_eps"}
    assert CrossAttentionConfig.from_dict(old).qk_norm_eps == 1e-5


def test_images_of_another_epsilon_are_not_taken():
    """Keys that a model normalized otherwise, read from a cache of encoded images."""
    block = {"qk_norm": True}
    first, second = (make_model(cross_attention_config=block | {"qk_norm_eps": eps}) for eps in (1e-6, 1e-3))
    with torch.no_grad(), pytest.raises(ValueError, match="another model encoded"):
        second.encode_images(pixels(seed=9), cache=first.encode_images(pixels()))


class KempnerNorm(nn.Module):
    """KempnerForge's `build_norm(norm_type, dim)`: `model/transformer.py` passes a block no epsilon, so it is always
    1e-5.
    """

    def __init__(self, kind, state, name):
        super().__init__()
        self.kind, self.weight, self.bias = kind, state[f"{name}.weight"], state.get(f"{name}.bias")

    def forward(self, x):
        if self.kind == "layernorm":
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, 1e-5)
        return rms_norm(x, self.weight, 1e-5)


def kempner_block(x, features, state, heads, kind, activation, mask=None):
    """`CrossAttentionBlock` of KempnerForge's `model/cross_attention.py`."""
    head_dim = state["attn.q_proj.weight"].shape[0] // heads
    kv_heads = state["attn.k_proj.weight"].shape[0] // head_dim
    query = split(KempnerNorm(kind, state, "attn_norm")(x) @ state["attn.q_proj.weight"].T, heads)
    key, value = (
        split(features @ state[f"attn.{letter}_proj.weight"].T, kv_heads).repeat_interleave(heads // kv_heads, dim=1)
        for letter in "kv"
    )
    attended = F.scaled_dot_product_attention(
        query, key, value, attn_mask=None if mask is None else mask[:, None, None]
    )
    x = x + attended.transpose(1, 2).flatten(2) @ state["attn.o_proj.weight"].T
    normed = KempnerNorm(kind, state, "mlp_norm")(x)
    inner = getattr(F, activation)(normed @ state[f"mlp.{'gate' if activation == 'silu' else 'up'}_proj.weight"].T)
    if activation == "silu":
        inner = inner * (normed @ state["mlp.up_proj.weight"].T)
    return x + inner @ state["mlp.down_proj.weight"].T


def random_kempner(draw, seed, hidden=32):
    heads, kv_heads, head_dim = *draw.choice([(4, 2), (4, 4), (2, 1)]), draw.choice([4, 8])
    kind, activation = draw.choice(["rmsnorm", "layernorm"]), draw.choice(["silu", "gelu", "relu"])
    shapes = {
        "attn.q_proj.weight": (heads * head_dim, hidden),
        "attn.k_proj.weight": (kv_heads * head_dim, hidden),
        "attn.v_proj.weight": (kv_heads * head_dim, hidden),
        "attn.o_proj.weight": (hidden, heads * head_dim),
        "mlp.up_proj.weight": (40, hidden),
        "mlp.down_proj.weight": (hidden, 40),
    }
    for name in ("attn_norm", "mlp_norm"):
        shapes[f"{name}.weight"] = (hidden,)
        if kind == "layernorm":
            shapes[f"{name}.bias"] = (hidden,)
    if activation == "silu":
        shapes["mlp.gate_proj.weight"] = (40, hidden)
    generator = torch.Generator().manual_seed(seed)
    return (
        {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()},
        heads,
        kind,
        activation,
    )


@torch.no_grad()
@pytest.mark.parametrize("seed", range(20))
def test_a_block_gives_the_output_of_kempnerforge(seed):
    """The epsilon of KempnerForge's configuration in its blocks, which do not read it; a LayerNorm without its bias."""
    draw = random.Random(seed)
    state, heads, kind, activation = random_kempner(draw, seed)
    config = kempnerforge_block_config(state, heads, hidden_act=activation, norm_type=kind)
    block = GatedCrossAttentionBlock(config).eval()
    block.load_state_dict(state)
    torch.manual_seed(seed)
    scale = draw.choice([1.0, 1e-3])
    text, features = torch.randn(2, 5, 32) * scale, torch.randn(2, 7, 32)
    mask = torch.rand(2, 7) < 0.6
    mask[:, 0] = True
    for each in (None, mask):
        expected = kempner_block(text, features, state, heads, kind, activation, each)
        assert torch.allclose(block(text, features, each), expected, atol=1e-5)


@torch.no_grad()
def test_kempnerforge_over_a_text_with_another_epsilon():
    """Blocks that take over the epsilon of the decoder, which is that of KempnerForge's configuration: 0.055 off."""
    state, heads, *_ = random_kempner(random.Random(3), 3)
    config = make_text().config
    text = make_text()
    text.config.rms_norm_eps = 1e-2
    checkpoint = {f"cross_attention_layers.0.{name}": tensor for name, tensor in state.items()}
    kind, activation = random_kempner(random.Random(3), 3)[2:]
    model = import_kempnerforge(
        checkpoint, text, num_attention_heads=heads, every=4, norm_type=kind, hidden_act=activation
    )
    assert config.rms_norm_eps != 1e-2 and model.blocks[0].attn_norm.eps == model.blocks[0].mlp_norm.eps == 1e-5


@torch.no_grad()
@pytest.mark.parametrize("visibility", ["latest", "previous"])
def test_open_flamingo_mask(visibility):
    """The mask of OpenFlamingo's `MaskedCrossAttention` (`src/helpers.py`): `text_time == media_time`, or `>=` for all
    previous.
    """
    model = make_model(image_visibility=visibility, image_token_id=MARKER)
    for seed in range(20):
        draw = random.Random(seed)
        images = draw.randint(1, 4)
        counts = torch.tensor([images, draw.randint(0, images)])
        ids = torch.tensor([[draw.randint(6, 90) for _ in range(9)] for _ in range(2)])
        for row, count in zip(ids, counts.tolist()):
            row[draw.sample(range(9), count)] = MARKER
        given = {"pixel_values": pixels(2, images), "image_mask": torch.arange(images) < counts[:, None]}
        text_time = (ids == MARKER).cumsum(dim=-1)[..., None]
        media_time = (torch.arange(images) + 1).repeat_interleave(16)
        expected = text_time == media_time if visibility == "latest" else text_time >= media_time
        weights = model(ids, **given, output_attentions=True).cross_attentions
        for each in weights:
            assert torch.equal(each.gt(0).any(dim=1), expected)


def make_gptj():
    torch.manual_seed(0)
    config = GPTJConfig(n_embd=32, n_layer=4, n_head=4, rotary_dim=4, vocab_size=VOCAB_SIZE, n_positions=64)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, None, 0
    model = GPTJForCausalLM(config).eval()
    model.lm_head.bias.data.normal_()
    return model


@torch.no_grad()
def test_open_flamingo_over_a_head_with_a_bias(tmp_path):
    """GPT-J's head has a bias, with one number for each token: refused as another language model, or cut off."""
    state = {name: tensor for name, tensor in flamingo_checkpoint().items() if name.startswith("perceiver.")}
    for index in (0, 2):
        for name, tensor in flamingo_block_state(index).items():
            state[f"lang_encoder.transformer.h.{index}.gated_cross_attn_layer.{name}"] = tensor
    generator = torch.Generator().manual_seed(4)
    shapes = {"lm_head.weight": (VOCAB_SIZE + 3, 32), "lm_head.bias": (VOCAB_SIZE + 3,)}
    shapes["transformer.wte.weight"] = shapes["lm_head.weight"]
    trained = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    state |= {f"lang_encoder.{name}": tensor for name, tensor in trained.items()}
    options = {"image_token_id": MARKER, "head_dim": HEAD_DIM}
    model = import_open_flamingo(state, make_gptj(), make_clip(), **options)
    model.save_pretrained(tmp_path)
    model = type(model).from_pretrained(tmp_path).eval()
    text = make_gptj()
    text.resize_token_embeddings(VOCAB_SIZE + 3)
    text.load_state_dict(trained, strict=False)
    ids = torch.randint(6, VOCAB_SIZE + 3, (2, 7))
    assert torch.equal(model(ids).logits, text(ids).logits)
    wrong = state | {"lang_encoder.lm_head.bias": torch.zeros(VOCAB_SIZE + 2)}
    with pytest.raises(ValueError, match=r"embeddings and a head of \[98, 99\] tokens"):
        import_open_flamingo(wrong, make_gptj(), make_clip(), **options)
    assert HEADS and VISION == model.config.vision_config.hidden_size
