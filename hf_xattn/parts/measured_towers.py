"""Measures the features of a vision tower by running it on blank images.

The configurations of towers give the width and the number of features under many names, or not at all.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..images.tower import ARRANGEMENTS, UnusableOutput, blank_image, build_tower, image_size_of, run_tower
from ..utils.architectures import vision_hidden_size
from ..utils.towers import QUERIES


STRIDES = tuple(2**power for power in range(8))


class Measured(NamedTuple):
    """The features of a vision tower.

    Attributes:
        width (`int`): Width of the features.
        tokens (`int`, *optional*): Number of features of an image, if they are a square grid for a square image.
    """

    width: int
    tokens: int | None


def measured_features(config: PreTrainedConfig) -> Measured | None:
    """Measures a tower by its configuration, without weights, on the meta device.

    Some towers do not run on the meta device, because their code reads values. Such a tower is not measured if its
    configuration has the width. Otherwise it is built with random weights.

    Raises:
        ValueError: for a tower whose output cannot be used.
    """
    if config.model_type in ARRANGEMENTS:
        return None
    for device in (torch.device("meta"), torch.device("cpu")):
        try:
            with device, torch.random.fork_rng(devices=[]):
                return _of_blank_images(build_tower(config).eval(), device)
        except UnusableOutput:
            raise
        except Exception:  # the code of a tower may fail in any way without values, or on an image of another size
            if _says_its_width(config):
                return None
    return None


def measured(tower: PreTrainedModel) -> Measured | None:
    """Measures a tower by running it.

    Returns None for a tower that does not read whole images, or that is on the meta device.

    Raises:
        ValueError: for a tower whose output cannot be used, or that cannot read an image of the size in its
            configuration.
    """
    weight = next(tower.parameters(), None)
    if tower.config.model_type in ARRANGEMENTS or weight is None or weight.is_meta:
        return None
    modes = [(module, module.training) for module in tower.modules()]
    try:
        return _of_blank_images(tower.eval(), weight.device)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        if isinstance(error, UnusableOutput) or image_size_of(tower.config) is not None:
            raise
        return None  # the tower has no size in its configuration, so it may rightly refuse this one
    finally:
        for module, mode in modes:
            module.training = mode


@torch.no_grad()
def _of_blank_images(tower: PreTrainedModel, device: torch.device) -> Measured:
    config: Any = tower.config
    pixels, _ = blank_image(config, device, tower.dtype)
    pixels = pixels.repeat(1, 2, 1, 1, 1)  # two images, because their number may change what a tower returns
    features = run_tower(tower, pixels, None).last_hidden_state
    assert features is not None
    shape, (height, width) = tuple(features.shape), pixels.shape[-2:]
    if len(shape) == 3:
        return Measured(shape[-1], _tokens_of_square(config, shape[1], height) if height == width else None)
    if height == width and shape[1] == shape[2] != shape[3]:
        raise UnusableOutput(
            f"Expected a vision tower whose map of features is (images, channels, height, width), got a "
            f"{type(tower).__name__}, whose map of a square image is {shape}: its channels come last. Move them to "
            "axis 1 in its `forward`."
        )
    return Measured(shape[1], shape[2] * shape[3] if height == width and shape[2] == shape[3] else None)


def _tokens_of_square(config: Any, tokens: int, size: int) -> int | None:
    """Returns the number of tokens if they are the patches of a square image, behind up to two other tokens.

    Returns None if they are not. Other tokens, such as learned queries and registers, may be a square number by chance.
    """
    patch = getattr(config, "patch_size", None)
    sides = {math.ceil(size / stride) for stride in STRIDES}
    if isinstance(patch, int):
        sides.add(size // patch)
    fits = config.model_type not in QUERIES and any(0 <= tokens - side**2 <= 2 for side in sides)
    return tokens if fits else None


def _says_its_width(config: PreTrainedConfig) -> bool:
    try:
        vision_hidden_size(config)
    except ValueError:
        return False
    return True
