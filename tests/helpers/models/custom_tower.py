"""A vision tower from outside transformers, as checkpoints bring them along."""

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput


class CustomTowerConfig(PreTrainedConfig):
    model_type = "custom_tower"

    hidden_size: int = 24
    patch_size: int = 8


class CustomTower(PreTrainedModel):
    config_class = CustomTowerConfig
    main_input_name = "pixel_values"

    def __init__(self, config):
        super().__init__(config)
        self.patches = nn.Conv2d(3, config.hidden_size, config.patch_size, config.patch_size)
        self.post_init()

    def forward(self, pixel_values, **kwargs):
        return BaseModelOutput(last_hidden_state=self.patches(pixel_values).flatten(2).transpose(1, 2))
