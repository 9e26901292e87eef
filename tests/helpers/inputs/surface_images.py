"""The tables of the image arguments, for `test_public_surface.py`."""

import torch

from helpers.inputs.surface import Fine, Wrong, tensor
from helpers.models.tiny_models import pixels


PIXELS, STATES = pixels(), torch.randn(2, 5, 32)
FEATURES = torch.randn(2, 1, 16, 24)  # of the tower
MASK, IMAGE_MASK = torch.ones(2, 5, dtype=torch.bool), torch.ones(2, 1, dtype=torch.bool)
ROWS = torch.tensor([0, 0])
RATIO_IDS, RATIO_MASK = torch.ones(1, 1, dtype=torch.long), torch.ones(1, 1, 4, dtype=torch.long)


def image_rows(**more):
    """The image arguments, wherever they are taken."""
    rows = {
        "pixel_values": tensor(
            PIXELS,
            device=True,
            none=Fine(None),
            size=torch.zeros(2, 1, 3, 33, 32),
            dtype=torch.zeros(2, 1, 3, 32, 32, dtype=torch.uint8),
        ),
        "image_mask": tensor(
            IMAGE_MASK, device=True, none=Fine(None), size=torch.ones(2, 3, dtype=torch.bool), dtype=IMAGE_MASK.float()
        ),
        "cross_attention_states": tensor(
            STATES, device=True, none=Fine(None), size=STATES[..., 1:], dtype=STATES.long()
        ),
        "cross_attention_mask": tensor(
            MASK, device=True, none=Fine(None), size=torch.ones(2, 6, dtype=torch.bool), dtype=MASK.float()
        ),
        "aspect_ratio_ids": tensor(
            RATIO_IDS, none=Wrong(None, "required"), size=RATIO_IDS.repeat(1, 2), dtype=RATIO_IDS * 1.0
        ),
        "aspect_ratio_mask": tensor(
            RATIO_MASK, none=Wrong(None, "required"), size=RATIO_MASK[..., 1:], dtype=Fine(RATIO_MASK * 1.0)
        ),
        "image_attention_mask": tensor(
            torch.ones(2, 7, 1),
            none=Fine(None),
            size=torch.ones(2, 7, 3),
            dtype=Fine(torch.ones(2, 7, 1, dtype=torch.long)),
        ),
        "vision_features": tensor(
            FEATURES, device=True, none=Fine(None), size=FEATURES[..., 1:], dtype=FEATURES.long()
        ),
        "image_rows": tensor(ROWS, device=True, none=Fine(None), size=ROWS.repeat(2), dtype=ROWS.float()),
    }
    return {**rows, **more}
