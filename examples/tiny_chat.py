"""Makes a small model with random weights that chats about drawn shapes, so that the training examples run without a
download.
"""

from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from tiny_checkpoints import make_text_checkpoint, make_vision_checkpoint
from transformers import AutoImageProcessor, AutoTokenizer

from hf_xattn import XAttnForConditionalGeneration, XAttnProcessor, retrofit


# With tensors this small a second thread hardly helps, and on busy cores it is several times slower.
torch.set_num_threads(1)

RANDOM_WEIGHTS = "This model has random weights: its words mean nothing."  # what scripts print before its answers

COLOURS, SHAPES = ("red", "blue"), ("circle", "square")
# A text model's own template knows text only: the processor places the images.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' : ' }}{% if message['content'] is string %}{{ "
    "message['content'] }}{% else %}{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% "
    "endfor %}{% endif %}{{ ' [EOS] ' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)


def make_chat_model(folder: Path) -> tuple[XAttnForConditionalGeneration, XAttnProcessor]:
    """A retrofitted model of four layers and its processor, both saved to `folder / "model"`."""
    text, vision = make_text_checkpoint(folder / "text"), make_vision_checkpoint(folder / "vision")
    model = retrofit(text, vision, every=2)
    processor = XAttnProcessor(
        AutoImageProcessor.from_pretrained(vision), AutoTokenizer.from_pretrained(text), chat_template=CHAT_TEMPLATE
    )
    model.save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    return model, processor


def drawings() -> dict[str, Image.Image]:
    """A picture for each caption."""
    pictures = {}
    for colour in COLOURS:
        for shape in SHAPES:
            picture = Image.new("RGB", (32, 32), "white")
            draw = ImageDraw.Draw(picture)
            (draw.ellipse if shape == "circle" else draw.rectangle)((4, 4, 27, 27), fill=colour)
            pictures[f"a {colour} {shape}"] = picture
    return pictures


def caption_rows(question: str) -> list[dict[str, Any]]:
    """A data set of four rows, one for each drawing: a question with a picture, and its caption as the answer."""
    return [
        {
            "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": caption}],
            "images": [picture],
        }
        for caption, picture in drawings().items()
    ]


def captions_right(model: XAttnForConditionalGeneration, processor: XAttnProcessor, question: str) -> int:
    """Asks about each drawing, prints the answers, and counts the right ones."""
    right = 0
    for caption, picture in drawings().items():
        chat = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": question}]}]
        inputs = processor.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        ).to(model.device)
        tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        answer = processor.decode(tokens, skip_special_tokens=True)
        print(f"{caption}: {answer!r}")
        right += answer == caption
    return right
