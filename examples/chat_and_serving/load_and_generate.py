"""Loads a model with the Auto classes and generates for a batch of prompts with one image, two images and no image.

python examples/chat_and_serving/load_and_generate.py [MODEL IMAGE PROMPT]
"""

import sys
import tempfile
from pathlib import Path

from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

import hf_xattn  # noqa: F401 (registers the model with the Auto classes)


sys.path.append(str(Path(__file__).parents[1]))  # where tiny_chat.py is


def main(folder: str, picture: Image.Image, prompt: str) -> None:
    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    inputs = processor(images=[picture, [picture, picture], None], text=[prompt, prompt, prompt])
    tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    answers = processor.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    for name, answer in zip(("one image", "two images", "no image"), answers):
        print(f"{name}: {answer!r}")


if __name__ == "__main__":
    if len(sys.argv) == 4:
        main(sys.argv[1], Image.open(sys.argv[2]).convert("RGB"), sys.argv[3])
    else:
        from tiny_chat import RANDOM_WEIGHTS, make_chat_model
        from tiny_checkpoints import make_picture

        with tempfile.TemporaryDirectory() as folder:
            make_chat_model(Path(folder))
            print(RANDOM_WEIGHTS)
            main(str(Path(folder) / "model"), make_picture(), "what is in the picture ?")
