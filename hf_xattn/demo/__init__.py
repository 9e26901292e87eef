"""The demos, which work offline: a tiny model reads handwritten digits, or a language model sees photographs.

Only parts of the second one are here: `hf_xattn/commands/demo_photographs.py` runs it.
"""

from .canvases import PROMPT
from .run import example_images, run


__all__ = ["PROMPT", "example_images", "run"]
