"""All steps, from labelled pictures to a language model that answers questions about them.

python examples/garments/run.py [SOURCE TEXT_MODEL OUTPUT] [--tower TOWER --labels bag dress --steps 450]

Without arguments it makes pictures and a tiny text model with random weights, and runs in seconds. Each step prints
its command.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import make_rows
import train_tower
from PIL import Image, ImageDraw

import hf_xattn


HERE = Path(__file__).parent
TINY_ROWS = ["--pictures=24", "--held-out=8", "--size=16"]
TINY_TOWER = ["--steps=4", "--hidden-size=16", "--size=16"]
TINY_TRAINING = ["--steps=4", "--batch-size=4", "--device=cpu"]


def step(function: Callable[[list[str]], int | None], name: str, *arguments: object) -> None:
    words = [str(argument) for argument in arguments]
    print(f"\n{name} {' '.join(words)}", flush=True)
    if status := function(words):
        sys.exit(status)


def hf_xattn_step(*arguments: object) -> None:
    step(hf_xattn.main, "hf-xattn", *arguments)


def run(source: Path, text: str, output: Path, options: argparse.Namespace, tiny: bool = False) -> None:
    labels = ["--labels", *options.labels] if options.labels else []
    step(make_rows.main, "python make_rows.py", source, output / "rows", *labels, *(TINY_ROWS if tiny else []))
    tower = options.tower
    if tower is None:
        tower = output / "tower"
        step(train_tower.main, "python train_tower.py", source, tower, *labels, *(TINY_TOWER if tiny else []))
    layers = [] if options.layers is None else ["--layers", options.layers]
    hf_xattn_step("retrofit", text, "--vision", tower, *layers, "--output", output / "fresh")
    training = [f"--steps={options.steps}", "--batch-size=16", "--dtype=bfloat16"]
    data = ["--data", output / "rows" / "train"]
    hf_xattn_step(
        "train", output / "fresh", *data, "--output", output / "model", *(TINY_TRAINING if tiny else training)
    )
    hf_xattn_step("eval", output / "model", "--data", output / "rows" / "held_out", "--by", "kind")
    if not tiny:  # whose folder goes away
        picture = output / "rows" / "held_out" / "00000.png"
        print(f"\nNow talk with it: hf-xattn chat {output / 'model'} --image {picture}")


def make_folder(folder: Path) -> Path:
    """A folder of pictures for each label: squares and circles in colours that differ a little."""
    for label in ("red_circle", "blue_square", "blue_circle"):
        (folder / label).mkdir(parents=True)
        for index in range(6):
            picture = Image.new("RGB", (20 + index, 20), "white")
            shade = 200 + 9 * index
            colour = (shade, 0, 0) if "red" in label else (0, 0, shade)
            draw = ImageDraw.Draw(picture)
            (draw.rectangle if "square" in label else draw.ellipse)((3, 3, 16, 16), fill=colour)
            picture.save(folder / label / f"{index}.png")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, nargs="?")
    parser.add_argument("text", nargs="?", help="text model: a folder or a Hub id")
    parser.add_argument("output", type=Path, nargs="?")
    parser.add_argument("--tower", help="a pretrained vision tower; without it, a small ResNet is trained")
    parser.add_argument("--labels", nargs="+", help="only these labels")
    parser.add_argument("--layers", help="layers that get a block (default: every fourth)")
    parser.add_argument("--steps", type=int, default=450)
    options = parser.parse_args()
    if options.output is not None:
        run(options.source, options.text, options.output, options)
        return
    if options.source is not None:
        parser.error("expected SOURCE, TEXT_MODEL and OUTPUT, or none of them")
    sys.path.insert(0, str(HERE.parent))
    from tiny_checkpoints import make_text_checkpoint

    print("This run has a text model with random weights and a few steps of training: its scores mean nothing.")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(
            make_folder(folder / "pictures"),
            str(make_text_checkpoint(folder / "text")),
            folder / "output",
            options,
            tiny=True,
        )


if __name__ == "__main__":
    main()
