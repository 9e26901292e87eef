"""Published designs as parts of your own: MOSS-VL's connector and rotary position encoding, and MoshiVis's gate."""

import torch
from torch import nn

import hf_xattn


class GridRotary(nn.Module):
    """A rotary position encoding in three axes: the frame, the row and the column of an image token.

    A text token has its position on all three axes. As in MOSS-VL, and in the self-attention of Qwen3-VL, the
    frequencies are given to the axes in turn, and the remaining ones belong to the frame. But here an image, or a video
    as one image of many frames, begins at frame 0 wherever it stands in the text, because it is encoded without a text.

    `grid` is that of the image tokens. After `DeepstackMerger`, it has half as many rows and columns as that of the
    tower. `prefix` is the number of tokens in front of the grid, such as a class token.
    """

    def __init__(self, config):  # a CrossAttentionConfig
        super().__init__()
        self.rows, self.columns = config.position_options["grid"]
        self.prefix = config.position_options.get("prefix", 0)
        self.theta = config.position_options.get("theta", 10000.0)
        self.of_rows = config.position_options.get("of_rows", config.head_dim // 6)  # frequencies; as many of columns

    def forward(self, states, places, of):  # (rows, tokens, heads, head_dim), and (rows or 1, tokens)
        places = places[..., None].expand(*places.shape, 3)
        if of == "keys":
            place, image = (places[..., 0] - self.prefix).clamp(min=0), self.rows * self.columns
            places = torch.stack([place // image, place % image // self.columns, place % self.columns], dim=-1)
        pairs = torch.arange(states.shape[-1] // 2, device=states.device)
        axes = torch.where(pairs < 3 * self.of_rows, pairs % 3, 0)
        # The angles are float32 in a model of any dtype, because bfloat16 does not hold all integers above 256.
        angles = places[..., axes] * self.theta ** (-pairs.float() / len(pairs))
        angles = torch.cat([angles, angles], dim=-1)[..., None, :]
        first, second = states.chunk(2, dim=-1)
        return states * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()


class MoshiVisGate(nn.Module):
    """`sigmoid(mlp(update) - offset) * update`. The result of the attention opens it; at first it is nearly closed."""

    def __init__(self, config):  # a CrossAttentionConfig
        super().__init__()
        options = config.gate_options or {}
        self.offset = options.get("offset", 4.0)
        width, inner = config.hidden_size, options.get("width", config.hidden_size // 8)
        self.mlp = nn.Sequential(nn.Linear(width, inner, bias=False), nn.ReLU(), nn.Linear(inner, width, bias=False))

    def forward(self, update, hidden_states):  # both (batch, text_len, hidden_size)
        return torch.sigmoid(self.mlp(update) - self.offset) * update


class DeepstackMerger(nn.Module):
    """Joins several layers of the tower and each 2 x 2 neighbouring patches to one image token, as MOSS-VL does.

    `vision_feature_layer` names the layers, each of which has a norm.
    """

    def __init__(self, config):  # an XAttnConfig
        super().__init__()
        self.levels, width = len(config.vision_feature_layer), config.vision_config.hidden_size
        self.rows, self.columns = config.connector_options["grid"]
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-6) for _ in range(self.levels))
        joined = 4 * self.levels * width
        self.fc1 = nn.Linear(joined, joined)
        self.fc2 = nn.Linear(joined, config.cross_attention_config.context_size)

    def forward(self, features):  # (..., tokens, levels * width)
        levels = zip(self.norms, features.chunk(self.levels, dim=-1))
        normed = torch.cat([norm(level) for norm, level in levels], dim=-1)
        grid = normed.unflatten(-2, (self.rows // 2, 2, self.columns // 2, 2))
        patches = grid.transpose(-4, -3).flatten(-3).flatten(-3, -2)  # the four of a token stand together
        return self.fc2(nn.functional.gelu(self.fc1(patches)))


hf_xattn.register_connector("deepstack", DeepstackMerger)
hf_xattn.register_position("grid_rotary", GridRotary)
hf_xattn.register_gate("moshivis", MoshiVisGate)
