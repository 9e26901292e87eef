"""Loads a model with the Auto classes and generates for a batch of prompts with one image, two images and no image.

python examples/load_and_generate.py [MODEL IMAGE PROMPT]
"""

import sys
import tempfile
from pathlib import Path

from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

import hf_xattn  # noqa: F401 (registers the model with the Auto classes)


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
        from retrofit_text_model import main as retrofit_main
        from tiny_checkpoints import make_picture, make_text_checkpoint, make_vision_checkpoint

        with tempfile.TemporaryDirectory() as folder:
            text = make_text_checkpoint(Path(folder) / "text")
            vision = make_vision_checkpoint(Path(folder) / "vision")
            model = str(Path(folder) / "model")
            retrofit_main(str(text), str(vision), model)
            main(model, make_picture(), "what is in the picture ?")
