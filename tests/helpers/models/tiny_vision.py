"""Every vision tower of transformers, small enough to build and run in a fraction of a second."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from hf_xattn.images.tower import build_tower, image_size_of


# Sizes of a small model, under the names that configurations use. A configuration takes those that it has.
TINY: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
    # Detectors.
    "d_model": 32,
    "num_queries": 6,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_hidden_dim": 32,
}
STAGES = {"hidden_sizes": [8, 8, 12, 16], "depths": [1, 1, 1, 1]}
PYRAMID = STAGES | {"num_attention_heads": [1, 1, 2, 2], "mlp_ratios": [2, 2, 2, 2]}
WINDOWS = {"patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}
RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "layer_type": "basic",
    "out_features": ["stage2", "stage3", "stage4"],
}
ONE_MAP = {"backbone_config": RESNET | STAGES | {"out_features": ["stage4"]}}
THREE_MAPS = {
    "backbone_config": RESNET | STAGES,
    "encoder_in_channels": [8, 12, 16],
    "decoder_in_channels": [32, 32, 32],
    "num_denoising": 0,
}
HIERA = {
    "hidden_size": 8,
    "image_size": [32, 32],
    "num_attention_heads": 1,
    "blocks_per_stage": [1, 1, 2, 1],
    "embed_dim_per_stage": [8, 16, 32, 64],
    "num_attention_heads_per_stage": [1, 1, 2, 2],
    "window_size_per_stage": [4, 4, 4, 4],
    "global_attention_blocks": [3],
    "window_positional_embedding_background_size": [2, 2],
}
VIT_OF_DETECTOR = {
    "hidden_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "image_size": 32,
    "patch_size": 4,
    "out_features": ["stage1", "stage2"],
}

LCNET = {"scale": 0.1, "divisor": 8, "out_features": ["stage1", "stage2", "stage3", "stage4"]}
HGNET = {
    "model_type": "hgnet_v2",
    "stem_channels": [3, 8, 8],
    "stage_in_channels": [8, 8, 16, 16],
    "stage_mid_channels": [8, 8, 8, 8],
    "stage_out_channels": [8, 16, 16, 24],
    "stage_num_blocks": [1, 1, 1, 1],
    "stage_numb_of_layers": [1, 1, 1, 1],
    "hidden_sizes": [8, 16, 16, 24],
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
DINOV2 = {
    "model_type": "dinov2",
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
SAM = {"output_channels": 16, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 32, "initializer_range": 0.02}
SAM_OF_OCR = SAM | {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 4,
    "downsample_channels": [16, 16],
}
EFFICIENTNET = {"width_coefficient": 0.25, "depth_coefficient": 0.1, "hidden_dim": 320, "image_size": 64}

# Fields of a small configuration that differ from `TINY`; None takes a field's default.
DIFFERENT: dict[str, dict[str, Any]] = {
    "bit": STAGES | {"embedding_size": 8, "num_groups": 2},
    "conditional_detr": ONE_MAP,
    "convnext": STAGES | {"image_size": 64, "patch_size": 4},
    "convnextv2": STAGES | {"image_size": 64, "patch_size": 4},
    "cvt": {"embed_dim": [8, 8, 16], "num_heads": [1, 1, 2], "depth": [1, 2, 3]},
    "d_fine": THREE_MAPS,
    "dab-detr": ONE_MAP,
    "deformable_detr": ONE_MAP | {"num_feature_levels": 1},
    "deimv2": THREE_MAPS,
    "detr": ONE_MAP,
    "dinov3_convnext": STAGES,
    "donut-swin": WINDOWS,
    "efficientnet": EFFICIENTNET,
    "focalnet": {
        "embed_dim": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "focal_levels": [1, 1],
        "focal_windows": [3, 3],
    },
    "glpn": PYRAMID,
    "granite_docling_vision": {"out_hidden_size": 16, "scale_factor": 2},
    "hiera": {
        "embed_dim": 8,
        "image_size": [64, 64],
        "depths": [1, 1, 1, 1],
        "num_heads": [1, 1, 2, 2],
        "mlp_ratio": 2.0,
        "patch_size": None,
    },
    "levit": {
        "hidden_sizes": [16, 16, 16],
        "num_attention_heads": [1, 2, 2],
        "depths": [1, 1, 1],
        "key_dim": [8, 8, 8],
        "image_size": 64,
        "patch_size": None,
    },
    "lw_detr": {
        "backbone_config": VIT_OF_DETECTOR
        | {"model_type": "lw_detr_vit", "num_windows": 4, "window_block_indices": [0]},
        "projector_scale_factors": [1.0],
        "decoder_self_attention_heads": 2,
        "decoder_cross_attention_heads": 2,
        "group_detr": 1,
    },
    "maskformer-swin": WINDOWS,
    "mobilenet_v1": {"depth_multiplier": 0.125},
    "mobilenet_v2": {"depth_multiplier": 0.125},
    "mobilevit": {
        "hidden_sizes": [8, 8, 16],
        "neck_hidden_sizes": [4, 4, 8, 8, 8, 16, 24],
        "image_size": 64,
        "patch_size": 2,
    },
    "mobilevitv2": {
        "base_attn_unit_dims": [16, 16, 16],
        "n_attn_blocks": [1, 1, 1],
        "width_multiplier": 0.25,
        "image_size": 64,
        "patch_size": 2,
    },
    "poolformer": STAGES,
    "pp_doclayout_v3": THREE_MAPS
    | {
        "backbone_config": RESNET | STAGES | {"out_features": ["stage1", "stage2", "stage3", "stage4"]},
        "mask_feature_channels": [8, 8],
        "x4_feat_dim": 8,
    },
    "pp_doclayout_v4": THREE_MAPS,
    "pp_ocrv5_mobile_rec": {"backbone_config": LCNET | {"model_type": "pp_lcnet_v3"}},
    "pp_ocrv5_server_rec": {"backbone_config": HGNET},
    "pp_ocrv6_small_rec": {"backbone_config": LCNET | {"model_type": "pp_lcnet_v4"}},
    "pp_ocrv6_tiny_rec": {"backbone_config": LCNET | {"model_type": "pp_lcnet_v4"}},
    "uvdoc": {
        "backbone_config": {
            "model_type": "uvdoc_backbone",
            "out_features": [f"stage{number}" for number in range(1, 7)],
        }
    },
    "depth_pro": {
        "patch_size": 32,
        "fusion_hidden_size": 16,
        "intermediate_hook_ids": [1, 0],
        "intermediate_feature_dims": [16, 16],
        "scaled_images_ratios": [0.5, 1.0],
        "scaled_images_overlap_ratios": [0.0, 0.0],
        "scaled_images_feature_dims": [16, 16],
        "image_model_config": DINOV2,
        "patch_model_config": DINOV2,
        "fov_model_config": DINOV2,
    },
    "pvt": PYRAMID,
    "pvt_v2": PYRAMID,
    "radio": {"max_img_size": 64},
    "regnet": STAGES | {"embedding_size": 8, "groups_width": 4},
    "resnet": STAGES | {"embedding_size": 8, "layer_type": "basic"},
    "rf_detr": {
        "backbone_config": VIT_OF_DETECTOR | {"model_type": "rf_detr_dinov2", "num_windows": 2},
        "decoder_self_attention_heads": 2,
        "decoder_cross_attention_heads": 2,
        "group_detr": 1,
    },
    "rt_detr": THREE_MAPS,
    "rt_detr_v2": THREE_MAPS,
    "sam2_hiera_det_model": HIERA,
    "sam2_vision_model": {
        "backbone_config": HIERA | {"model_type": "sam2_hiera_det_model"},
        "backbone_channel_list": [64, 32, 16, 8],
        "backbone_feature_sizes": [[8, 8], [4, 4], [2, 2]],
        "fpn_hidden_size": 16,
    },
    "sam3_vision_model": {
        "backbone_config": {
            "model_type": "sam3_vit_model",
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 64,
            "patch_size": 8,
            "pretrain_image_size": 32,
            "window_size": 4,
            "global_attn_indexes": [1],
        },
        "backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]],
        "fpn_hidden_size": 16,
    },
    "sam3_vit_model": {"pretrain_image_size": 32, "window_size": 2, "global_attn_indexes": [1]},
    "sam_hq_vision_model": SAM,
    "sam_vision_model": SAM,
    "segformer": PYRAMID,
    "swiftformer": {"depths": [1, 1, 1, 1], "embed_dims": [8, 8, 12, 16]},
    "swin": WINDOWS,
    "swin2sr": WINDOWS | {"image_size": 8, "patch_size": 1},
    "swinv2": WINDOWS | {"pretrained_window_sizes": [0, 0]},
    "table-transformer": ONE_MAP,
    "textnet": {"hidden_sizes": [8, 8, 12, 16, 16], "stem_out_channels": 8, "image_size": [64, 64]},
    "yolos": {"image_size": [32, 48], "num_detection_tokens": 5},
    "align_vision_model": EFFICIENTNET,
    "deepseek_ocr2_sam_vision_model": SAM | {"downsample_channels": [16, 16]},
    "got_ocr2_vision": SAM,
    "groupvit_vision_model": {"depths": [1, 1], "num_group_tokens": [4, 0], "num_output_groups": [4, 4]},
    "pp_formulanet_vision": SAM
    | {"post_conv_in_channels": 16, "post_conv_mid_channels": 16, "post_conv_out_channels": 24},
    "slanext_vision": SAM,
    "unlimited_ocr_sam_vision_model": SAM | {"downsample_channels": [16, 16]},
    "llama4_vision_model": {
        "vision_output_dim": 20,
        "projector_input_dim": 20,
        "projector_output_dim": 20,
        "intermediate_size": 96,
    },
    "deepseek_ocr2_vision": {
        "sam_config": SAM_OF_OCR,
        "encoder_config": {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
        },
    },
    "unlimited_ocr_vision": {
        "sam_config": SAM_OF_OCR,
        "encoder_config": {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
        },
    },
    "janus_vision_model": {"num_image_tokens": 16},
}


# Height and width of the pictures of towers whose configuration does not say it.
SIZES = {"pp_ocrv5_mobile_rec": (48, 96), "pp_ocrv5_server_rec": (96, 96)}


def tiny_vision_config(model_type: str) -> PreTrainedConfig:
    """A configuration of a small tower."""
    config_class: Any = CONFIG_MAPPING[model_type]
    known = {entry.name for entry in dataclasses.fields(config_class)}
    aliases = getattr(config_class, "attribute_map", {})
    fields = {name: value for name, value in TINY.items() if name in known and name not in aliases}
    fields.update(DIFFERENT.get(model_type, {}))
    return config_class(**{name: value for name, value in fields.items() if value is not None})


def picture_size(config: PreTrainedConfig) -> tuple[int, int]:
    """Height and width of the pictures that a small tower reads."""
    return image_size_of(config) or SIZES.get(config.model_type, (64, 64))


@torch.no_grad()
def tiny_tower(model_type: str) -> PreTrainedModel:
    """A small tower whose random features tell pictures apart. First values of transformers often do not."""
    torch.manual_seed(0)
    config = tiny_vision_config(model_type)
    tower = build_tower(config).eval()
    for name, weight in tower.named_parameters():
        if weight.dim() > 1 and weight.numel():
            weight.normal_(std=1.5 * weight[0].numel() ** -0.5)
        elif weight.numel() and weight.abs().max() < 0.1:  # biases, and scales that start at almost nothing
            weight.fill_(1.0) if name.endswith("weight") else weight.normal_(std=0.3)
    norms = [module for module in tower.modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train().momentum = 1.0  # to know the sizes of random features after one call
    tower(pixel_values=torch.randn(8, getattr(config, "num_channels", 3), *picture_size(config)))
    for norm, momentum in zip(norms, momenta):
        norm.eval().momentum = momentum
    return tower
