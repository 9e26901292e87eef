"""A page to play with a model: draw or drop pictures, ask, and see where the model looked. Needs the extra `web`
(Gradio).

`hf-xattn web DIR` serves it. [`build_page`] makes the same page for a loaded model, for example in a Hugging Face
Space.
"""

from .page import build_page


__all__ = ["build_page"]
