"""A page to play with a model: draw or drop pictures, ask, and see where the model looked. Needs the extra `web`
(Gradio).

`hf-xattn web DIR` serves it. [`build_page`] makes the same page for a loaded model, for example in a Hugging Face
Space.

- `page.py`: Gradio's side: what a browser may ask for, one answer at a time.
- `static/`: the page. It loads nothing from other hosts.
- `limits.py`: how much a browser may send.
- `visitors.py`: the conversations of the visitors, one each.
- `gaze.py`: where the model looked while it generated the words of an answer.
- `drawing.py`: what a visitor draws on, chosen by the pictures that the model reads.
"""

from .page import build_page


__all__ = ["build_page"]
