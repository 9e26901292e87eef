"""The embedded default: a language model learns to read handwritten digits, offline, in minutes on two cores."""

from .canvases import PROMPT
from .run import example_images, run


__all__ = ["PROMPT", "example_images", "run"]
