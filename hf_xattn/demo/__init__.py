"""The demos: a language model learns to read handwritten digits, offline, in minutes on two CPU cores."""

from .canvases import PROMPT
from .language_run import run_language
from .report import example_images
from .run import run


__all__ = ["PROMPT", "example_images", "run", "run_language"]
