"""A gradient for every weight of a vision tower that trains.

The images are the tower's `last_hidden_state`. What comes after it gets no gradient from them: CLIP's last norm, the
poolers of ViT and BEiT, the heads of SigLIP and AIMv2, the mask token of DINOv2. DDP waits for the gradient of every
weight that learns, and refuses the next step. So these weights get a gradient of zero.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from ..utils.distributed import has_units


MASK_TOKEN = "mask_token"


def states_for_all_weights(tower: nn.Module, output: BaseModelOutput) -> torch.Tensor:
    """The `last_hidden_state` of a tower. If the tower trains, it depends on all its weights."""
    states = output.last_hidden_state
    assert states is not None
    if not (tower.training and torch.is_grad_enabled()):
        return states
    unused = [output.get("pooler_output"), *_mask_tokens(tower)]
    for each in unused:
        if each is not None and each.requires_grad:
            # Of no element: a zero also where a value is infinite.
            states = states + each.flatten()[:0].sum().to(states.dtype)
    return states


def _mask_tokens(tower: nn.Module) -> list[nn.Parameter]:
    """Embeddings of masked patches, which no call asks for. FSDP does not need them, and may keep a part of each."""
    if has_units(tower):
        return []
    return [weight for name, weight in tower.named_parameters() if name.rpartition(".")[2] == MASK_TOKEN]
