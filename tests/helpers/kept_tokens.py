"""An independent reference for `keep_image_tokens`: a choice by loops, and later blocks that see a hand-made mask of all tokens."""

import contextlib
import math

import torch
from marked_models import states_of

from hf_xattn import GatedCrossAttentionBlock


def chosen_by_hand(weights, text, real, seen, sizes, share, owner):
    """`(R, N)`, True for the tokens that are kept: the union of each head's first tokens, as far as the share allows.

    Args:
        weights: `(B, heads, T, N)`, of the first block.
        text: `(B, T)`, False = padding.
        real: `(R, N)`, False = padding.
        seen: `(B, T, N)`, what each text token sees.
        sizes: tokens of each image.
        owner: the image row of each text row, -1 for none.
    """
    kept = torch.zeros_like(real)
    for row in range(real.shape[0]):
        mine = [index for index, image_row in enumerate(owner) if image_row == row]
        heads = torch.stack([weights[index][:, text[index]].amax(1) for index in mine]).amax(0)  # (heads, N)
        looked_at = torch.stack([seen[index][text[index]].any(0) for index in mine]).any(0)
        first = 0
        for size in sizes:
            tokens = [token for token in range(first, first + size) if real[row, token]]
            first += size
            if not tokens:
                continue
            if not any(looked_at[token] for token in tokens):
                kept[row, tokens] = True
                continue
            count = max(1, math.ceil(share * len(tokens) - 1e-9))
            rankings = [sorted(tokens, key=lambda token: -float(head[token])) for head in heads]
            union = set()
            for place in range(len(tokens)):
                more = {ranking[place] for ranking in rankings} - union
                more = sorted(more, key=lambda token: -float(heads[:, token].sum()))[: count - len(union)]
                union |= set(more)
            kept[row, sorted(union)] = True
    return kept


@contextlib.contextmanager
def later_blocks_see(model, states, sees):
    """Blocks after the first get `states` `(B, N, width)` and the mask `sees` `(B, T, N)`, as if they stood alone."""

    def replaced(block):
        def forward(hidden_states, cross_attention):
            cross_attention.recorder.weights[block.layer_idx] = None
            return GatedCrossAttentionBlock.forward(block, hidden_states, states, sees)

        return forward

    for block in model.blocks[1:]:
        block.forward = replaced(block)
    try:
        yield
    finally:
        for block in model.blocks[1:]:
            del block.forward


class Case:
    """A call, and what its text sees.

    Args:
        model, inputs: of a forward.
        sees: `(B, T, N)` without padding images; by default everything real.
        real: `(R, N)`; by default everything.
        owner: the image row of each text row; by default in order.
        features: `(R, num_images, tokens, width)`; by default those of the inputs.
    """

    def __init__(self, model, inputs, sees=None, real=None, owner=None, features=None):
        self.model, self.inputs = model, inputs
        given = inputs.get("cross_attention_states") if features is None else features
        images = states_of(model, inputs["pixel_values"]) if given is None else given
        images = images if images.dim() == 4 else images[:, None]
        self.sizes = (images.shape[2],) * images.shape[1]
        self.states = images.flatten(1, 2)
        ids = inputs["input_ids"]
        rows = self.states.shape[0]
        self.owner = [row * rows // len(ids) for row in range(len(ids))] if owner is None else owner
        self.real = torch.ones(self.states.shape[:2], dtype=torch.bool) if real is None else real
        of_text = self.real[self.owner] & (torch.tensor(self.owner) >= 0)[:, None]
        sees = torch.ones(*ids.shape, self.states.shape[1], dtype=torch.bool) if sees is None else sees
        self.sees = sees & of_text[:, None]
        self.text = inputs.get("attention_mask", torch.ones_like(ids)) != 0

    @torch.no_grad()
    def kept(self, share):
        """`(R, N)`, by hand."""
        weights = self.model(**self.inputs, use_cache=False, output_attentions=True).cross_attentions[0]
        return chosen_by_hand(weights, self.text, self.real, self.sees, self.sizes, share, self.owner)

    @torch.no_grad()
    def expected(self, share):
        """Logits, if later blocks see the tokens that are kept."""
        sees = self.sees & self.kept(share)[self.owner][:, None]
        with later_blocks_see(self.model, self.states[self.owner], sees):
            return self.model(**self.inputs, use_cache=False).logits

    @torch.no_grad()
    def continued(self, share, steps):
        """Greedy tokens after the prompt, without a cache. All of the text sees everything real."""
        kept, ids = self.kept(share)[self.owner], self.inputs["input_ids"]
        inputs, prompt = dict(self.inputs), ids.shape[1]
        for _ in range(steps):
            inputs["input_ids"] = ids
            if "attention_mask" in inputs:
                inputs["attention_mask"] = torch.cat(
                    [self.text, torch.ones(len(ids), ids.shape[1] - prompt, dtype=torch.bool)], dim=1
                )
                positions = (inputs["attention_mask"].long().cumsum(-1) - 1).clamp(min=0)
                inputs["position_ids"] = positions
            sees = (self.real[self.owner] & kept)[:, None].expand(-1, ids.shape[1], -1)
            with later_blocks_see(self.model, self.states[self.owner], sees):
                logits = self.model(**inputs, use_cache=False).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        return ids


def kept_of(cache, num_tokens):
    """`(R, N)`, the tokens that a cache keeps for later blocks."""
    kept = cache.cross_attention_cache.layout.kept
    mask = torch.ones_like(kept.index, dtype=torch.bool) if kept.mask is None else kept.mask
    result = torch.zeros(len(kept.index), num_tokens, dtype=torch.bool)
    for row in range(len(kept.index)):
        result[row, kept.index[row][mask[row]]] = True
    return result


def lengths(cache):
    """Number of tokens in each block's keys."""
    return [layer.keys.shape[2] for layer in cache.cross_attention_cache.layers]
