"""What a forward does, and does not do, with keys, values and masks."""

from collections import Counter

import pytest
import torch

from helpers.models.marked_models import close
from helpers.models.tiny_models import make_model, pixels, token_ids


@torch.no_grad()
def test_quiet_softmax_copies_no_keys_and_values(monkeypatch):
    """All keys and values copied at every step to put the null key in front."""
    model, ids = make_model(cross_attention_config={"quiet_softmax": True}), token_ids()
    cache = model.encode_images(pixel_values=pixels(2, 2))
    model(ids, cache=cache)
    kernel, seen = torch.nn.functional.scaled_dot_product_attention, []
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda query, key, value, **kwargs: (
            seen.append((key.data_ptr(), value.data_ptr())) or kernel(query, key, value, **kwargs)
        ),
    )
    model(ids[:, :1], cache=cache)
    kept = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.cross_attention_cache.layers]
    assert [pair for pair in seen if pair in kept] == kept


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_long_text_shares_its_mask_among_heads(monkeypatch, implementation):
    """A mask over long text written out for every head of a group, or read in another order than the queries."""
    from hf_xattn import call

    model, ids, states = make_model(vision=False), token_ids(1, 300).remainder(90) + 4, torch.randn(1, 6, 32)
    model.set_attn_implementation(implementation)
    ids = ids[:, :120].repeat(3, 1)  # 360 positions share an image row
    mask = torch.rand(3, 120, 6) < 0.5
    expected = model(
        ids, cross_attention_states=states.repeat(3, 1, 1), cross_attention_mask=mask, use_cache=False
    ).logits
    fold, masks = call.fold_mask, []
    monkeypatch.setattr(call, "fold_mask", lambda *args, **kwargs: masks.append(fold(*args, **kwargs)) or masks[-1])
    cache = model.encode_images(cross_attention_states=states)
    logits = model(ids, cache=cache, cross_attention_mask=mask).logits
    assert masks[0].mask.shape == (1, 1, 360, 6), "two heads a group, one mask"
    assert close(logits, expected)


@torch.no_grad()
def test_attention_modules_are_called():
    """Hooks, wrappers and quantizers on `block.attn` that never run."""
    model, ids, images = make_model(), token_ids(), pixels()
    calls = Counter()
    for block in model.blocks:
        block.attn.register_forward_hook(lambda module, *_: calls.update([module.layer_idx]))
        block.register_forward_hook(lambda module, *_: calls.update([f"block {module.layer_idx}"]))

    def count():
        seen = dict(calls)
        calls.clear()
        return [seen.get(index, 0) for index in range(2)]

    model(ids, pixel_values=images, use_cache=False)
    assert count() == [2, 2], "new images: projected, then read"
    cache = model.encode_images(pixel_values=images)
    assert count() == [1, 1], "encoded only"
    model(ids, cache=cache)
    assert count() == [1, 1], "cached images"
    single = make_model(vision=False)
    for block in single.blocks:
        block.attn.register_forward_hook(lambda module, *_: calls.update([module.layer_idx]))
    single(ids, cross_attention_states=torch.randn(2, 1, 32))
    assert count() == [2, 2], "a single key"
