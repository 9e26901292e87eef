"""Adds texts beside pictures to the rows of `make_rows.py`, for designs that are trained without `hf-xattn train`.

python examples/photos/add_texts.py steps/rows/train out/kept_text.jsonl steps/rows_and_texts

The texts are those that `hf-xattn train` trains on by default: it writes the prompts and the answers of the text model
to `kept_text.jsonl` in its output folder. It takes a step in seven for them, and shows each beside the picture of
another row. This script writes as many rows, each beside a picture that is chosen by a fixed seed.
"""

import json
import random
import shutil
import sys
from pathlib import Path


SHARE = 0.15  # of all rows, as `hf-xattn train --text-share` has it by default


def main(rows: Path, texts: Path, output: Path) -> None:
    shutil.copytree(rows, output)
    lines = (rows / "metadata.jsonl").read_text().splitlines()
    pictures = sorted(path.name for path in rows.glob("*.jpg"))
    chats = [json.loads(line)["messages"] for line in texts.read_text().splitlines()]
    chosen = random.Random(0)
    for index in range(round(len(lines) * SHARE / (1 - SHARE))):
        question, answer = chats[index % len(chats)]
        picture = {"type": "image", "path": chosen.choice(pictures)}
        content = [picture, {"type": "text", "text": question["content"]}]
        lines.append(json.dumps({"messages": [{"role": "user", "content": content}, answer]}))
    (output / "metadata.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
