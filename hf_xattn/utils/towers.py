"""A table of the vision towers of transformers that differ from the others.

Most vision models need no entry. The signature of `forward` shows whether a model can be a tower, and a blank image
shows how wide its features are (`parts/measured_towers.py`). A test goes through all vision models of transformers. It
trains, saves and asks a small model with each.
"""

from __future__ import annotations

import importlib

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING


# Classes that `AutoModel` does not know, by the `model_type` of their configuration.
CLASSES = {
    "align_vision_model": "AlignVisionModel",
    "altclip_vision_model": "AltCLIPVisionModel",
    "blip_2_vision_model": "Blip2VisionModel",
    "blip_vision_model": "BlipVisionModel",
    "clipseg_vision_model": "CLIPSegVisionModel",
    "deepseek_ocr2_sam_vision_model": "DeepseekOcr2SamVisionEncoder",
    "deepseek_ocr2_vision": "DeepseekOcr2VisionModel",
    "flava_image_model": "FlavaImageModel",
    "git_vision_model": "GitVisionModel",
    "got_ocr2_vision": "GotOcr2VisionEncoder",
    "groupvit_vision_model": "GroupViTVisionModel",
    "idefics2_vision": "Idefics2VisionTransformer",
    "instructblip_vision_model": "InstructBlipVisionModel",
    "instructblipvideo_vision_model": "InstructBlipVideoVisionModel",
    "janus_vision_model": "JanusVisionModel",
    "kosmos_2_vision_model": "Kosmos2VisionModel",
    "llama4_vision_model": "Llama4VisionModel",
    "metaclip_2_vision_model": "MetaClip2VisionModel",
    "minicpmv4_6_vision": "MiniCPMV4_6VisionModel",
    "mllama_vision_model": "MllamaVisionModel",
    "ovis2_vision": "Ovis2VisionModel",
    "owlv2_vision_model": "Owlv2VisionModel",
    "owlvit_vision_model": "OwlViTVisionModel",
    "paddleocr_vl_vision": "PaddleOCRVisionModel",
    "phi4_multimodal_vision": "Phi4MultimodalVisionModel",
    "pp_formulanet_vision": "PPFormulaNetVisionModel",
    "slanext_vision": "SLANeXtVisionEncoder",
    "step3p5_vision": "Step3p7VisionModel",
    "unlimited_ocr_sam_vision_model": "UnlimitedOcrSamVisionEncoder",
    "unlimited_ocr_vision": "UnlimitedOcrVisionModel",
    "xclip_vision_model": "XCLIPVisionModel",
}
# Towers that are not tested, with the reason. `retrofit` measures them as any other tower.
UNTESTED = {
    "dinat": "needs the package `natten`",
    "edgetam_vision_model": "needs the package `timm`",
    "gemma3n_vision": "needs the package `timm`",
    "pp_ocrv6_medium_det": "has no configuration of its own that can be built",
    "pp_ocrv6_small_det": "has no configuration of its own that can be built",
    "timm_wrapper": "needs the package `timm`",
}
# Towers that return features with the channels last: (images, height, width, channels).
CHANNELS_LAST = ("sam2_hiera_det_model", "sam2_vision_model")
# Towers that return the tokens of all images behind each other in one row. The images have the same size.
ONE_ROW = ("pixtral",)
# Towers whose tokens are learned queries (detectors, groups, documents), so that a token has no place in the image.
QUERIES = frozenset(
    """conditional_detr d_fine dab-detr deepseek_ocr2_vision deformable_detr deimv2 detr groupvit_vision_model lw_detr
pp_doclayout_v2 pp_doclayout_v3 pp_doclayout_v4 rf_detr rt_detr rt_detr_v2 table-transformer""".split()
)

# Models for text and images that also run on images alone.
TEXT_IS_OPTIONAL = ("layoutlmv3",)

VIDEO = "it reads videos"
PATCHES = "it reads patches that its image processor cuts, with their sizes in further arguments"
# Models that cannot be a tower, with the reason, although their `forward` seems to need `pixel_values` alone.
REFUSED = {
    "minicpm_ocr_vision": PATCHES,
    "minicpmv4_6_vision": PATCHES,
    "minicpmv4_7_vision": PATCHES,
    "paddleocr_vl_vision": PATCHES,
    "sam_hq": "it returns no `last_hidden_state`",
    "timesformer": VIDEO,
    "videomae": VIDEO,
    "vit_mae": "it hides three quarters of the patches of an image, other ones at each call",
    "vivit": VIDEO,
    "xclip_vision_model": VIDEO,
}


def class_of(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Returns the class of the tower that a configuration describes. None if transformers does not know it."""
    return class_of_type(type(config))


def class_of_type(config_class: type[PreTrainedConfig]) -> type[PreTrainedModel] | None:
    """Returns the class of the tower of a configuration's class. None if transformers does not know it."""
    if config_class in MODEL_MAPPING:
        found = MODEL_MAPPING[config_class]
        return found if isinstance(found, type) else None
    name, module = CLASSES.get(config_class.model_type), config_class.__module__
    if name is None or not module.startswith("transformers."):
        return None
    return getattr(importlib.import_module(module.replace(".configuration_", ".modeling_")), name, None)


def own_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Returns the class of the tower if `AutoModel` does not know it, else None."""
    return None if type(config) in MODEL_MAPPING else class_of_type(type(config))
