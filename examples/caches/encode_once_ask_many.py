"""Encodes a picture once and asks many questions about it.

The questions run neither the vision tower nor the K/V projections, and all questions share one copy of keys and values.

python examples/caches/encode_once_ask_many.py [MODEL IMAGE]
"""

import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from hf_xattn import load_image_cache, save_image_cache


sys.path.append(str(Path(__file__).parents[1]))  # where tiny_chat.py is


QUESTIONS = ["what is in the picture ?", "how many ?", "which colour ?", "describe it"]


def main(folder: str, picture: Image.Image, file: str) -> None:
    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    projections = []
    for block in model.blocks:
        block.attn.k_proj.register_forward_hook(lambda *_: projections.append(1))

    with torch.no_grad():
        images = model.encode_images(pixel_values=processor(images=picture)["pixel_values"])
    questions = processor(text=QUESTIONS)
    tokens = model.generate(**questions, cache=images, max_new_tokens=8, do_sample=False)
    for question, answer in zip(QUESTIONS, tokens[:, questions["input_ids"].shape[1] :]):
        print(f"{question} {processor.decode(answer, skip_special_tokens=True)!r}")
    print(f"K/V projections: {len(projections)} for {len(model.blocks)} blocks and {len(QUESTIONS)} questions")

    save_image_cache(images, file, model)
    again = model.generate(**questions, cache=load_image_cache(file, model), max_new_tokens=8, do_sample=False)
    print(f"the same answers from the file: {again.equal(tokens)}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "picture.safetensors")
        if len(sys.argv) == 3:
            main(sys.argv[1], Image.open(sys.argv[2]).convert("RGB"), file)
        else:
            from tiny_chat import RANDOM_WEIGHTS, make_chat_model
            from tiny_checkpoints import make_picture

            make_chat_model(Path(folder))
            print(RANDOM_WEIGHTS)
            main(str(Path(folder) / "model"), make_picture(), file)
