"""What a vision tower gives for a picture, found by running it on blank ones: configurations name it in many ways."""

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
    """What a tower gives for a picture.

    Attributes:
        width (`int`): of the features.
        tokens (`int`, *optional*): their number, if they are the places of a square picture.
    """

    width: int
    tokens: int | None


def measured_features(config: PreTrainedConfig) -> Measured | None:
    """Measures a tower by its configuration, without weights: on the meta device.

    A tower that does not run there (its code reads values) is built with random weights if its configuration does not
    say its width, and not measured if it does.

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
        except Exception:  # whatever code stumbles over without values, or on a picture that is not its size
            if _says_its_width(config):
                return None
    return None


def measured(tower: PreTrainedModel) -> Measured | None:
    """Measures a tower by running it. None for one that does not read whole images, or on the meta device.

    Raises:
        ValueError: for a tower whose output cannot be used, or that cannot read a picture of its own size.
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
        return None  # it may be right that it cannot read this size
    finally:
        for module, mode in modes:
            module.training = mode


@torch.no_grad()
def _of_blank_images(tower: PreTrainedModel, device: torch.device) -> Measured:
    config: Any = tower.config
    pixels, _ = blank_image(config, device, tower.dtype)
    pixels = pixels.repeat(1, 2, 1, 1, 1)  # two pictures: features of one may depend on their number
    features = run_tower(tower, pixels, None).last_hidden_state
    assert features is not None
    shape, (height, width) = tuple(features.shape), pixels.shape[-2:]
    if len(shape) == 3:
        return Measured(shape[-1], _tokens_of_square(config, shape[1], height) if height == width else None)
    if height == width and shape[1] == shape[2] != shape[3]:
        raise UnusableOutput(
            f"Expected a vision tower whose map of features is (images, channels, height, width), got a "
            f"{type(tower).__name__}, whose map of a square picture is {shape}: its channels come last. Move them to "
            "axis 1 in its `forward`."
        )
    return Measured(shape[1], shape[2] * shape[3] if height == width and shape[2] == shape[3] else None)


def _tokens_of_square(config: Any, tokens: int, size: int) -> int | None:
    """The number of tokens if they are the patches of a square picture, behind up to two others; None if they are not.

    Other tokens, such as learned queries and registers, may be a square number by chance.
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
