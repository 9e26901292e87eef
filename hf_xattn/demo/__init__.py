"""The two demos, which work offline: a tiny model reads handwritten digits, or a text model sees photographs.

The second demo runs the commands of the package, so it is in `hf_xattn/commands/demo_photographs.py`. Only its data and
its vision tower are here.
"""

from .canvases import PROMPT
from .run import example_images, run


__all__ = ["PROMPT", "example_images", "run"]
