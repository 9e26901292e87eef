"""Runs the demo with a text model of its own: its stages, its figures, and the files that it leaves.

It draws where the model looked. This is the attention of the blocks, and no explanation of an answer.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    set_seed,
)

from ..checkpoints.model_card import write_model_card
from ..maps.answer_maps import lit
from ..maps.attention_maps import AttentionMaps, attention_maps
from ..modeling_xattn import XAttnForConditionalGeneration
from ..processing_xattn import XAttnProcessor
from ..retrofit import retrofit
from ..training.freezing import freeze_base
from ..utils.transformers_api import AutoImageProcessor
from .canvases import (
    HEIGHT,
    PATCH,
    PROMPT,
    WIDTH,
    WORDS,
    Canvas,
    CanvasDataset,
    DigitPool,
    make_text_checkpoint,
    make_vision_checkpoint,
    one_thread,
    picture_of,
    sentence,
)


MARK = "made-by-hf-xattn-demo"  # a file that marks a folder of the demo, which a later run may overwrite
SHARES = ("right", "attention", "accuracy")  # names of figures that are shares
# Size of a canvas in a sheet, in pixels.
SCALED = 5 * WIDTH, 5 * HEIGHT
SPACE, LINE = 10, 20
Cell = tuple[Image.Image, str, bool]  # a canvas, the words below it, and whether they are right


@one_thread()  # which is faster for tensors this small
def run(output: str | Path = "hf-xattn-demo", seed: int = 0, quick: bool = False) -> dict[str, Any]:
    """Runs the demo of digits.

    It trains a tiny text model and a small vision tower, retrofits the text model, trains the blocks and the connector,
    and reads held-out canvases with digits.

    Args:
        output (`str` or `Path`): folder for the checkpoints `text`, `vision` and `model`, the examples and the picture.
        seed (`int`): seed of the data, the weights and the split.
        quick (`bool`): run only a few steps of each stage, as a test. The accuracy then means nothing.

    Returns:
        `dict`: the figures of the printed table, which are also saved to `results.json`.

    Raises:
        ValueError: if `output` is a file, or a folder with files that no demo has written.
        ImportError: if scikit-learn is not installed.
    """
    start = time.perf_counter()
    train_pool, test_pool = DigitPool(held_out=False, seed=seed), DigitPool(held_out=True, seed=seed)
    output = prepared(Path(output))
    set_seed(seed)
    say("1/4 A text-only decoder and its tokenizer, from sentences")
    make_text_checkpoint(output / "text", steps=30 if quick else 250, seed=seed)
    say("2/4 A small vision tower")
    make_vision_checkpoint(output / "vision", train_pool, steps=30 if quick else 700, seed=seed)

    say("3/4 Retrofit, and training of what was added")
    model = retrofit(
        output / "text",
        output / "vision",
        cross_attention_layers=[1, 2, 3],
        # A model of width 64 needs larger initial weights than a large model.
        cross_attention={"qk_norm": True, "initializer_range": 0.12, "gate": "tanh"},
        connector_type="linear",
    )
    tokenizer = AutoTokenizer.from_pretrained(output / "text")
    processor = XAttnProcessor(AutoImageProcessor.from_pretrained(output / "vision"), tokenizer)
    same_before = _same_as_base(model, output, tokenizer)
    trainer = _train(model, CanvasDataset(train_pool, tokenizer, 64 * (10 if quick else 300), seed + 10), output, seed)
    model.eval()
    model.save_pretrained(output / "model")
    processor.save_pretrained(output / "model")

    say("4/4 Held-out canvases")
    model = AutoModelForImageTextToText.from_pretrained(output / "model")  # type: ignore[assignment]  # the same class
    processor = AutoProcessor.from_pretrained(output / "model")
    rng = np.random.default_rng((seed, 3))
    canvases = [test_pool.canvas(rng) for _ in range(32 if quick else 500)]
    pictures = [picture_of(canvas) for canvas in canvases]
    base = AutoModelForCausalLM.from_pretrained(output / "text")
    blind = _read(base, processor, canvases, None)
    readings = _read(model, processor, canvases, pictures)
    digits, whole = _accuracy(readings, canvases)
    results = {
        "held-out canvases": len(canvases),
        "digits right, text-only model": _accuracy(blind, canvases)[0],
        "digits right, retrofitted model": digits,
        "canvases right, retrofitted model": whole,
        "text-only logits bit-identical before training": same_before,
        "text-only logits bit-identical after training": _same_as_base(model, output, tokenizer),
        **attention_on_digits(model, processor, canvases, pictures),
        **_count_projections(model, processor, pictures[0]),
        "minutes": (time.perf_counter() - start) / 60,
    }
    named = (f"{index}-{'-'.join(map(str, canvas.digits))}" for index, canvas in enumerate(canvases[:8]))
    save_examples(output, dict(zip(named, pictures)))
    draw_attention(output / "attention.png", model, processor, canvases, pictures)
    (output / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    measured = {name: shown(name, value) for name, value in results.items() if "right" in name or "canvases" in name}
    training = {"data": "scikit-learn's digits"}
    write_model_card(model, output / "model", trainer, training=training, results=measured, questions=[PROMPT])
    _print_results(results, output)
    return results


def _train(model, dataset: CanvasDataset, output: Path, seed: int) -> Trainer:
    """Trains the blocks and the connector with `Trainer`. The text model and the vision tower are frozen."""
    freeze_base(model)
    arguments = TrainingArguments(
        output_dir=str(output / "trainer"),
        per_device_train_batch_size=64,
        num_train_epochs=1,
        learning_rate=2e-3,
        warmup_steps=len(dataset) // 640,
        lr_scheduler_type="cosine",
        logging_steps=50,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        seed=seed,
        dataloader_num_workers=0,
        remove_unused_columns=False,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
    trainer.train()
    return trainer


@torch.no_grad()
def _same_as_base(model, output: Path, tokenizer) -> bool:
    """Whether the logits of texts without images are those of the text model's checkpoint, bit for bit."""
    base = AutoModelForCausalLM.from_pretrained(output / "text").eval()
    batch = tokenizer([sentence([1, 2, 3]), sentence([7])], padding=True, return_tensors="pt")
    batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
    training = model.training
    same = torch.equal(model.eval()(**batch).logits, base.to(model.device)(**batch).logits)
    model.train(training)
    return same


def _read(model, processor, canvases: list[Canvas], pictures: list | None) -> list[list[str]]:
    """Returns the words that a model generates for each canvas, without the prompt. `pictures` None asks without
    images.
    """
    said = []
    for start in range(0, len(canvases), 100):
        texts = [PROMPT] * len(canvases[start : start + 100])
        images = None if pictures is None else pictures[start : start + 100]
        inputs = processor(text=texts, images=images).to(model.device)
        tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)[:, inputs["input_ids"].shape[1] :]
        said += [text.split() for text in processor.batch_decode(tokens, skip_special_tokens=True)]
    return said


def _accuracy(readings: list[list[str]], canvases: list[Canvas]) -> tuple[float, float]:
    """Returns the share of digits that are right in their place, and the share of canvases without a mistake."""
    right = total = whole = 0
    for words, canvas in zip(readings, canvases):
        expected = [WORDS[digit] for digit in canvas.digits]
        right += sum(word == truth for word, truth in zip(words[1::2], expected))
        total += len(expected)
        whole += words[1::2] == expected
    return right / total, whole / len(canvases)


def _count_projections(model, processor, picture) -> dict[str, Any]:
    counts = []
    hooks = [block.attn.k_proj.register_forward_hook(lambda *_: counts.append(1)) for block in model.blocks]
    model.generate(**processor(text=PROMPT, images=picture).to(model.device), max_new_tokens=8, min_new_tokens=8)
    for hook in hooks:
        hook.remove()
    return {"K/V projections in 8 steps": len(counts), "blocks": len(model.blocks)}


def _print_results(results: dict[str, Any], output: Path) -> None:
    print_table(results)
    print(f"\nA few canvases, what the model said, and where it looked: {output / 'attention.png'}")
    print(f'In Python: AutoModelForImageTextToText.from_pretrained("{output / "model"}")')
    image = str(example_images(output)[0])
    command = ["hf-xattn", "generate", str(output / "model"), "--image", image, "--prompt", PROMPT]
    print(f"Next: {shlex.join(command)}")


def prepared(output: Path) -> Path:
    """Makes the folder of a demo. Raises a `ValueError` for a file, and for a folder with files that no demo has
    written.
    """
    if output.exists() and not output.is_dir():
        raise ValueError(f"`output` ({output}) must be a folder, got a file. Choose another name.")
    if output.is_dir() and any(output.iterdir()) and not (output / MARK).exists():
        raise ValueError(
            f"`output` ({output}) must be a new folder, an empty one or one of the demo, got a folder with other files."
        )
    output.mkdir(parents=True, exist_ok=True)
    (output / MARK).touch()
    return output


def save_examples(output: Path, pictures: Mapping[str, Image.Image]) -> None:
    """Saves pictures under their names. The pictures of an earlier run are removed."""
    folder = output / "examples"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()
    for name, picture in pictures.items():
        picture.save(folder / f"{name}.png")


def example_images(output: str | Path) -> list[Path]:
    """Returns the files of the held-out pictures that a demo has saved. The name of a canvas holds its digits."""
    return sorted((Path(output) / "examples").glob("*.png"))


def say(text: str) -> None:
    print(f"\n{text}", flush=True)


def shown(name: str, value: object) -> str:
    """Returns a figure as the table shows it."""
    if isinstance(value, float):
        return f"{value:.1%}" if any(word in name for word in SHARES) else f"{value:.1f}"
    return {True: "yes", False: "NO"}[value] if isinstance(value, bool) else str(value)


def print_table(results: dict[str, Any]) -> None:
    print()
    for name, value in results.items():
        print(f"{name:<50} {shown(name, value):>10}")


def attention_on_digits(
    model: XAttnForConditionalGeneration, processor: XAttnProcessor, canvases: list[Canvas], pictures: list
) -> dict[str, float]:
    """Measures how much of the attention lies on the patch of a digit while the model chooses its word.

    The word is chosen at the position in front of it. Digits that the model gets wrong count, too.

    Returns:
        `dict`: the share for each block, as a mean over digits and heads, and the share that a patch would get from
        even attention.
    """
    shares: dict[int, list[float]] = {}
    tokens = 0
    for start in range(0, len(canvases), 100):
        maps = _maps(model, processor, pictures[start : start + 100])
        tokens = maps.weights[0].shape[-1]
        for row, canvas in enumerate(canvases[start : start + 100]):
            for layer in maps.layers:
                grid = maps.grid(row=row, layer=layer, head="mean")
                shares.setdefault(layer, []).extend(
                    grid[position, y // PATCH, x // PATCH].item()
                    for position, (y, x) in zip(_naming(maps, canvas), canvas.corners)
                )
    found = {f"attention on the digit, layer {layer}": sum(each) / len(each) for layer, each in shares.items()}
    return {**found, "attention on the digit, if it were even": 1 / tokens}


def _maps(model, processor, pictures: list) -> AttentionMaps:
    inputs = processor(text=[PROMPT] * len(pictures), images=pictures).to(model.device)
    return attention_maps(model, inputs, max_new_tokens=8, do_sample=False)


def _naming(maps: AttentionMaps, canvas: Canvas) -> list[int]:
    """Returns the positions at which the words of the digits are chosen: `digits : first [seven] second [two]`."""
    last = maps.tokens.shape[1] - 1
    return [min(maps.num_given + 2 * place, last) for place in range(len(canvas.digits))]


def draw_attention(
    path: Path, model: XAttnForConditionalGeneration, processor: XAttnProcessor, canvases: list[Canvas], pictures: list
) -> None:
    """Draws three canvases with three digits each, once for each word. A brighter patch gets more attention."""
    chosen = [index for index, canvas in enumerate(canvases) if len(canvas.digits) == 3][:3] or [0]
    maps = _maps(model, processor, [pictures[index] for index in chosen])
    rows: list[list[Cell]] = []
    for row, index in enumerate(chosen):
        grid, cells = maps.grid(row=row, layer="mean", head="mean"), []
        picture = pictures[index].resize(SCALED, Image.Resampling.NEAREST)
        for digit, position in zip(canvases[index].digits, _naming(maps, canvases[index])):
            heat = grid[position] / grid[position].max().clamp(min=1e-6)
            word = processor.decode(maps.tokens[row, min(position + 1, maps.tokens.shape[1] - 1)])
            cells.append((lit(picture, heat), word, word == WORDS[digit]))
        rows.append(cells)
    _draw(path, rows)


def _draw(path: Path, rows: list[list[Cell]]) -> None:
    """Saves a sheet of scaled canvases. The text below each of them is red if it is wrong."""
    width, height = SCALED[0] + SPACE, SCALED[1] + LINE + SPACE
    sheet = Image.new("RGB", (max(map(len, rows)) * width + SPACE, len(rows) * height + SPACE), "white")
    pen = ImageDraw.Draw(sheet)
    for row, cells in enumerate(rows):
        for column, (picture, text, right) in enumerate(cells):
            x, y = SPACE + column * width, SPACE + row * height
            sheet.paste(picture, (x, y))
            pen.text((x + 2, y + SCALED[1] + 4), text, fill="black" if right else "red")
    sheet.save(path)
