"""Parts of MOSS-VL for one image in each text: its vision tower, connector, rotary position encoding and processor.

In MOSS-VL, the position of an image is counted in the text: the keys of the image begin at the position of its marker,
and the text after the image goes on after the positions of the image. In this package, a position encoding gets the
position of an image token only within its image. So the image has to be at one fixed position, which `position_options`
names, and `position_ids` have to count the image, as those of `MossVLProcessor` do. Everything else is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoProcessor
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

import hf_xattn


NAME = "moss_vl"
MARK = torch.int32  # dtype of positions that count the image; other positions are int64


class MossVLTowerConfig(Qwen3VLVisionConfig):
    """Configuration of a Qwen3-VL tower, with the only size of images `[height, width]` that the model reads."""

    model_type = "moss_vl_tower"

    image_size: list | None = None

    @property
    def grid(self) -> list[int]:
        """Rows and columns of the image tokens of an image."""
        side = self.patch_size * self.spatial_merge_size
        if self.image_size is None or len(self.image_size) != 2 or any(each % side for each in self.image_size):
            raise ValueError(
                f"Expected `image_size` [height, width] of multiples of {side}, the side of an image token, got "
                f"{self.image_size}."
            )
        return [each // side for each in self.image_size]


class MossVLTower(Qwen3VLVisionModel):
    """The layers of Qwen3-VL's tower, for whole images `(images, channels, height, width)`. It merges no patches.

    In the output, the patches that become one image token are next to each other.
    """

    config_class = MossVLTowerConfig
    config: Any
    merger: Any
    main_input_name = "pixel_values"

    def __init__(self, config: MossVLTowerConfig):
        if config.deepstack_visual_indexes:
            got = config.deepstack_visual_indexes
            raise ValueError(f"Expected no `deepstack_visual_indexes`, which `vision_feature_layer` names, got {got}.")
        super().__init__(config)
        self.merger = nn.Identity()  # the connector merges

    def forward(self, pixel_values: torch.Tensor, output_hidden_states: bool | None = None) -> BaseModelOutput:
        size, expected = list(pixel_values.shape[-2:]), self.config.image_size
        if size != expected:
            raise ValueError(f"Expected pictures of {expected} (height, width), as chosen for the import, got {size}.")
        patch, merge = self.config.patch_size, self.config.spatial_merge_size
        images, (rows, columns) = len(pixel_values), self.config.grid
        cut = pixel_values.reshape(images, -1, rows, merge, patch, columns, merge, patch)
        patches = cut.permute(0, 2, 5, 3, 6, 1, 4, 7)[..., None, :, :]
        frames = patches.repeat_interleave(self.config.temporal_patch_size, dim=-3)  # an image has equal frames
        grid = torch.tensor([[1, rows * merge, columns * merge]] * images, device=pixel_values.device)
        output: Any = super().forward(
            frames.reshape(images * rows * columns * merge**2, -1), grid, output_hidden_states=output_hidden_states
        )
        states = output.hidden_states
        return BaseModelOutput(
            last_hidden_state=output.last_hidden_state.unflatten(0, (images, -1)),
            hidden_states=None if states is None else tuple(each.unflatten(0, (images, -1)) for each in states),
        )


class MossVLMerger(nn.Module):
    """Joins the chosen layers of the tower and neighbouring patches to image tokens, and adds a separator at the end.

    `vision_feature_layer` names the layers, the last one first. Each layer has a norm.
    """

    def __init__(self, config):  # an XAttnConfig
        super().__init__()
        tower = config.vision_config
        self.levels, self.patches = len(config.vision_feature_layer), tower.spatial_merge_size**2
        context, joined = config.cross_attention_config.context_size, self.patches * self.levels * tower.hidden_size
        self.norms = nn.ModuleList(nn.LayerNorm(tower.hidden_size, eps=1e-6) for _ in range(self.levels))
        self.linear_fc1 = nn.Linear(joined, joined)
        self.linear_fc2 = nn.Linear(joined, context)
        self.separator = nn.Parameter(torch.zeros(context))

    def forward(self, features):  # (..., tokens, levels * width)
        levels = zip(self.norms, features.chunk(self.levels, dim=-1))
        normed = torch.cat([norm(level) for norm, level in levels], dim=-1)
        joined = normed.unflatten(-2, (-1, self.patches)).flatten(-2)
        tokens = self.linear_fc2(nn.functional.gelu(self.linear_fc1(joined)))
        separator = self.separator.to(tokens.dtype).expand(*tokens.shape[:-2], 1, -1)
        return torch.cat([tokens, separator], dim=-2)


class MossVLRotary(nn.Module):
    """The rotary position encoding in three axes (XRoPE) of an image at a known position of its text.

    `position_options` has `place`, the number of text tokens in front of the image marker; `grid`, the rows and columns
    of the image tokens; `theta`; and `sections`, the number of frequencies for frame, rows and columns. A token in row
    y and column x has the position `(place, place + y, place + x)`. The separator has `place + max(grid)` on all axes.
    """

    def __init__(self, config):  # a CrossAttentionConfig
        super().__init__()
        options = config.position_options
        self.place, self.theta, self.sections = options["place"], options["theta"], options["sections"]
        self.rows, self.columns = options["grid"]
        if sum(self.sections) * 2 != config.head_dim:
            raise ValueError(
                f"Expected `sections` of {config.head_dim // 2} frequencies, half of `head_dim`, got {self.sections}."
            )

    def forward(self, states, places, of):  # (rows, tokens, heads, head_dim), and (rows or 1, tokens)
        if of == "keys":
            axes = self._of_picture(states, places)
        elif places.dtype == MARK:
            axes = places[..., None].expand(*places.shape, 3)
        else:
            raise ValueError(
                f"Expected `position_ids` of dtype {MARK}, which count the picture, as `MossVLProcessor` or "
                f"`positions_of_text` make them of the whole text, got none, or {places.dtype}. Without them the text "
                "behind the picture would stand at other places than in MOSS-VL."
            )
        pairs = torch.arange(states.shape[-1] // 2, device=states.device)
        axis = pairs % 3
        axis = torch.where((axis > 0) & (pairs >= 3 * torch.tensor(self.sections, device=pairs.device)[axis]), 0, axis)
        # The angles are float32 in a model of any dtype, because bfloat16 does not hold all integers above 256.
        angles = axes[..., axis] * self.theta ** (-pairs.float() / len(pairs))
        angles = torch.cat([angles, angles], dim=-1)[..., None, :]
        first, second = states.chunk(2, dim=-1)
        return states * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()

    def _of_picture(self, states, places):
        """Returns the positions of the keys of one image, `(1, tokens, 3)`."""
        tokens = self.rows * self.columns + 1
        if states.shape[1] > 1 and states.shape[1] != tokens:  # a single token stands in for images of other processes
            raise ValueError(
                f"Expected one picture ({tokens} image tokens) in each row, got {states.shape[1]} tokens. A second one "
                "would stand at another place of the text, which this code does not know. Rows without a picture go "
                "into a batch of their own."
            )
        last = places == tokens - 1
        axes = torch.stack([torch.zeros_like(places), places // self.columns, places % self.columns], dim=-1)
        return self.place + torch.where(last[..., None], max(self.rows, self.columns), axes)


def positions_of_text(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, image_token_id: int, place: int, side: int
) -> torch.Tensor | None:
    """Returns `position_ids` `(batch, text_len)` of whole texts, which count their image; None if no text has one.

    The marker takes `side + 1` positions and has the last of them. `side` is the longer side of the grid.

    Raises:
        ValueError: for a text with several markers, or with a marker behind more or fewer than `place` tokens.
    """
    real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    markers = (input_ids == image_token_id) & (real != 0)
    if not bool(markers.any()):
        return None
    words = ((real != 0) & ~markers).long()
    before = words.cumsum(dim=-1) - words
    for row, found in enumerate(markers):
        at = before[row, found].tolist()
        if at and at != [place]:
            raise ValueError(
                f"Expected at most one picture in a text, behind {place} tokens (`place`, chosen for the import), got "
                f"pictures behind {at} tokens in row {row}."
            )
    behind = markers.long().cumsum(dim=-1) * (side + 1) - markers.long()
    return torch.where(real != 0, before + behind, 0).to(MARK)


class MossVLProcessor(hf_xattn.XAttnProcessor):
    """An `XAttnProcessor` that also makes the `position_ids` of texts with an image. `for_model` makes one.

    Pass it the whole text, also if a cache holds the beginning of the text. It is not for training.

    Args:
        place, side (`int`): See [`positions_of_text`].
    """

    def __init__(
        self,
        image_processor=None,
        tokenizer=None,
        chat_template=None,
        image_token: str | None = None,
        place: int = 0,
        side: int = 1,
        **kwargs,
    ):
        super().__init__(image_processor, tokenizer, chat_template, image_token=image_token, **kwargs)
        if self.image_token_id is None:
            raise ValueError("`image_token` is required: it marks the picture in the text.")
        self.place, self.side = place, side

    @classmethod
    def for_model(cls, model: Any, image_processor: Any, tokenizer: Any, chat_template: str | None = None):
        """Makes the processor of an imported model. Raises a `ValueError` for an `image_processor` of another size."""
        size, expected = image_processor.size, model.config.vision_config.image_size
        if [size["height"], size["width"]] != expected:
            raise ValueError(f"Expected `image_processor` to make pictures of {expected} (height, width), got {size}.")
        options = model.config.cross_attention_config.position_options
        token = tokenizer.convert_ids_to_tokens(model.config.image_token_id)
        places = {"place": options["place"], "side": max(options["grid"])}
        return cls(image_processor, tokenizer, chat_template, image_token=token, **places)

    def __call__(self, images: Any = None, text: Any = None, *args, **kwargs):
        marker: Any = self.image_token_id
        made = super().__call__(images, text, *args, **kwargs)
        ids = made.get("input_ids")
        if ids is not None:
            if not isinstance(ids, torch.Tensor):
                raise ValueError(f"Expected `return_tensors='pt'` for MOSS-VL, got {type(ids).__name__}.")
            if "offset_mapping" in made:
                raise ValueError(
                    "Expected a call without `return_offsets_mapping`, which collators of training and masks of "
                    "answers ask for: they pad texts anew, and not their `position_ids`."
                )
            mask = made.get("attention_mask")
            positions = positions_of_text(ids, mask, marker, self.place, self.side)
            if positions is not None:
                made["position_ids"] = positions
        return made


hf_xattn.register_connector(NAME, MossVLMerger, exist_ok=True)
hf_xattn.register_position(NAME, MossVLRotary, exist_ok=True)
MossVLTowerConfig.register_for_auto_class()  # this file is saved beside the weights
MossVLTower.register_for_auto_class("AutoModel")
AutoConfig.register(MossVLTowerConfig.model_type, MossVLTowerConfig, exist_ok=True)
AutoModel.register(MossVLTowerConfig, MossVLTower, exist_ok=True)
AutoProcessor.register(MossVLTowerConfig, MossVLProcessor, exist_ok=True)  # finds it by its name
