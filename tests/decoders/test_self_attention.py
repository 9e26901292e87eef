"""`retrofit(..., init="self_attention")`: blocks that start as the self-attention of the layers behind them."""

import pytest
import torch
from tiny_architectures import tiny_config
from tiny_models import TEXT_CONFIGS, make_text, token_ids, vision_config
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from hf_xattn import CrossAttentionConfig, retrofit
from hf_xattn.commands.main import main


CHOSEN = 'init="self_attention"'


def text_of(name, dtype=torch.float32):
    """A text model with random weights everywhere: also in norms and biases, which start as ones and zeros."""
    config = TEXT_CONFIGS[name]() if name in TEXT_CONFIGS else tiny_config(name)
    text = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(7)
    for path, parameter in text.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(noise * 0.2 if parameter.dim() > 1 else noise * 0.3 + ("norm" in path))
    return text


def rms(states, weight, eps):
    return states / (states.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def layer_norm(states, norm):
    centred = states - states.mean(-1, keepdim=True)
    return rms(centred, norm.weight.double(), norm.eps) + norm.bias.double()


def linear(layer, first=0, last=None):
    """Some outputs of a linear layer, in float64."""
    weight, bias = layer.weight.double()[first:last], layer.bias
    bias = 0 if bias is None else bias.double()[first:last]
    return lambda states: states @ weight.T + bias


def separate(attention):
    return [linear(getattr(attention, f"{name}_proj")) for name in "qkv"]


def in_a_row(attention):
    """Phi-3: 4 heads of queries, 2 of keys, 2 of values, each of 8."""
    return [linear(attention.qkv_proj, *ends) for ends in ((0, 32), (32, 48), (48, 64))]


def of_conv1d(attention):
    weight, bias = attention.c_attn.weight.double(), attention.c_attn.bias.double()
    return [lambda x, s=s: x @ weight[:, s : s + 32] + bias[s : s + 32] for s in (0, 32, 64)]


def interleaved(attention):
    """GPT-NeoX: query, key and value of the first head, then those of the second."""
    fused = linear(attention.query_key_value)

    def part(index):
        return lambda states: torch.cat([fused(states)[..., h * 24 + index * 8 :][..., :8] for h in range(4)], -1)

    return [part(index) for index in range(3)]


def llama_norm(layer):
    return lambda states: rms(states, layer.input_layernorm.weight.double(), layer.input_layernorm.variance_epsilon)


def gemma_norm(norm):
    return lambda states: rms(states, 1 + norm.weight.double(), norm.eps)


def identity(states):
    return states


def qwen3_heads(attention):
    return [lambda x, n=n: rms(x, n.weight.double(), n.variance_epsilon) for n in (attention.q_norm, attention.k_norm)]


# For each: the attention of a layer, its projections, its norm, the norms of its heads, and what scores are divided by.
KINDS = {
    "llama": lambda layer: (separate(layer.self_attn), llama_norm(layer), [identity] * 2, 8**0.5),
    "qwen2": lambda layer: (separate(layer.self_attn), llama_norm(layer), [identity] * 2, 8**0.5),
    "qwen3": lambda layer: (separate(layer.self_attn), llama_norm(layer), qwen3_heads(layer.self_attn), 8**0.5),
    "gemma3": lambda layer: (
        separate(layer.self_attn),
        gemma_norm(layer.input_layernorm),
        [gemma_norm(layer.self_attn.q_norm), gemma_norm(layer.self_attn.k_norm)],
        256**0.5,  # `query_pre_attn_scalar`, not the width of a head
    ),
    "opt": lambda layer: (
        separate(layer.self_attn),
        lambda states: layer_norm(states, layer.self_attn_layer_norm),
        [identity] * 2,
        8**0.5,
    ),
    "gpt2": lambda layer: (of_conv1d(layer.attn), lambda x: layer_norm(x, layer.ln_1), [identity] * 2, 8**0.5),
    "phi3": lambda layer: (in_a_row(layer.self_attn), llama_norm(layer), [identity] * 2, 8**0.5),
    "gpt_neox": lambda layer: (
        interleaved(layer.attention),
        lambda states: layer_norm(states, layer.input_layernorm),
        [identity] * 2,
        8**0.5,
    ),
}


def reference(kind, layer, hidden, context):
    """What the heads of a layer give, one at a time, for queries of `hidden` and keys and values of `context`."""
    (query, key, value), norm, (query_norm, key_norm), divisor = KINDS[kind](layer)
    queries, keys, values = query(norm(hidden)), key(context), value(context)
    group = queries.shape[-1] // keys.shape[-1]
    heads = []
    for head in range(queries.shape[-1] // 8):
        own, of_key = slice(head * 8, head * 8 + 8), slice(head // group * 8, head // group * 8 + 8)
        scores = query_norm(queries[..., own]) @ key_norm(keys[..., of_key]).transpose(-1, -2) / divisor
        heads.append(scores.softmax(-1) @ values[..., of_key])
    return torch.cat(heads, dim=-1)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_attends_as_its_layer(kind):
    """A fused projection that is cut in another way; a norm, a bias or a scale that is left out; another layer's."""
    text = text_of(kind)
    base = text(token_ids()).logits
    decoder = text.get_decoder()
    layers = decoder.h if kind == "gpt2" else decoder.layers
    model = retrofit(text, cross_attention_layers=[1, 3, 3], init="self_attention")
    states = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(8))
    assert torch.equal(model(token_ids(), cross_attention_states=states).logits, base)
    hidden = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(9))
    for block, index in zip(model.blocks, (1, 3, 3)):
        assert not block.attn.o_proj.weight.any() and not block.mlp.down_proj.weight.any()
        block.attn.o_proj.weight.copy_(torch.eye(32))
        expected = reference(kind, layers[index], hidden.double(), states.double())
        given, _ = block.attn(block.attn_norm(hidden), states)
        torch.testing.assert_close(given.double(), expected, atol=2e-5, rtol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_half_precision(kind):
    """Weights that are rounded on the way, or a layer that is not understood any more."""
    text = text_of(kind, torch.bfloat16)
    model = retrofit(text, cross_attention_layers=[1], init="self_attention")
    layer, block = (text.transformer.h if kind == "gpt2" else text.model.layers)[1], model.blocks[0]
    own = layer.attn.c_attn.weight[:, :32].T if kind == "gpt2" else layer.self_attn.q_proj.weight
    assert block.attn.q_proj.weight.dtype == torch.bfloat16 and torch.equal(block.attn.q_proj.weight, own)
    assert block.attn_norm.weight.dtype == torch.float32


def test_the_text_model_stays_as_it_is():
    """A kernel or a mode that reading leaves behind, hooks, or blocks that share memory with the base."""
    text = text_of("llama")
    text.set_attn_implementation("eager")
    text.train()
    text.model.layers[2].eval()
    before = {name: value.clone() for name, value in text.state_dict().items()}
    model = retrofit(text, init="self_attention", every=2)
    assert text.config._attn_implementation == "eager" and text.training
    with torch.no_grad():
        for block in model.blocks:
            block.attn.q_proj.weight.zero_()
    assert all(torch.equal(text.state_dict()[name], value) for name, value in before.items())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in text.modules())


def test_what_was_asked_for_stays():
    """A field that follows the layer although the caller has given another value; a norm that has no start."""
    asked = {"attention_bias": True, "qk_norm": True, "intermediate_size": 16}
    model = retrofit(text_of("llama"), every=2, cross_attention=asked, init="self_attention")
    config = model.config.cross_attention_config
    assert all(getattr(config, name) == value for name, value in asked.items())
    attn = model.blocks[0].attn
    assert not attn.q_proj.bias.any() and (attn.q_norm.weight == 1).all()
    assert torch.equal(attn.k_proj.weight, model.model.text_model.model.layers[1].self_attn.k_proj.weight)


def test_random_is_the_default():
    """A start that nobody has asked for."""
    torch.manual_seed(0)
    first = retrofit(text_of("llama"), every=2)
    torch.manual_seed(0)
    second = retrofit(text_of("llama"), every=2, init="random")
    for one, other in zip(first.blocks, second.blocks):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))
    assert not torch.equal(
        first.blocks[0].attn.q_proj.weight, first.model.text_model.model.layers[1].self_attn.q_proj.weight
    )


def linear_4bit(text):
    packed = nn.Linear(32, 32, bias=False)
    packed.weight = nn.Parameter(torch.zeros(512, 1, dtype=torch.uint8), requires_grad=False)
    text.model.layers[1].self_attn.q_proj = packed


def in_another_order(text):
    text.model.layers[1].self_attn.k_proj.register_forward_hook(lambda *args: args[-1].roll(1, dims=-1))


def with_more_values(text):
    text.model.layers[1].self_attn.v_proj.register_forward_hook(lambda *args: 2 * args[-1])


WRONG = {
    "a state-space layer": ("jamba", None, {"layers": [0]}, "layer 0 of Jamba.*got none"),
    "latent attention": ("deepseek_v3", None, {}, "layer 1 of DeepseekV3.*q_proj"),
    "no norm in front": ("olmo2", None, {}, "layer 1 of Olmo2.*norm that a block has"),
    "another kernel": ("gptj", None, {}, "layer 1 of GPTJ.*0 times"),
    "quantized": ("llama", linear_4bit, {}, "layer 1 of Llama.*quantized"),
    "another order": ("llama", in_another_order, {}, "layer 1 of Llama.*not what its projections"),
    "other values": ("llama", with_more_values, {}, "layer 1 of Llama.*not what its projections"),
    "after the last": ("llama", None, {"layers": [1, 4]}, "index 4.*after the last layer"),
    "a narrow context": ("llama", None, {"cross_attention": {"context_size": 20}}, "`context_size` to be 32, got 20"),
    "other heads": ("llama", None, {"cross_attention": {"num_attention_heads": 2}}, "`num_attention_heads`.*4, got 2"),
    "no biases": ("gpt2", None, {"cross_attention": {"attention_bias": False}}, "`attention_bias`.*True, got False"),
    "another norm": ("gpt2", None, {"cross_attention": {"norm_type": "rmsnorm"}}, "`norm_type`.*'layernorm'"),
    "no norms of heads": (
        "qwen3",
        None,
        {"cross_attention": CrossAttentionConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2)},
        "`qk_norm`.*True, got False",
    ),
    "a perceiver": (
        "llama",
        None,
        {"vision": AutoModel.from_config(vision_config()), "connector_type": "perceiver"},
        "`context_size` to be 32, got 24.*linear",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_understood_is_refused(case):
    """Weights that would mean something else in a block, or blocks of which some are random without a word."""
    kind, change, options, message = WRONG[case]
    text = text_of(kind)
    if change is not None:
        change(text)
    with pytest.raises(ValueError, match=f'{CHOSEN}.*{message}.*init="random"'):
        retrofit(text, **{"layers": [1], **options}, init="self_attention")
    assert not any("cross_attention" in name for name, _ in text.named_modules())
    retrofit(text, **{"layers": [1], **options})


def test_layers_of_different_kinds():
    """One configuration for blocks whose layers have heads of different widths."""
    text = make_text()
    text.model.layers[3].self_attn.q_proj.bias = nn.Parameter(torch.zeros(32))
    with pytest.raises(ValueError, match=f"{CHOSEN}.*`attention_bias` of layer 1 is False, that of layer 3 is True"):
        retrofit(text, layers=[1, 3], init="self_attention")


def test_weights_without_values():
    """A meta model, whose values come later, whose blocks would keep none."""
    with torch.device("meta"):
        text = AutoModelForCausalLM.from_config(TEXT_CONFIGS["llama"]())
    with pytest.raises(ValueError, match=f"{CHOSEN}.*meta device"):
        retrofit(text, init="self_attention")


def test_command(tmp_path, capsys):
    """`--init` that the command takes and forgets."""
    text = text_of("gpt2")
    text.save_pretrained(tmp_path / "text")
    command = ["retrofit", tmp_path / "text", "--every", "2", "--init", "self_attention", "--output", tmp_path / "out"]
    assert main([str(word) for word in command]) in (0, None), capsys.readouterr().err
    model = AutoModel.from_pretrained(tmp_path / "out")
    assert torch.equal(model.blocks[0].attn.v_proj.weight, text.transformer.h[1].attn.c_attn.weight[:, 64:].T)
