"""A connector and a gate of your own, registered under names that a configuration can choose."""

import torch
from torch import nn

import hf_xattn


class Merging(nn.Module):
    """Turns each `merge` neighbouring features of the vision tower into one image token."""

    def __init__(self, config):  # an XAttnConfig
        super().__init__()
        self.merge = config.connector_options["merge"]
        width = config.vision_config.hidden_size * self.merge
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, config.cross_attention_config.context_size)

    def forward(self, features):  # (..., tokens, vision_hidden_size)
        merged = features.unflatten(-2, (-1, self.merge)).flatten(-2)
        return self.project(self.norm(merged))  # (..., tokens / merge, context_size)


class TextGate(nn.Module):
    """Lets each text token decide how much of a branch it adds: `sigmoid(text @ weight + bias) * update`."""

    def __init__(self, config):  # a CrossAttentionConfig
        super().__init__()
        self.score = nn.Linear(config.hidden_size, 1)
        nn.init.zeros_(self.score.weight)
        nn.init.constant_(self.score.bias, config.gate_options["bias"])

    def forward(self, update, hidden_states):  # both (batch, text_len, hidden_size)
        return torch.sigmoid(self.score(hidden_states)) * update


hf_xattn.register_connector("merging", Merging)
hf_xattn.register_gate("text", TextGate)
