"""Attention kernels that a user registers with transformers."""

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

from helpers.models.tiny_models import make_model, token_ids


def added(module, query, key, value, mask, scaling, dropout=0.0, **kwargs):
    """A kernel that adds its mask to the scores, as transformers' own of Llama does."""
    return eager_attention_forward(module, query, key, value, mask, scaling, dropout, **kwargs)


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_a_kernel_that_adds_its_mask(bias):
    """Padding images that are seen, because 1 is added where a mask is True; a position bias that is dropped."""
    AttentionInterface.register("added", added)
    AttentionMaskInterface.register("added", eager_mask)
    model = make_model(vision=False, cross_attention_config={"context_size": 16, "position_bias": bias})
    if bias:
        for block in model.blocks:
            for name, weight in block.named_parameters():
                if "bias" in name:
                    torch.nn.init.normal_(weight)
    given = {
        "cross_attention_states": torch.randn(2, 2, 5, 16),
        "image_mask": torch.tensor([[True, True], [True, False]]),
    }
    expected = model(token_ids(), **given).logits
    model.set_attn_implementation("added")
    assert torch.allclose(model(token_ids(), **given).logits, expected, atol=1e-5)
