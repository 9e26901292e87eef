"""Models with an image store, and what they run."""

from collections import Counter

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from helpers.models import own_parts
from helpers.models.marked_models import close, generate
from helpers.models.tiny_models import PERCEIVER


NUM_TOKENS = 16
IMAGE_BYTES = 2 * 2 * NUM_TOKENS * 32 * 4 // 2  # blocks, K and V, tokens, 2 of 4 heads of width 8, float32


def with_store(model, max_bytes=2**30):
    model.enable_image_store(max_bytes)
    return model


class Counted:
    """Counts the images that the vision tower reads, and the calls of K/V projections."""

    def __init__(self, model):
        self.model = model
        self.counts = Counter()

    def __enter__(self):
        tower = self.model.model.vision_tower
        self.hooks = []
        if tower is not None:
            count = lambda module, args, kwargs: self.counts.update(images=len(kwargs["pixel_values"]))  # noqa: E731
            self.hooks.append(tower.register_forward_pre_hook(count, with_kwargs=True))
        for block in self.model.blocks:
            for projection in (block.attn.k_proj, block.attn.v_proj):
                self.hooks.append(projection.register_forward_hook(lambda *_: self.counts.update(projections=1)))
        return self.counts

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()


def asked(model, ids, **kwargs):
    """Tokens and logits of a greedy answer."""
    return generate(model, ids, return_dict_in_generate=True, output_logits=True, **kwargs)


def assert_same(first, second, equal=True):
    assert torch.equal(first.sequences, second.sequences)
    for mine, theirs in zip(first.logits, second.logits, strict=True):
        assert torch.equal(mine, theirs) if equal else close(mine, theirs)


MODELS = {
    "plain": {},
    "quiet": {"cross_attention_config": {"quiet_softmax": True}},
    "qk_norm": {"cross_attention_config": {"qk_norm": True, "num_key_value_heads": 1}},
    "position_bias": {"cross_attention_config": {"position_bias": True}},
    "position": {"cross_attention_config": {"position": own_parts.TURNING}},
    "perceiver": {
        "connector_type": "perceiver",
        "perceiver_config": PERCEIVER,
        "cross_attention_config": {"context_size": 24},
    },
    "default_features": {"vision_feature_select_strategy": "default"},
}


def damaged(file, change, metadata=None):
    """The file again, with other tensors or metadata."""
    with safe_open(file, "pt") as opened:
        tensors, kept = {name: opened.get_tensor(name) for name in opened.keys()}, dict(opened.metadata())
    change(tensors)
    kept.update(metadata or {})
    other = file.with_name("damaged.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, other, kept)
    return other
