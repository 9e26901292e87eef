"""A Hugging Face Space: draw or drop pictures, chat about them, and see where the model looked.

Put the files of this folder and the folder `hf_xattn` of the package's source into a Space with Gradio as its SDK, and
name the model in `MODEL`: a Hub id, or a folder in the Space. Both can be set as variables of the Space. Locally:
`MODEL=hf-xattn-demo/model python examples/space/app.py`.
"""

import os

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from hf_xattn.serving.web import build_page


MODEL = os.environ.get("MODEL", "model")
QUESTIONS = os.environ.get("QUESTIONS", "")  # to choose with one click, separated by |; or those in the model's card

processor = AutoProcessor.from_pretrained(MODEL)
model = AutoModelForImageTextToText.from_pretrained(MODEL, dtype="auto").eval()
if torch.cuda.is_available():
    model = model.to("cuda")
model.enable_image_store(2**30)

questions = [text for text in QUESTIONS.split("|") if text] or None
page = build_page(model, processor, title="What do you see?", questions=questions)
page.launch()
