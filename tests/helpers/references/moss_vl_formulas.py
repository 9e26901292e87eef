"""The formulas of MOSS-VL in plain tensors, and a tiny checkpoint with random weights: as published, for any pictures.

No formula here is taken from `hf_xattn` or from transformers. What was read: SGLang's `models/moss_vl.py` and
`multimodal/processors/moss_vl.py` (Apache-2.0).
"""

import json

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast


MARKER = 61
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "hidden_act": "silu",
    "num_hidden_layers": 6,
    "cross_attention_layers": [1, 4],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_theta": 5000.0,
    "rope_scaling": {"rope_type": "default", "mrope_section": [6, 3, 3], "mrope_interleaved": True},
    "eos_token_id": None,
    "pad_token_id": 0,
}
VISION = {
    "depth": 3,
    "hidden_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 24,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
    "num_position_embeddings": 25,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0, 1],
}


def shapes():
    """Name and shape of each tensor of a checkpoint."""
    text, vision = TEXT, VISION
    width, heads, inner = text["hidden_size"], text["num_attention_heads"] * text["head_dim"], text["intermediate_size"]
    kv = text["num_key_value_heads"] * text["head_dim"]
    projections = {"q_proj": (heads, width), "k_proj": (kv, width), "v_proj": (kv, width), "o_proj": (width, heads)}
    found = {"lm_head.weight": (text["vocab_size"], width), "model.separator_token": (vision["out_hidden_size"],)}
    stack = "model.language_model"
    found |= {f"{stack}.embed_tokens.weight": (text["vocab_size"], width), f"{stack}.norm.weight": (width,)}
    for index in range(text["num_hidden_layers"]):
        layer, crosses = f"{stack}.layers.{index}", index in text["cross_attention_layers"]
        part = f"{layer}.cross_attn" if crosses else f"{layer}.self_attn"
        found |= {f"{part}.{name}.weight": shape for name, shape in projections.items()}
        found |= {f"{part}.{name}_norm.weight": (text["head_dim"],) for name in "qk"}
        found |= {f"{layer}.{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
        found |= {f"{layer}.mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
        found[f"{layer}.mlp.down_proj.weight"] = (width, inner)
        if crosses:
            found |= {f"{layer}.cross_attn_{name}_gate": (1,) for name in ("attn", "mlp")}
    width, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    sizes = {"patch_embed.proj": (width, 3, vision["temporal_patch_size"], patch, patch)}
    for index in range(vision["depth"]):
        sizes |= {f"blocks.{index}.{name}": (width,) for name in ("norm1", "norm2")}
        sizes |= {f"blocks.{index}.attn.qkv": (3 * width, width), f"blocks.{index}.attn.proj": (width, width)}
        sizes |= {f"blocks.{index}.mlp.linear_fc1": (inner, width), f"blocks.{index}.mlp.linear_fc2": (width, inner)}
    levels = 1 + len(vision["deepstack_visual_indexes"])
    joined = 4 * levels * width
    sizes |= {f"merger.norms.{index}": (width,) for index in range(levels)}
    sizes |= {"merger.linear_fc1": (joined, joined), "merger.linear_fc2": (vision["out_hidden_size"], joined)}
    for name, shape in sizes.items():
        found |= {f"model.visual.{name}.weight": shape, f"model.visual.{name}.bias": shape[:1]}
    found["model.visual.pos_embed.weight"] = (vision["num_position_embeddings"], width)
    return found


def make_checkpoint(folder, **text):
    """Writes a checkpoint with random weights, and returns them."""
    generator, weights = torch.Generator().manual_seed(0), {}
    for name, shape in shapes().items():
        value = torch.randn(shape, generator=generator, dtype=torch.float64)
        is_norm = "norm" in name and name.endswith(".weight")
        weights[name] = 1 + value / 10 if is_norm else value if name.endswith("_gate") else value * 0.2
    weights["lm_head.weight"][MARKER] = 0  # no answer holds a marker without a picture
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": "moss_vl", "architectures": ["MossVLForConditionalGeneration"], "dtype": "float64"}
    config |= {"text_config": {**TEXT, **text}, "vision_config": VISION, "image_token_id": MARKER}
    config |= {"auto_map": {"AutoConfig": "configuration_moss_vl.MossVLConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    return weights


def make_tokenizer():
    words = ["<pad>", "<unk>", "</s>", *(f"w{index}" for index in range(3, TEXT["vocab_size"]))]
    words[MARKER] = "<|image_pad|>"
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "</s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **names)
    fast.add_special_tokens({"additional_special_tokens": [words[MARKER]]})
    fast.chat_template = (
        "w10 w11 {% for message in messages %}{{ 'w12' if message.role == 'user' else 'w13' }} "
        "{{ message.content }} w14 {% endfor %}{% if add_generation_prompt %}w13 {% endif %}"
    )
    return fast


class MossVL:
    """Logits of one text with any number of pictures, of any sizes."""

    def __init__(self, weights):
        self.weights = weights

    def logits(self, ids, pictures):
        """`(tokens, vocabulary)`. `ids`: a list; `pictures`: pixels `(3, height, width)`, one for each marker."""
        text = TEXT
        places, tokens, of_tokens, owners = self._lay_out(ids, pictures)
        seen = torch.tensor([[ids[: index + 1].count(MARKER) > owner for owner in owners] for index in range(len(ids))])
        causal = torch.ones(len(ids), len(ids)).tril().bool()
        states = self.weights["model.language_model.embed_tokens.weight"][ids]
        for index in range(text["num_hidden_layers"]):
            layer = f"model.language_model.layers.{index}"
            first, second = 1.0, 1.0
            if index in text["cross_attention_layers"]:
                if not pictures:
                    continue
                sees = seen.any(dim=-1, keepdim=True)
                first, second = (
                    sees * self.weights[f"{layer}.cross_attn_{part}_gate"].tanh() for part in ("attn", "mlp")
                )
            normed = self._rms(states, f"{layer}.input_layernorm")
            if index in text["cross_attention_layers"]:
                read = self._attention(f"{layer}.cross_attn", normed, places, tokens, of_tokens, seen)
            else:
                read = self._attention(f"{layer}.self_attn", normed, places, normed, places, causal)
            states = states + first * read
            normed = self._rms(states, f"{layer}.post_attention_layernorm")
            gate, up = (normed @ self.weights[f"{layer}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            states = states + second * ((functional.silu(gate) * up) @ self.weights[f"{layer}.mlp.down_proj.weight"].T)
        return self._rms(states, "model.language_model.norm") @ self.weights["lm_head.weight"].T

    def answer(self, ids, pictures, count):
        """The next `count` tokens, each the most probable one."""
        for _ in range(count):
            ids = [*ids, int(self.logits(ids, pictures)[-1].argmax())]
        return ids[-count:]

    def _lay_out(self, ids, pictures):
        """Places `(3, tokens)` of the text and of the image tokens, the image tokens, and the picture of each."""
        left, place, of_text, of_tokens, tokens, owners = list(pictures), 0, [], [], [], []
        for token in ids:
            if token == MARKER:
                made, rows, columns = self.image_tokens(left.pop(0))
                grid = [(place, place + row, place + column) for row in range(rows) for column in range(columns)]
                owners += [len(pictures) - len(left) - 1] * len(made)
                place += max(rows, columns)  # of the separator and the marker
                of_tokens += [*grid, (place,) * 3]
                tokens.append(made)
            of_text.append((place,) * 3)
            place += 1
        joined = torch.cat(tokens) if tokens else None
        return torch.tensor(of_text).T, joined, torch.tensor(of_tokens).reshape(-1, 3).T, owners

    def _attention(self, part, states, places, others, of_others, sees):
        heads, kv_heads, width = TEXT["num_attention_heads"], TEXT["num_key_value_heads"], TEXT["head_dim"]
        query, key, value = (
            (given @ self.weights[f"{part}.{name}_proj.weight"].T).unflatten(-1, (-1, width)).transpose(0, 1)
            for name, given in (("q", states), ("k", others), ("v", others))
        )
        query = turn(self._rms(query, f"{part}.q_norm"), places)
        key = turn(self._rms(key, f"{part}.k_norm"), of_others)
        key, value = (each.repeat_interleave(heads // kv_heads, dim=0) for each in (key, value))
        scores = (query @ key.transpose(1, 2) / width**0.5).masked_fill(~sees, float("-inf"))
        weights = scores.softmax(dim=-1).nan_to_num()  # text that sees nothing
        return (weights @ value).transpose(0, 1).flatten(1) @ self.weights[f"{part}.o_proj.weight"].T

    def _rms(self, states, name):
        mean = states.pow(2).mean(dim=-1, keepdim=True)
        return states / (mean + TEXT["rms_norm_eps"]).sqrt() * self.weights[f"{name}.weight"]

    def image_tokens(self, pixels):
        """`(tokens + 1, width)` of a picture, the separator last, and the rows and columns of tokens."""
        levels = self._tower(pixels)  # (rows, columns, width) of patches
        normed = torch.cat([self._norm(level, f"merger.norms.{index}") for index, level in enumerate(levels)], dim=-1)
        rows, columns = (size // 2 for size in normed.shape[:2])
        tokens = [
            normed[2 * row : 2 * row + 2, 2 * column : 2 * column + 2].flatten()
            for row in range(rows)
            for column in range(columns)
        ]
        hidden = functional.gelu(self._linear(torch.stack(tokens), "merger.linear_fc1"))
        made = self._linear(hidden, "merger.linear_fc2")
        return torch.cat([made, self.weights["model.separator_token"][None]]), rows, columns

    def _tower(self, pixels):
        """The last states of the patches `(rows, columns, width)`, and those of the layers that are chosen."""
        patch, width = VISION["patch_size"], VISION["hidden_size"]
        kernel = self.weights["model.visual.patch_embed.proj.weight"].sum(dim=2)  # a still picture
        embedded = functional.conv2d(
            pixels.double()[None], kernel, self.weights["model.visual.patch_embed.proj.bias"], stride=patch
        )
        side = int(VISION["num_position_embeddings"] ** 0.5)
        table = self.weights["model.visual.pos_embed.weight"].T.reshape(1, width, side, side)
        table = functional.interpolate(table, embedded.shape[2:], mode="bilinear", align_corners=True)
        states = (embedded + table)[0].permute(1, 2, 0)
        rows, columns = states.shape[:2]
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        states, kept = states.flatten(0, 1), []
        for index in range(VISION["depth"]):
            states = states + self._vision_attention(self._norm(states, f"blocks.{index}.norm1"), index, places)
            normed = self._linear(self._norm(states, f"blocks.{index}.norm2"), f"blocks.{index}.mlp.linear_fc1")
            states = states + self._linear(
                functional.gelu(normed, approximate="tanh"), f"blocks.{index}.mlp.linear_fc2"
            )
            if index in VISION["deepstack_visual_indexes"]:
                kept.append(states)
        return [each.unflatten(0, (rows, columns)) for each in (states, *kept)]

    def _vision_attention(self, states, index, places):
        heads, width = VISION["num_heads"], VISION["hidden_size"] // VISION["num_heads"]
        joined = self._linear(states, f"blocks.{index}.attn.qkv").unflatten(-1, (3, heads, width))
        query, key, value = joined.permute(1, 2, 0, 3)
        rates = 10000.0 ** (-torch.arange(0, width // 2, 2, dtype=torch.float64) / (width // 2))
        angles = torch.cat([places[:, :1] * rates, places[:, 1:] * rates], dim=-1)
        query, key = rotate(query, angles), rotate(key, angles)
        weights = (query @ key.transpose(1, 2) / width**0.5).softmax(dim=-1)
        return self._linear((weights @ value).transpose(0, 1).flatten(1), f"blocks.{index}.attn.proj")

    def _linear(self, states, name):
        name = f"model.visual.{name}"
        return states @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _norm(self, states, name):
        weight, bias = (self.weights[f"model.visual.{name}.{part}"] for part in ("weight", "bias"))
        return functional.layer_norm(states, states.shape[-1:], weight, bias, eps=1e-6)


def turn(states, places):
    """XRoPE: frequencies take turns at the axes frame, row, column; what is left over is of the frame."""
    _, rows, columns = TEXT["rope_scaling"]["mrope_section"]
    pairs = TEXT["head_dim"] // 2
    axes = [1 if i % 3 == 1 and i < 3 * rows else 2 if i % 3 == 2 and i < 3 * columns else 0 for i in range(pairs)]
    rates = TEXT["rope_theta"] ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    return rotate(states, places[axes].T * rates)


def rotate(states, angles):
    """Turns channel i with channel i + half, `(heads, tokens, width)`, by `angles` `(tokens, half)`."""
    first, second = states.chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)
