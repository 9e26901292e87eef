"""Blocks and resamplers of OpenFlamingo and KempnerForge, against references written from their equations."""

import pytest
import torch
from torch.nn.functional import gelu, layer_norm, silu, softmax

from helpers.models.foreign_blocks import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    MARKER,
    VISION,
    flamingo_block_state,
    flamingo_checkpoint,
    kempner_block_state,
    language_state,
    make_clip,
    perceiver_state,
)
from helpers.models.tiny_mllama import make_mllama
from helpers.models.tiny_models import VOCAB_SIZE, make_text, token_ids
from hf_xattn import GatedCrossAttentionBlock
from hf_xattn.importers import export_checkpoint, import_checkpoint
from hf_xattn.importers.kempnerforge import import_kempnerforge, kempnerforge_block_config
from hf_xattn.importers.open_flamingo import import_open_flamingo, open_flamingo_block


def heads_of(states):
    return states.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)


def attention(query, key, value, mask=None):
    """softmax(Q K^T / sqrt(d)) V, one query head a K/V head."""
    scores = torch.einsum("bhid,bhjd->bhij", heads_of(query) * HEAD_DIM**-0.5, heads_of(key))
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None], float("-inf"))
    return torch.einsum("bhij,bhjd->bhid", softmax(scores, dim=-1), heads_of(value)).transpose(1, 2).flatten(2)


def flamingo_mlp(x, state, name):
    width = x.shape[-1]
    normed = layer_norm(x, (width,), state[f"{name}0.weight"], state[f"{name}0.bias"])
    return gelu(normed @ state[f"{name}1.weight"].T) @ state[f"{name}3.weight"].T


def flamingo_block(x, media, state, mask=None):
    """y = x + tanh(a) attention(norm(x), media), z = y + tanh(b) FF(y)."""
    normed = layer_norm(x, (HIDDEN,), state["attn.norm.weight"], state["attn.norm.bias"])
    key, value = (media @ state["attn.to_kv.weight"].T).chunk(2, dim=-1)
    attended = attention(normed @ state["attn.to_q.weight"].T, key, value, mask) @ state["attn.to_out.weight"].T
    x = x + state["attn_gate"].tanh() * attended
    return x + state["ff_gate"].tanh() * flamingo_mlp(x, state, "ff.")


def flamingo_resampler(features, state):
    """Latents attend to [features; latents], layer by layer."""
    latents = state["latents"].expand(features.shape[0], -1, -1)
    depth = len({name.split(".")[1] for name in state if name.startswith("layers.")})
    for index in range(depth):
        part = {name.removeprefix(f"layers.{index}."): tensor for name, tensor in state.items()}
        media = layer_norm(features, (VISION,), part["0.norm_media.weight"], part["0.norm_media.bias"])
        normed = layer_norm(latents, (VISION,), part["0.norm_latents.weight"], part["0.norm_latents.bias"])
        key, value = (torch.cat([media, normed], dim=1) @ part["0.to_kv.weight"].T).chunk(2, dim=-1)
        latents = latents + attention(normed @ part["0.to_q.weight"].T, key, value) @ part["0.to_out.weight"].T
        latents = latents + flamingo_mlp(latents, part, "1.")
    return layer_norm(latents, (VISION,), state["norm.weight"], state["norm.bias"])


@torch.no_grad()
def test_open_flamingo_block():
    """Keys for values, a norm or an activation of another kind, the wrong scale."""
    state = flamingo_block_state()
    config, renamed = open_flamingo_block(state, HEAD_DIM)
    block = GatedCrossAttentionBlock(config).eval()
    block.load_state_dict(renamed)
    text, media = torch.randn(2, 5, HIDDEN), torch.randn(2, 7, VISION)
    assert torch.allclose(block(text, media), flamingo_block(text, media, state), atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("layout", ["published", "whole"])
def test_open_flamingo_model(layout, tmp_path):
    """Blocks in front of the wrong layers, a class token that the resampler should not see, text that sees the wrong
    image, embeddings that were trained and are left behind.
    """
    state = flamingo_checkpoint(layout)
    base = make_text()
    if layout == "whole":  # holds all weights of the layers
        base.model.layers[0].mlp.up_proj.weight.zero_()
    model = import_open_flamingo(state, base, make_clip(), image_token_id=MARKER, head_dim=HEAD_DIM)
    assert not model.training and model.config.text_config.vocab_size == VOCAB_SIZE + 3
    assert model.config.text_config is model.model.text_model.config
    model.save_pretrained(tmp_path)
    model = type(model).from_pretrained(tmp_path).eval()
    assert model.config.cross_attention_layers == [0, 2]
    ids = token_ids(1, 10)
    ids[ids == MARKER] = MARKER + 1
    ids[0, [2, 5, 7]] = MARKER  # a document with three images
    ids[0, 9] = VOCAB_SIZE + 1
    pixels = torch.randn(1, 3, 3, 16, 16)
    features = make_clip()(pixels[0]).last_hidden_state[:, 1:]
    media = flamingo_resampler(features, perceiver_state()).flatten(0, 1)[None]
    order = (ids == MARKER).cumsum(dim=1)
    mask = (order[..., None] == torch.arange(1, 4)).repeat_interleave(3, dim=-1)

    text = make_text()
    text.resize_token_embeddings(VOCAB_SIZE + 3)
    text.load_state_dict(language_state(), strict=False)
    for index in (0, 2):
        state = flamingo_block_state(index)
        layer = text.model.layers[index]
        layer_forward = type(layer).forward

        def forward(hidden_states, *args, own=layer_forward, layer=layer, state=state, **kwargs):
            safe = mask | ~mask.any(dim=-1, keepdim=True)
            seen = flamingo_block(hidden_states, media, state, safe)
            return own(layer, torch.where(mask.any(dim=-1, keepdim=True), seen, hidden_states), *args, **kwargs)

        layer.forward = forward
    expected = text(ids).logits
    assert torch.allclose(model(ids, pixel_values=pixels).logits, expected, atol=2e-5)
    explicit = model(ids, pixel_values=pixels, cross_attention_mask=mask).logits
    assert torch.allclose(explicit, expected, atol=2e-5)


def test_wrong_open_flamingo_checkpoints():
    """Random blocks where a tensor was missing, misspelled or of another size."""
    good = flamingo_checkpoint()
    name = "lang_encoder.model.layers.2.gated_cross_attn_layer.attn_gate"
    embedding = "lang_encoder.model.embed_tokens.weight"
    cases = [
        ({key: value for key, value in good.items() if key != name}, "no tensor for .*layers.2.*attn_gate"),
        (good | {name: torch.zeros(3)}, r"expected shape \(1,\) for .*attn_gate, got \(3,\)"),
        (good | {f"{name[:-4]}bias": torch.zeros(3)}, "attn_bias, which OpenFlamingo"),
        (
            good | {embedding: torch.zeros(99, 31)},
            r"embed_tokens.weight of shape \(99, 31\), but `text` .*another text model",
        ),
        (good | {embedding: torch.zeros(98, 32)}, r"embeddings and a head of \[98, 99\] tokens"),
        (
            good | {"lang_encoder.transformer.wte.weight": torch.zeros(99, 32)},
            "wte.weight, which `text` .* does not have",
        ),
        (good | {"surplus": torch.zeros(3)}, "holds surplus"),
        (good | {"perceiver.frame_embs": torch.zeros(2, VISION)}, "expected a resampler of images, got `frame_embs`"),
        (
            {key: value for key, value in good.items() if ".2.gated_cross" not in key},
            r"holds blocks for the layers \[0\]: expected \[0, 1, 2, 3\], every 1. of the 4 layers",
        ),
        (
            {key.replace(".2.gated_cross", ".1.gated_cross"): value for key, value in good.items()},
            r"layers \[0, 1\]: expected \[0, 1, 2, 3\], .* It is not complete, or of another text model",
        ),
        ({"perceiver.latents": torch.zeros(3, VISION)}, "not an OpenFlamingo checkpoint"),
        ({key: value for key, value in good.items() if key != "perceiver.latents"}, "holds no latents"),
    ]
    text = make_text()
    before = {name: tensor.clone() for name, tensor in text.state_dict().items()}
    for state, message in cases:
        with pytest.raises(ValueError, match=message):
            import_open_flamingo(state, text, make_clip(), image_token_id=MARKER, head_dim=HEAD_DIM)
    with pytest.raises(ValueError, match="do not fit the 16 query"):
        import_open_flamingo(good, text, make_clip(), image_token_id=MARKER, head_dim=7)
    assert_untouched(text, before)


def assert_untouched(text, before):
    after = text.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert type(text.model.layers[0]).__name__ == "LlamaDecoderLayer" and text.config.vocab_size == VOCAB_SIZE


def rms(x, weight, eps=1e-5):
    return weight * x / (x.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt()


def kempner_block(x, features, state, mask=None):
    """x + attention(norm(x), features), then + MLP(norm(x)); K/V heads repeated for their queries."""
    normed = rms(x, state["attn_norm.weight"])
    repeats = INNER // state["attn.k_proj.weight"].shape[0]
    key, value = (
        (features @ state[f"attn.{letter}_proj.weight"].T)
        .unflatten(-1, (-1, HEAD_DIM))
        .repeat_interleave(repeats, dim=2)
        for letter in "kv"
    )
    mask = None if mask is None else mask[:, None]
    x = (
        x
        + attention(normed @ state["attn.q_proj.weight"].T, key.flatten(2), value.flatten(2), mask)
        @ state["attn.o_proj.weight"].T
    )
    normed = rms(x, state["mlp_norm.weight"])
    up = normed @ state["mlp.up_proj.weight"].T
    inner = silu(normed @ state["mlp.gate_proj.weight"].T) * up if "mlp.gate_proj.weight" in state else gelu(up)
    return x + inner @ state["mlp.down_proj.weight"].T


@torch.no_grad()
@pytest.mark.parametrize("hidden_act", ["silu", "gelu"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_kempnerforge_block_computes_its_equations(hidden_act, kv_heads):
    """Heads that are grouped differently, another epsilon, a gate that is not there."""
    state = kempner_block_state(0, hidden_act, kv_heads)
    config = kempnerforge_block_config(state, HEADS, hidden_act=hidden_act)
    assert config.num_key_value_heads == kv_heads and config.gate == "none"
    block = GatedCrossAttentionBlock(config).eval()
    block.load_state_dict(state)
    text, features = torch.randn(2, 5, HIDDEN), torch.randn(2, 7, HIDDEN)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, 3:] = False
    assert torch.allclose(block(text, features), kempner_block(text, features, state), atol=1e-5)
    assert torch.allclose(block(text, features, mask), kempner_block(text, features, state, mask), atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("every", [2, 3])
def test_a_kempnerforge_model_computes_its_equations(every, tmp_path):
    """Blocks in front of a layer that they should follow, and the one after the last layer."""
    states = {index: kempner_block_state(index) for index in range(4 // every)}
    checkpoint = {"token_embedding.weight": torch.zeros(1)}
    for index, state in states.items():
        checkpoint |= {f"cross_attention_layers.{index}.{name}": tensor for name, tensor in state.items()}
    model = import_kempnerforge(checkpoint, make_text(), num_attention_heads=HEADS, every=every).eval()
    features, ids = torch.randn(2, 7, HIDDEN), token_ids()

    text = make_text()
    for index, state in states.items():
        layer = text.model.layers[(index + 1) * every - 1]
        layer_forward = type(layer).forward

        def forward(*args, own=layer_forward, layer=layer, state=state, **kwargs):
            return kempner_block(own(layer, *args, **kwargs), features, state)

        layer.forward = forward
    expected = text(ids).logits
    assert torch.allclose(model(ids, cross_attention_states=features).logits, expected, atol=2e-5)
    options = {"max_new_tokens": 4, "do_sample": False, "cross_attention_states": features}
    cached, uncached = (model.generate(ids, use_cache=use_cache, **options) for use_cache in (True, False))
    assert torch.equal(cached, uncached)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.allclose(again(ids, cross_attention_states=features).logits, expected, atol=2e-5)


def test_wrong_kempnerforge_checkpoints():
    """Blocks of another model, put somewhere."""
    good = {f"cross_attention_layers.0.{name}": tensor for name, tensor in kempner_block_state(0).items()}
    options = {"num_attention_heads": HEADS, "every": 4}
    text = make_text()
    before = {name: tensor.clone() for name, tensor in text.state_dict().items()}
    for state, changes, message in (
        ({}, {}, "holds no cross_attention_layers"),
        (good, {"every": 2}, r"blocks \[0\], but 4 layers with `every=2` have 2"),
        (good, {"num_attention_heads": 3}, "do not fit the 16 query"),
        ({key: value for key, value in good.items() if "v_proj" not in key}, {}, "no tensor for .*v_proj"),
        (good | {"cross_attention_layers.0.attn.bias": torch.zeros(1)}, {}, "does not have: .*attn.bias"),
    ):
        with pytest.raises(ValueError, match=message):
            import_kempnerforge(state, text, **options | changes)
    assert_untouched(text, before)


def kempner(hidden_act):
    blocks = {index: kempner_block_state(index, hidden_act, HEADS) for index in (0, 1)}
    return {
        f"cross_attention_layers.{k}.{name}": tensor for k, block in blocks.items() for name, tensor in block.items()
    }


def test_an_activation_that_no_tensor_tells():
    """Blocks with GELU that compute with SiLU."""
    options = {"num_attention_heads": HEADS, "every": 2}
    with pytest.raises(ValueError, match="Expected `hidden_act`"):
        import_kempnerforge(kempner("gelu"), make_text(), **options)
    named = import_kempnerforge(kempner("gelu"), make_text(), hidden_act="gelu", **options)
    assert named.config.cross_attention_config.hidden_act == "gelu"
    gated = import_kempnerforge(kempner("silu"), make_text(), **options)
    assert gated.config.cross_attention_config.hidden_act == "silu"


def test_a_tensor_without_a_place_is_not_lost(tmp_path):
    """Weights of an adapter that an export leaves out."""
    model = import_checkpoint(make_mllama())
    model.blocks[0].attn.q_proj.register_parameter("lora_A", torch.nn.Parameter(torch.ones(2, 2)))
    with pytest.raises(ValueError, match="does not have: .*lora_A"):
        export_checkpoint(model, tmp_path / "out")
