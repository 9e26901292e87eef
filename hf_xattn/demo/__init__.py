"""The demo: a language model learns to read handwritten digits, offline, in minutes on two CPU cores."""

from .canvases import PROMPT
from .run import example_images, run


__all__ = ["PROMPT", "example_images", "run"]
