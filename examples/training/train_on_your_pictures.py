"""Trains a model on a folder of pictures with a JSON lines file, with the command `hf-xattn train`.

python examples/training/train_on_your_pictures.py [MODEL FOLDER OUTPUT]

The folder holds pictures and `metadata.jsonl`, with one example a line. All forms of an example are described in
`hf_xattn/data/forms.py`; the shortest is {"file_name": "a.png", "text": "a caption"}.
"""

import json
import sys
import tempfile
from pathlib import Path

from transformers import AutoModelForImageTextToText, AutoProcessor

import hf_xattn


sys.path.append(str(Path(__file__).parents[1]))  # where tiny_chat.py is


QUESTION = "what is in the picture ?"


def main(model: str, data: str, output: str, *options: str) -> None:
    command = ["train", model, "--data", data, "--output", output, "--prompt", QUESTION, *options]
    print("hf-xattn", *command)
    if status := hf_xattn.main(command):
        sys.exit(status)


def make_folder(folder: Path) -> Path:
    """Pictures of shapes, each with a caption."""
    from tiny_chat import drawings

    folder.mkdir()
    lines = []
    for caption, picture in drawings().items():
        name = f"{caption.replace(' ', '-')}.png"
        picture.save(folder / name)
        lines.append(json.dumps({"file_name": name, "text": caption}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder


if __name__ == "__main__":
    if len(sys.argv) == 4:
        main(*sys.argv[1:])
    else:
        from tiny_chat import captions_right, make_chat_model

        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            make_chat_model(folder)
            data = make_folder(folder / "data")
            # The small model has random weights, so all are trained, at one rate. With a real model, leave out the
            # last four options.
            main(
                str(folder / "model"),
                str(data),
                str(folder / "trained"),
                *("--steps", "60", "--batch-size", "4", "--eval-data", str(data), "--eval-steps", "20"),
                *("--train-text", "--train-vision", "--align=none", "--learning-rate=0.003"),
            )
            model = AutoModelForImageTextToText.from_pretrained(folder / "trained")
            processor = AutoProcessor.from_pretrained(folder / "trained")
            print(f"captions right after training: {captions_right(model, processor, QUESTION)} of 4")
