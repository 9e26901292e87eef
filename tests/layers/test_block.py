"""The block: it starts as the identity, leaves alone what sees nothing, learns everywhere, and survives saving."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel
from transformers.activations import ACT2FN

from helpers.references.memory_checks import memory_of_nan
from hf_xattn import CrossAttentionConfig, GatedCrossAttentionBlock
from hf_xattn.layers.norms import CrossAttentionLayerNorm, CrossAttentionRMSNorm


BATCH, TEXT_LEN, NUM_TOKENS, HIDDEN, CONTEXT = 2, 3, 5, 16, 12
SIZES = {
    "hidden_size": HIDDEN,
    "context_size": CONTEXT,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 24,
}
# Of each branch exactly one factor starts at zero.
STYLES = {
    "projection": {"zero_init": True, "gate": "tanh"},
    "flamingo": {"zero_init": False, "gate_init": 0.0},
    "kempnerforge": {"zero_init": True, "gate": "none"},
    "token": {"zero_init": True, "gate": "token"},
}
FULL = {"attention_bias": True, "mlp_bias": True, "qk_norm": True, "quiet_softmax": True, "position_bias": True}


def full(mlp_type: str) -> dict[str, object]:
    return {**FULL, "mlp_type": mlp_type, "mlp_bias": mlp_type != "none"}


every_style = pytest.mark.parametrize("style", STYLES)
every_norm = pytest.mark.parametrize("norm_type", ["rmsnorm", "layernorm"])
every_mlp = pytest.mark.parametrize("mlp_type", ["gated", "plain", "none"])


def fresh(dtype: torch.dtype = torch.float32, **fields) -> GatedCrossAttentionBlock:
    torch.manual_seed(1)
    config = CrossAttentionConfig(**(SIZES | fields))
    return AutoModel.from_config(config, dtype=dtype).eval()


def randomized(dtype: torch.dtype = torch.float32, **fields) -> GatedCrossAttentionBlock:
    block = fresh(dtype, **fields)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in block.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.4 + ("norm" in name)
        parameter.data = noise.to(parameter.dtype)
    return block


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(BATCH, TEXT_LEN, HIDDEN, generator=generator)
    return hidden.to(dtype), torch.randn(BATCH, NUM_TOKENS, CONTEXT, generator=generator).to(dtype)


@every_style
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fields", [{}, FULL, {"gate_granularity": "channel", "norm_type": "layernorm"}])
def test_fresh_block_is_the_identity(style, dtype, fields):
    """Rules out a retrofit that changes the base model before any training, by as little as one bit."""
    block = fresh(dtype, **STYLES[style], **fields)
    hidden, states = inputs(dtype)
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    for given in (None, mask):
        output = block(hidden, states * 50, given)
        assert output.dtype == dtype and torch.equal(output, hidden)
    assert block.config.starts_at_identity


def test_block_that_does_not_start_at_the_identity():
    """Rules out an identity test that would pass on a block which never does anything."""
    hidden, states = inputs()
    assert (fresh(zero_init=False, initializer_range=0.3)(hidden, states) != hidden).any(-1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fields", [{}, FULL, {"gate": "none", "attention_bias": True, "mlp_bias": True}])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("num_tokens", [1, NUM_TOKENS])
def test_text_that_sees_nothing_keeps_its_state(dtype, fields, grad, num_tokens):
    """Rules out the leaks of Mllama (attention) and Idefics (MLP): a text position without image is
    the base model's.
    """
    block = randomized(dtype, **fields)
    hidden, states = inputs(dtype)
    states = states[:, :num_tokens] * 1e3
    mask = torch.ones(BATCH, TEXT_LEN, num_tokens, dtype=torch.bool)
    mask[0, 1] = False
    mask[1, 0] = mask[1, 2] = False
    with torch.set_grad_enabled(grad):
        output = block(hidden, states, mask)
        rows = block(hidden, states, torch.tensor([[False], [True]]).expand(-1, num_tokens))
    dark = ~mask.any(-1)
    assert torch.equal(output[dark], hidden[dark])
    assert (output[~dark] != hidden[~dark]).any(-1).all()
    assert torch.equal(rows[0], hidden[0]) and (rows[1] != hidden[1]).any(-1).all()
    assert output.isfinite().all()


@pytest.mark.parametrize(
    ("stream", "weights"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "fields", [{}, FULL, {"mlp_type": "plain", "gate": "none", "norm_type": "layernorm"}, {"mlp_type": "none"}]
)
@pytest.mark.parametrize("num_tokens", [1, NUM_TOKENS])
@torch.no_grad()
def test_stream_of_another_dtype_than_the_weights(stream, weights, fields, num_tokens):
    """Rules out a block that raises where a decoder keeps its residual stream in float32 (Mamba), or rounds that
    stream.
    """
    block = randomized(weights, **fields)
    hidden, states = inputs(stream)
    states = states[:, :num_tokens]
    mask = torch.ones(BATCH, TEXT_LEN, num_tokens, dtype=torch.bool)
    mask[0, 1] = False
    output = block(hidden, states, mask)
    assert output.dtype == stream and torch.equal(output[0, 1], hidden[0, 1])
    reference = block.double()(hidden.double(), states.double(), mask)
    scale = (reference - hidden).abs().max()
    assert (output - reference).abs().max() <= scale * (1e-6 if torch.float64 in (stream, weights) else 0.02)
    assert torch.equal(fresh(weights, **fields)(hidden, states, mask), hidden)


def test_text_that_sees_nothing_passes_its_gradient_through():
    """Rules out a masked position whose gradient goes through the block, or is NaN beside large values."""
    block = randomized()
    hidden, states = (tensor.requires_grad_() for tensor in inputs())
    mask = torch.tensor([[False], [True]]).expand(-1, NUM_TOKENS)
    output = block(hidden, states, mask)
    got = torch.autograd.grad(output[0].sum(), [hidden, states, *block.parameters()], allow_unused=True)
    assert torch.equal(got[0][0], torch.ones_like(hidden[0])) and not got[0][1].any()
    assert all(grad is None or not grad.any() for grad in got[1:])


def test_other_images_other_output():
    """Rules out a block that ignores its image, or reads another row's."""
    block = randomized()
    hidden, states = inputs()
    output = block(hidden, states)
    changed = states.clone()
    changed[0, 3] += 1
    other = block(hidden, changed)
    assert not torch.isclose(other[0], output[0]).all(-1).any() and torch.equal(other[1], output[1])


def reference(block, hidden, states):
    """The block from torch's own parts."""
    config = block.config

    def norm(x, module):
        if config.norm_type == "rmsnorm":
            return nn.functional.rms_norm(x, x.shape[-1:], module.weight, config.norm_eps)
        return nn.functional.layer_norm(x, x.shape[-1:], module.weight, module.bias, config.norm_eps)

    def gated(x, gate, hidden):
        if config.gate == "token":
            score = nn.functional.rms_norm(hidden, hidden.shape[-1:], eps=1e-6) @ gate.weight * 64 / HIDDEN
            return (score + gate.bias).sigmoid()[..., None] * x
        return x if gate is None else gate.tanh() * x

    hidden = hidden + gated(block.attn(norm(hidden, block.attn_norm), states)[0], block.attn_gate, hidden)
    if config.mlp_type == "none":
        return hidden
    x, mlp, act = norm(hidden, block.mlp_norm), block.mlp, ACT2FN[config.hidden_act]
    up = nn.functional.linear(x, mlp.up_proj.weight, mlp.up_proj.bias)
    if config.mlp_type == "gated":
        up = act(nn.functional.linear(x, mlp.gate_proj.weight, mlp.gate_proj.bias)) * up
    else:
        up = act(up)
    down = nn.functional.linear(up, mlp.down_proj.weight, mlp.down_proj.bias)
    return hidden + gated(down, block.mlp_gate, hidden)


@every_norm
@every_mlp
@pytest.mark.parametrize("gate", ["tanh", "token", "none"])
@pytest.mark.parametrize("granularity", ["scalar", "channel"])
@pytest.mark.parametrize("act", ["silu", "gelu"])
def test_equals_the_reference(norm_type, mlp_type, gate, granularity, act):
    """Rules out swapped norms or gates, a missing residual, a gate before its projection, or another activation."""
    block = randomized(
        torch.float64,
        norm_type=norm_type,
        mlp_type=mlp_type,
        gate=gate,
        gate_granularity=granularity,
        hidden_act=act,
        mlp_bias=mlp_type != "none",
    ).double()
    hidden, states = inputs(torch.float64)
    torch.testing.assert_close(block(hidden, states), reference(block, hidden, states))
    if mlp_type == "none":
        names = [name for name, _ in block.named_parameters() if "mlp" in name]
        assert not names and block.mlp is None
    else:
        assert (block.mlp.gate_proj is None) == (mlp_type == "plain")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_norms_equal_torch(dtype, scale):
    """Rules out norms that run in half precision: the square of 300 is beyond float16."""
    x = (torch.randn(4, 7, HIDDEN) * scale).to(dtype)
    rms, layer = CrossAttentionRMSNorm(HIDDEN, 1e-5), CrossAttentionLayerNorm(HIDDEN, 1e-5)
    for norm in (rms, layer):
        nn.init.normal_(norm.weight)
    nn.init.normal_(layer.bias)
    expected = nn.functional.rms_norm(x.float(), (HIDDEN,), rms.weight, 1e-5).to(dtype)
    torch.testing.assert_close(rms(x), expected)
    expected = nn.functional.layer_norm(x.float(), (HIDDEN,), layer.weight, layer.bias, 1e-5).to(dtype)
    torch.testing.assert_close(layer(x), expected)


@every_style
@pytest.mark.parametrize("granularity", ["scalar", "channel"])
@pytest.mark.parametrize("fields", [{}, FULL, {"norm_type": "layernorm", "mlp_type": "plain"}, {"mlp_type": "none"}])
def test_everything_learns_by_the_second_step(style, granularity, fields):
    """Rules out weights that stay where they are for ever behind a product of two zeros.

    https://github.com/NovaSky-AI/SkyRL/issues/852
    """
    block = fresh(**STYLES[style], gate_granularity=granularity, initializer_range=0.2, **fields).train()
    hidden, states = inputs()
    target = torch.randn(hidden.shape)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    start = {name: parameter.detach().clone() for name, parameter in block.named_parameters()}
    for _ in range(2):
        optimizer.zero_grad()
        (block(hidden, states) - target).pow(2).sum().backward()
        grads = {name: parameter.grad.abs().max().item() for name, parameter in block.named_parameters()}
        optimizer.step()
    # A constant added to every key's score changes no softmax, so a key bias alone has no gradient; with a null key
    # or a norm on the keys it has one.
    assert all(grad > 0 for grad in grads.values()), grads
    assert not [name for name, parameter in block.named_parameters() if torch.equal(parameter, start[name])]


@pytest.mark.parametrize("gate_init", [0.5, -1.0])
@pytest.mark.parametrize("granularity, shape", [("scalar", (1,)), ("channel", (HIDDEN,))])
def test_gates_have_an_axis_and_their_first_value(granularity, shape, gate_init):
    """Rules out 0-d gates, which FSDP cannot shard, and gates that do not start where the config says."""
    block = fresh(gate_granularity=granularity, gate_init=gate_init)
    for gate in (block.attn_gate, block.mlp_gate):
        assert gate.shape == shape and gate.requires_grad and torch.equal(gate, torch.full(shape, gate_init))
    names = [name for name, _ in fresh(gate="none").named_parameters()]
    assert not [name for name in names if name.endswith("_gate")]


def test_token_gate_is_the_same_for_all_tokens_at_first():
    """A fresh gate that favours some tokens by chance, or does not start where the configuration says."""
    for gate in (fresh(gate="token", gate_init=-0.5).attn_gate, fresh(gate="token", gate_init=-0.5).mlp_gate):
        hidden, _ = inputs()
        made = gate(torch.ones_like(hidden), hidden)
        torch.testing.assert_close(made, torch.full_like(hidden, torch.tensor(-0.5).sigmoid()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate", ["tanh", "token"])
@every_norm
def test_gates_and_norms_stay_float32(tmp_path, dtype, norm_type, gate):
    """Rules out half-precision gates and norms: their updates vanish in rounding.

    https://github.com/vllm-project/speculators/issues/765
    """
    source = randomized(**FULL, norm_type=norm_type, gate=gate)
    source.save_pretrained(tmp_path)
    loaded = GatedCrossAttentionBlock.from_pretrained(tmp_path, dtype=dtype)
    for block in (loaded, fresh(dtype, **FULL, norm_type=norm_type, gate=gate)):
        for name, parameter in block.named_parameters():
            wide = "norm" in name or "_gate" in name
            assert parameter.dtype == (torch.float32 if wide else dtype), name
        hidden, states = inputs(dtype)
        assert block(hidden, states).dtype == dtype
    for name, parameter in source.named_parameters():
        if "norm" in name or "_gate" in name:
            assert torch.equal(loaded.get_parameter(name), parameter), name


@every_style
@pytest.mark.parametrize("fields", [{}, FULL, {"norm_type": "layernorm", "mlp_type": "plain"}, {"mlp_type": "none"}])
def test_a_loaded_block_has_the_weights_of_the_saved_one(tmp_path, style, fields):
    """Rules out loaded weights that `_init_weights` draws anew, or a setting that is lost in the file.

    https://github.com/huggingface/transformers/issues/46620
    """
    block = randomized(**STYLES[style], **fields)
    block.save_pretrained(tmp_path)
    loaded, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is GatedCrossAttentionBlock
    assert not info["missing_keys"] and not info["unexpected_keys"]
    state = loaded.state_dict()
    assert state.keys() == block.state_dict().keys()
    for name, value in block.state_dict().items():
        assert torch.equal(state[name], value) and state[name].dtype == value.dtype, name
    hidden, states = inputs()
    assert torch.equal(loaded.eval()(hidden, states), block(hidden, states))
    loaded.post_init()
    for name, value in block.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


@every_style
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_missing_weights_start_as_in_a_fresh_block(tmp_path, style, dtype):
    """Rules out a block that loads without some of its weights, and noise or empty memory in those that were built on
    meta.
    """
    block = randomized(**STYLES[style], **FULL, initializer_range=0.1)
    block.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    # "k_proj.bias" alone: its weight is in the file, and initialising the module must leave it alone.
    gone = ("o_proj", "down_proj", "k_proj.bias", "_gate", "mlp_norm", "up_proj", "q_norm", "relative_attention_bias")
    kept = {name: value for name, value in load_file(path).items() if not any(part in name for part in gone)}
    assert 0 < len(kept) < len(block.state_dict())
    save_file(kept, path, metadata={"format": "pt"})
    lost = len(block.state_dict()) - len(kept)
    for load in (GatedCrossAttentionBlock.from_pretrained, AutoModel.from_pretrained):
        with pytest.raises(
            ValueError, match=rf"{lost} weights are missing, 'attn.k_proj.bias', .* and {lost - 3} more"
        ):
            load(tmp_path, dtype=dtype)
    loaded = GatedCrossAttentionBlock.from_pretrained(tmp_path, dtype=dtype, allow_missing_weights=True).eval()
    for name, value in kept.items():
        parameter = loaded.get_parameter(name)
        assert torch.equal(parameter, value.to(parameter.dtype)), name
    config = block.config
    for projection in (loaded.attn.o_proj, loaded.mlp.down_proj):
        if config.zero_init:
            assert not projection.weight.any()
        else:
            assert 0.05 < projection.weight.float().std() < 0.2
        assert not projection.bias.any()
    assert 0.05 < loaded.mlp.up_proj.weight.float().std() < 0.2 and not loaded.mlp.up_proj.bias.any()
    assert 0.05 < loaded.attn.relative_attention_bias.weight.float().std() < 0.2
    assert (loaded.mlp_norm.weight == 1).all() and (loaded.attn.q_norm.weight == 1).all()
    for gate in (loaded.attn_gate, loaded.mlp_gate):
        if config.gate == "token":
            assert not gate.weight.any()
            gate = gate.bias
        assert gate is None if config.gate == "none" else torch.equal(gate, torch.full((1,), float(config.gate_init)))
    hidden, states = inputs(dtype)
    assert torch.equal(loaded(hidden, states), hidden)


@every_style
@every_mlp
def test_no_random_number_is_drawn_for_nothing(style, mlp_type):
    """Rules out weights that are drawn twice, or drawn and then set to zero: that took most of the time
    of a retrofit.
    """
    block = fresh(**STYLES[style], **full(mlp_type))
    after = torch.rand(1)
    torch.manual_seed(1)
    drawn = 0
    for module in block.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)) and not getattr(module, "zero_init", False):
            expected = torch.empty_like(module.weight).normal_(std=block.config.initializer_range)
            assert torch.equal(module.weight, expected)
            drawn += 1
    assert drawn >= (4 if mlp_type == "none" else 5) and torch.equal(torch.rand(1), after)


@every_style
@every_norm
@every_mlp
def test_every_weight_gets_a_value(style, norm_type, mlp_type):
    """Rules out weights that stay as the memory was, because neither torch nor `_init_weights` writes them."""
    with memory_of_nan():
        block = fresh(**STYLES[style], **full(mlp_type), norm_type=norm_type, gate_granularity="channel")
    assert not [name for name, weight in block.named_parameters() if weight.isnan().any()]


@every_style
def test_zero_init_survives_post_init_and_meta(style):
    """Rules out a second initialisation, or one after a stay on the meta device, that undoes the zero start."""
    config = CrossAttentionConfig(**SIZES, **STYLES[style])
    with torch.device("meta"):
        block = GatedCrossAttentionBlock(config)
    assert all(parameter.is_meta for parameter in block.parameters())
    block = block.to_empty(device="cpu").eval()
    for parameter in block.parameters():
        parameter.data.fill_(7.0)
        parameter._is_hf_initialized = False
    for module in block.modules():
        module._is_hf_initialized = False
    block.init_weights()
    again = fresh(**STYLES[style])
    again.post_init()
    hidden, states = inputs()
    for other in (block, again):
        assert torch.equal(other(hidden, states), hidden)
        assert 0.01 < other.attn.q_proj.weight.std() < 0.04
        assert (other.attn_norm.weight == 1).all()


def test_a_block_refuses_a_call_without_images():
    """Rules out a block that runs without an image and silently does nothing, or takes wrong shapes and dtypes."""
    block = fresh()
    hidden, states = inputs()
    with pytest.raises(ValueError, match="`cross_attention_states` of shape .* are required, got None"):
        block(hidden)
    with pytest.raises(ValueError, match=rf"hidden_size={HIDDEN}.*\(2, 3, 15\)"):
        block(hidden[..., 1:], states)
    with pytest.raises(ValueError, match=rf"context_size={CONTEXT}.*\(2, 5, 11\)"):
        block(hidden, states[..., 1:])
    with pytest.raises(TypeError, match="`cross_attention_mask`.*torch.float32"):
        block(hidden, states, torch.ones(BATCH, NUM_TOKENS))
    with pytest.raises(ValueError, match=r"\(2, 5\) .*got \(2, 4\)"):
        block(hidden, states, torch.ones(BATCH, 4, dtype=torch.bool))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_implementation_reaches_the_layer(monkeypatch, implementation):
    """Rules out `set_attn_implementation` that changes a config which the layer does not read."""
    block = randomized()
    hidden, states = inputs()
    expected = block(hidden, states)
    called = []
    original = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: called.append(1) or original(*args, **kwargs),
    )
    block.set_attn_implementation(implementation)
    torch.testing.assert_close(block(hidden, states), expected)
    assert bool(called) == (implementation == "sdpa")
