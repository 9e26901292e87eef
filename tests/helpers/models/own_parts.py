"""Parts that a user of the package could write, registered as `pooling`, `offset_sigmoid` and `turning`."""

import torch
from torch import nn

from hf_xattn import register_connector, register_gate, register_position


class PoolingConnector(nn.Module):
    """The mean of each `pool` tokens, scaled and projected. It has a weight and a buffer of its own."""

    def __init__(self, config):
        super().__init__()
        options = config.connector_options or {}
        self.pool = options.get("pool", 2)
        self.scale = nn.Parameter(torch.full((config.vision_config.hidden_size,), 1.5))
        self.conv = nn.Conv1d(config.vision_config.hidden_size, config.cross_attention_config.context_size, self.pool)
        self.register_buffer("shift", torch.arange(config.vision_config.hidden_size) / 100, persistent=False)
        nn.init.constant_(self.conv.bias, 0.25)

    def forward(self, features):
        flat = (features * self.scale + self.shift).flatten(0, -3).transpose(1, 2)
        pooled = nn.functional.conv1d(flat, self.conv.weight, self.conv.bias, stride=self.pool)
        return pooled.transpose(1, 2).unflatten(0, features.shape[:-2])


class SigmoidGate(nn.Module):
    """MoshiVis's gate, with the text in its input too: `sigmoid(mlp(update + text) - offset) * update`."""

    def __init__(self, config):
        super().__init__()
        self.offset = (config.gate_options or {}).get("offset", 4.0)
        self.down = nn.Linear(config.hidden_size, 4, bias=False)
        self.up = nn.Linear(4, config.hidden_size, bias=False)
        nn.init.constant_(self.up.weight, 0.125)

    def forward(self, update, hidden_states):
        return torch.sigmoid(self.up(torch.relu(self.down(update + hidden_states))) - self.offset) * update


class ScaleGate(nn.Module):
    """A gate that starts at zero."""

    starts_at_zero = True

    def __init__(self, config):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(config.hidden_size))

    def forward(self, update, hidden_states):
        return self.scale * update


class TurningPosition(nn.Module):
    """A rotary embedding whose frequencies are weights."""

    def __init__(self, config):
        super().__init__()
        self.rate = (config.position_options or {}).get("rate", 0.5)
        self.frequencies = nn.Parameter(self.rate ** torch.arange(1, config.head_dim // 2 + 1))

    def forward(self, states, places, of):
        angle = (places if of == "keys" else 2 * places)[..., None, None] * self.frequencies
        first, second = states.chunk(2, dim=-1)
        parts = first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()
        return torch.cat(parts, dim=-1)


TURNING = "turning"

register_connector("pooling", PoolingConnector)
register_gate("offset_sigmoid", SigmoidGate)
register_gate("scale", ScaleGate)
register_position(TURNING, TurningPosition)

OWN = {
    "connector_type": "pooling",
    "connector_options": {"pool": 4},
    "cross_attention_config": {
        "gate": "offset_sigmoid",
        "gate_options": {"offset": 3.0},
        "position": TURNING,
        "position_options": {"rate": 0.75},
    },
}
