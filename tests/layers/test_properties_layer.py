"""Properties of a block on its own, for random sizes, head layouts, options, masks and dtypes."""

import pytest
import torch
from hypothesis import strategies as st

from helpers.inputs.attention_inputs import attend
from helpers.inputs.properties import LayerCase, block_config, layer_cases, run, slow_seed, tensor
from hf_xattn import GatedCrossAttentionBlock
from hf_xattn.layers.block import CrossAttentionLayerNorm
from hf_xattn.layers.context import fold_mask
from hf_xattn.parts.position_bias import relative_position_bucket


TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
EXACT = st.sampled_from([torch.float64, torch.float32])


def make(case: LayerCase) -> GatedCrossAttentionBlock:
    block = GatedCrossAttentionBlock(block_config(case)).eval()
    for number, (name, parameter) in enumerate(block.named_parameters()):
        drawn = tensor(case.seed + 10 + number, *parameter.shape) * 0.3
        parameter.data = drawn + 1 if "norm.weight" in name else drawn
    dtype = torch.float64 if case.dtype == torch.float64 else case.dtype
    for name, parameter in block.named_parameters():
        kept = any(name.startswith(part) for part in block._keep_in_fp32_modules_strict)
        parameter.data = parameter.data.to(torch.float32 if kept and dtype.itemsize == 2 else dtype)
    return block


def norm(states: torch.Tensor, module: torch.nn.Module) -> torch.Tensor:
    weight = module.weight.double()
    if isinstance(module, CrossAttentionLayerNorm):
        return torch.nn.functional.layer_norm(states, weight.shape, weight, module.bias.double(), module.eps)
    return torch.nn.functional.rms_norm(states, weight.shape, weight, module.eps)


def reference(block: GatedCrossAttentionBlock, text, states, visible) -> torch.Tensor:
    """The attention's output `(text_rows, text_len, hidden_size)` in float64, one head and one text position at a
    time.
    """
    attn, config = block.attn, block.config
    text, states = text.double(), states.double()
    if config.context_norm:
        states = norm(states, attn.context_norm)

    def project(module, given):
        return torch.nn.functional.linear(
            given, module.weight.double(), None if module.bias is None else module.bias.double()
        )

    repeats, group = text.shape[0] // states.shape[0], config.num_attention_heads // config.num_key_value_heads
    query, key, value = (
        project(module, given).unflatten(-1, (-1, config.head_dim))
        for module, given in ((attn.q_proj, text), (attn.k_proj, states), (attn.v_proj, states))
    )
    if config.qk_norm:
        query, key = norm(query, attn.q_norm), norm(key, attn.k_norm)
    output = torch.zeros_like(query)
    for row in range(text.shape[0]):
        for position in range(text.shape[1]):
            sees = torch.ones(states.shape[1], dtype=torch.bool)
            if visible is not None:
                sees = visible[row // (text.shape[0] // visible.shape[0]), position if visible.shape[1] > 1 else 0]
            if not sees.any():
                continue
            for head in range(config.num_attention_heads):
                keys, values = (part[row // repeats, :, head // group] for part in (key, value))
                scores = keys @ query[row, position, head] * config.head_dim**-0.5
                if config.position_bias:
                    distance = torch.arange(states.shape[1]) - position
                    buckets = relative_position_bucket(config, distance)
                    scores = scores + attn.relative_attention_bias.weight.double()[buckets, head]
                weights = scores[sees].exp() if scores.abs().max() < 500 else (scores[sees] - scores[sees].max()).exp()
                if scores.abs().max() >= 500:
                    null = (-scores[sees].max()).exp() if config.quiet_softmax else 0
                else:
                    null = 1 if config.quiet_softmax else 0
                output[row, position, head] = weights / (weights.sum() + null) @ values[sees]
    return project(attn.o_proj, output.flatten(2))


def folded_equals_reference(case: LayerCase) -> None:
    """Rules out heads, text rows or positions that get another's keys, mask or bias, whatever the numbers of each."""
    block = make(case)
    text, states, visible = case.text, case.states, case.visible
    folded = fold_mask(
        visible,
        image_rows=case.rows,
        text_rows=case.rows * case.repeats,
        text_len=case.text_len,
        group=case.config["num_attention_heads"] // case.config["num_key_value_heads"],
        null_key=case.config["quiet_softmax"],
    )
    key, value = block.attn.project_key_value(states, null_key=block.attn.quiet_softmax)
    found = attend(block.attn, text, key, value, folded)[0].double()
    expected = reference(block, text, states, visible)
    scale = max(1.0, expected.abs().max().item())
    assert (found - expected).abs().max() <= TOLERANCE[case.dtype] * scale * (10 if case.scale > 1 else 1)


def mask_equals_removal(case: LayerCase) -> None:
    """Rules out a masked token that still counts in a softmax, or a token beside it that does not."""
    block, visible = make(case), tensor(case.seed + 2, case.tokens) > 0
    text, states = case.text, case.states.repeat_interleave(case.repeats, dim=0)
    found = block(text, states, visible.expand(text.shape[0], -1))
    if not visible.any():
        assert torch.equal(found, text)
    else:
        expected = block(text, states[:, visible])
        assert (found - expected).abs().max() <= TOLERANCE[case.dtype] * max(1.0, expected.abs().max().item())


def masked_content_changes_no_bit(case: LayerCase) -> None:
    """Rules out a masked token whose content reaches a text position in any bit."""
    block, visible = make(case), case.visible
    if visible is None:
        return
    text, states = case.text, case.states.repeat_interleave(case.repeats, dim=0)
    visible = visible.repeat_interleave(text.shape[0] // visible.shape[0], dim=0).expand(-1, case.text_len, -1)
    hidden = ~visible.any(dim=1)
    other = torch.where(hidden[..., None], tensor(case.seed + 5, *states.shape, dtype=case.dtype) * 7, states)
    found, again = block(text, states, visible), block(text, other, visible)
    assert torch.equal(found, again)
    nothing = ~visible.any(dim=-1)
    assert torch.equal(found[nothing], text[nothing])


def rows_are_alone(case: LayerCase) -> None:
    """Rules out a row of a batch that reads another row's text, images or mask."""
    block, visible = make(case), case.visible
    text, states = case.text, case.states.repeat_interleave(case.repeats, dim=0)
    if visible is not None:
        visible = visible.repeat_interleave(text.shape[0] // visible.shape[0], dim=0).expand(-1, case.text_len, -1)
    whole = block(text, states, visible)
    for row in range(text.shape[0]):
        only = slice(row, row + 1)
        found = block(text[only], states[only], None if visible is None else visible[only])
        assert (found - whole[only]).abs().max() <= TOLERANCE[case.dtype] * max(1.0, whole.abs().max().item())


def finite_in_finite_out(case: LayerCase) -> None:
    """Rules out NaN from empty rows of a mask, from a division by zero in a norm, or in a gradient."""
    block, visible = make(case), case.visible
    text = case.text.requires_grad_()
    states = (case.states * (case.seed % 3)).repeat_interleave(case.repeats, dim=0).requires_grad_()  # also all zeros
    if visible is not None:
        visible = visible.repeat_interleave(text.shape[0] // visible.shape[0], dim=0).expand(-1, case.text_len, -1)
    with torch.enable_grad():
        found = block(text, states, visible)
        assert found.isfinite().all() and found.dtype == case.dtype
        found.float().square().mean().backward()
    for name, weight in [("text", text), ("states", states), *block.named_parameters()]:
        assert weight.grad is None or weight.grad.isfinite().all(), name


# Name: what is checked, the cases, how many in the default run.
PROPERTIES = {
    "folded equals reference": (folded_equals_reference, layer_cases(), 60),
    "mask equals removal": (mask_equals_removal, layer_cases(EXACT), 40),
    "masked content changes no bit": (masked_content_changes_no_bit, layer_cases(), 50),
    "each row alone": (rows_are_alone, layer_cases(EXACT), 40),
    "finite in, finite out": (finite_in_finite_out, layer_cases(), 60),
}


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_random_block_has_the_property(name):
    """Sizes, layouts and masks that no test was written for."""
    run(*PROPERTIES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", PROPERTIES)
def test_property_of_many(name):
    """The same for 500 more cases of each, other ones at every run."""
    check, cases, _ = PROPERTIES[name]
    run(check, cases, 500, slow_seed())
