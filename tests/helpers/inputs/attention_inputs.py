"""An attention layer with random weights, and small inputs and masks for it."""

import torch

from hf_xattn import CrossAttentionConfig, GatedCrossAttention
from hf_xattn.cache.cross_cache import CrossCache
from hf_xattn.cache.image_layout import ImageLayout
from hf_xattn.layers.context import EVERYTHING, CrossAttentionContext, Recorder


BATCH, TEXT_LEN, NUM_TOKENS = 2, 3, 5
HIDDEN, CONTEXT, HEAD_DIM = 10, 7, 6  # no size follows from another
KV_HEADS = {"mha": 4, "gqa": 2, "mqa": 1}


def make_layer(implementation: str = "sdpa", dtype: torch.dtype = torch.float32, **fields) -> GatedCrossAttention:
    """A layer with random weights everywhere, the output projection included."""
    sizes = {"hidden_size": HIDDEN, "context_size": CONTEXT, "num_attention_heads": 4, "head_dim": HEAD_DIM}
    config = CrossAttentionConfig(**(sizes | fields), attn_implementation=implementation)
    layer = GatedCrossAttention(config)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in layer.named_parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.4 + ("norm" in name)
    return layer.to(dtype).eval()


def inputs(dtype: torch.dtype = torch.float32, num_tokens: int = NUM_TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randn(BATCH, TEXT_LEN, HIDDEN, generator=generator)
    return hidden.to(dtype), torch.randn(BATCH, num_tokens, CONTEXT, generator=generator).to(dtype)


def attend(layer, hidden, key, value, folded=EVERYTHING, **context):
    """The layer's answer for keys and values that a cache holds: `(output, weights)`."""
    return layer(hidden, cross_attention=cached(key, value, folded, **context))


def cached(key, value, folded=EVERYTHING, output_attentions=False, positions=None) -> CrossAttentionContext:
    cache = CrossCache()
    cache.fill(ImageLayout.of((key.shape[2],), key.device), [(key, value)])
    recorder = Recorder(wants_weights=True) if output_attentions else None
    masks = {"mask": folded.mask, "visible": folded.visible}
    return CrossAttentionContext(cache=cache, positions=positions, recorder=recorder, **masks)


def make_mask(kind: str) -> torch.Tensor | None:
    if kind == "none":
        return None
    if kind == "padding":
        return torch.tensor([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    if kind == "empty row":
        return torch.tensor([[0, 0, 0, 0, 0], [1, 0, 1, 1, 1]], dtype=torch.bool)
    mask = torch.rand(BATCH, TEXT_LEN, NUM_TOKENS, generator=torch.Generator().manual_seed(7)) > 0.5
    mask[0, 1] = False  # a text token that sees nothing
    mask[1, 0] = True
    return mask
