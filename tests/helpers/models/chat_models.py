"""A tiny model with a processor and a chat template, saved in a folder, for tests of what users run on folders."""

import base64
import io
from pathlib import Path

import numpy as np
from PIL import Image
from transformers import AutoTokenizer

from helpers.models.tiny_models import randomize
from helpers.models.word_models import make_text_checkpoint, make_vision_checkpoint
from hf_xattn import XAttnProcessor, retrofit
from hf_xattn.utils.transformers_api import AutoImageProcessor


# Loops over the parts of a message, as templates of vision-language models do.
TEMPLATE = (
    "{% for message in messages %}{{ message.role }} "
    "{% if message.content is string %}{{ message.content }} {% else %}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }} {% endif %}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}a {% endif %}"
)
NEW_TOKENS = 8


def make_chat_model(folder: Path, chat_template: str | None = TEMPLATE) -> Path:
    """Saves a model whose blocks have random weights, so that its answers follow its images."""
    make_text_checkpoint(folder / "text")
    make_vision_checkpoint(folder / "vision")
    retrofitted = retrofit(folder / "text", folder / "vision", every=2, cross_attention={"gate": "tanh"})
    model = randomize(retrofitted, scale=1.0)
    model.generation_config.eos_token_id = None  # answers of a fixed length
    model.save_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "text")
    image_processor = AutoImageProcessor.from_pretrained(folder / "vision")
    XAttnProcessor(image_processor, tokenizer, chat_template=chat_template).save_pretrained(folder / "model")
    return folder / "model"


def drawing(seed: int, size: int = 32) -> Image.Image:
    """Four patches of random colours: drawings of different seeds get different answers."""
    patches = np.random.default_rng(seed).integers(0, 255, (2, 2, 3), dtype=np.uint8)
    return Image.fromarray(patches).resize((size, size), Image.Resampling.NEAREST)


def data_url(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def question(text: str, *images) -> dict:
    """A message of a chat in transformers' form."""
    parts = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def answer(model, processor, messages: list[dict], **options) -> str:
    """What `generate` answers, greedily: the reference of every other way to ask."""
    inputs = processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    tokens = model.generate(**inputs, **({"max_new_tokens": NEW_TOKENS, "do_sample": False} | options))
    return processor.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
