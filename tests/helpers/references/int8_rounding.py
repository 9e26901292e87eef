"""Rounding to int8 by hand, and models that round so without a cache in int8."""

import numpy as np
import torch

from helpers.models.tiny_models import make_model


def by_hand(states):
    """Steps, scales and rounded values of `(..., width)`, as float32 arrays. Every vector has its own scale."""
    vectors = states.detach().float().numpy()
    steps, scales = np.zeros_like(vectors), np.zeros_like(vectors[..., :1])
    for place in np.ndindex(*vectors.shape[:-1]):
        scale = np.abs(vectors[place]).max() / np.float32(127)
        if scale:
            steps[place], scales[place] = np.rint(vectors[place] / scale), scale
    return steps, scales, steps * scales


def rounding(model):
    """Makes a model round every key and value that it projects. Its answers without a cache are those expected with
    one in int8.
    """

    def rounded(project):
        def projected(*args, **kwargs):
            return tuple(torch.tensor(by_hand(each)[2]).to(each.dtype) for each in project(*args, **kwargs))

        return projected

    for block in model.blocks:
        block.attn.project_key_value = rounded(block.attn.project_key_value)
    return model


def both(make=make_model, **kwargs):
    """The same model twice: for caches in int8, and as the reference that rounds by hand."""
    return make(**kwargs), rounding(make(**kwargs))
