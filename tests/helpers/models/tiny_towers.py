"""Configurations of tiny vision towers: those that read images of one size, and those that read any."""

from transformers import (
    Aimv2VisionConfig,
    BeitConfig,
    CLIPVisionConfig,
    ConvNextConfig,
    Dinov2Config,
    DPTConfig,
    IJepaConfig,
    ResNetConfig,
    SwinConfig,
    ViTConfig,
)

from helpers.models.tiny_models import make_text, vision_config
from hf_xattn import XAttnConfig, XAttnForConditionalGeneration


SMALL_TOWER = {
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}

ONE_SIZE = {
    "siglip": vision_config,
    "clip": lambda: CLIPVisionConfig(**SMALL_TOWER),
    "vit": lambda: ViTConfig(**SMALL_TOWER),
    "ijepa": lambda: IJepaConfig(**SMALL_TOWER),
    "aimv2": lambda: Aimv2VisionConfig(**SMALL_TOWER),
    "swin_absolute": lambda: SwinConfig(
        image_size=32,
        patch_size=4,
        embed_dim=12,
        depths=[1],
        num_heads=[2],
        window_size=4,
        use_absolute_embeddings=True,
    ),
}

ANY_SIZE = {
    "dinov2": lambda: Dinov2Config(**{**SMALL_TOWER, "mlp_ratio": 2}),
    "dpt": lambda: DPTConfig(**SMALL_TOWER, backbone_out_indices=[0, 0, 0, 0]),
    "beit": lambda: BeitConfig(**{**SMALL_TOWER, "num_hidden_layers": 4}, out_indices=[1, 2, 3, 4], drop_path_rate=0.0),
    "swin": lambda: SwinConfig(image_size=32, patch_size=4, embed_dim=12, depths=[1], num_heads=[2], window_size=4),
    "convnext": lambda: ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
    "resnet": lambda: ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
}


def model_with(config):
    text = make_text()
    return XAttnForConditionalGeneration(XAttnConfig(text_config=text.config, vision_config=config), text).eval()
