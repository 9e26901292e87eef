"""Pictures of circles with captions, questions and chats, in folders for `hf-xattn train`."""

import json

from PIL import Image, ImageDraw


COLOURS = ("red", "blue", "green", "black")


def draw(colour, size=32):
    image = Image.new("RGB", (size, size), "white")
    ImageDraw.Draw(image).ellipse((4, 4, size - 5, size - 5), fill=colour)
    return image


def write_examples(folder, lines, name="metadata.jsonl"):
    """Saves a picture of each colour, and the lines."""
    folder.mkdir(parents=True, exist_ok=True)
    for colour in COLOURS:
        draw(colour).save(folder / f"{colour}.png")
    (folder / name).write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return folder


CAPTIONS = [{"file_name": f"{colour}.png", "text": f"a {colour} circle."} for colour in COLOURS] * 2

CHAT = [
    {"role": "user", "content": [{"type": "image", "path": "red.png"}, {"type": "text", "text": "which colour ?"}]},
    {"role": "assistant", "content": "red."},
]

MIXED = [
    *CAPTIONS[:4],
    {"file_name": "blue.png", "question": "which colour ?", "answer": "blue."},
    {"messages": CHAT},
    {"prompt": CHAT[:1], "completion": CHAT[1:]},
    {"images": ["red.png", "blue.png"], "question": "which colours ?", "answer": "red and blue."},
]
