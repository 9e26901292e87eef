"""A chat about two pictures: two turns, the second one streamed. The second turn encodes no picture again.

python examples/chat_and_serving/chat_about_two_images.py [MODEL IMAGE IMAGE]
"""

import sys
import tempfile
from pathlib import Path

from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, TextStreamer

import hf_xattn  # noqa: F401 (registers the model with the Auto classes)


sys.path.append(str(Path(__file__).parents[1]))  # where tiny_chat.py is


def main(folder: str, pictures: list[Image.Image]) -> None:
    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    model.enable_image_store()  # every turn passes all pictures again, but each one is encoded only once

    def answer(messages: list[dict], streamer: TextStreamer | None = None) -> str:
        inputs = processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False, streamer=streamer)
        return processor.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    parts = [{"type": "image", "image": picture} for picture in pictures]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "what is in the picture ?"}]}]
    first = answer(messages)
    print(f"first answer: {first!r}")

    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "how many ?"}]
    print("second answer, streamed: ", end="")
    answer(messages, TextStreamer(processor.tokenizer, skip_prompt=True, skip_special_tokens=True))
    store = model.image_store
    print(f"pictures encoded: {store.misses}, taken from the store: {store.hits}")


if __name__ == "__main__":
    if len(sys.argv) == 4:
        main(sys.argv[1], [Image.open(name) for name in sys.argv[2:]])
    else:
        from tiny_chat import RANDOM_WEIGHTS, make_chat_model
        from tiny_checkpoints import make_picture

        with tempfile.TemporaryDirectory() as folder:
            make_chat_model(Path(folder))
            print(RANDOM_WEIGHTS)
            main(str(Path(folder) / "model"), [make_picture(0), make_picture(1)])
