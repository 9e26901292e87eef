"""An epoch of training with a frozen vision tower: from pictures, and from what the tower has returned for them
before.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers import our_model, small_tower
from PIL import Image
from timing import DEVICE, seconds
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, SiglipImageProcessor

import hf_xattn
from hf_xattn.training.feature_encoder import encode_pictures


WORDS = "[PAD] [UNK] User Assistant : what is it ? a picture".split()
PICTURES, BATCH = 8, 4


def make_pictures(folder: Path) -> None:
    """Smooth pictures of 800 x 600, as a camera's are, with a caption each."""
    generator = np.random.default_rng(0)
    lines = []
    for index in range(PICTURES):
        small = Image.fromarray(generator.integers(0, 255, (15, 20, 3), dtype=np.uint8))
        small.resize((800, 600), Image.Resampling.BICUBIC).save(folder / f"{index}.jpg")
        lines.append(json.dumps({"file_name": f"{index}.jpg", "question": "what is it ?", "answer": "a picture"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))


def make_processor() -> hf_xattn.XAttnProcessor:
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    return hf_xattn.XAttnProcessor(SiglipImageProcessor(size={"height": 560, "width": 560}), fast)


def epoch(repeats: int) -> dict[str, dict[str, Any]]:
    """The whole epoch, and its steps alone, where batches are ready."""
    sizes = {"heads": 8, "kv_heads": 4, "inner": 1024}
    model = hf_xattn.freeze_base(our_model(512, 8, [3, 7], **sizes, vision=small_tower())).to(DEVICE).train()
    processor = make_processor()
    with tempfile.TemporaryDirectory() as name:
        data = Path(name, "pictures")
        data.mkdir()
        make_pictures(data)
        rows = hf_xattn.load_rows(data)
        encode_pictures(model, processor, rows, Path(name, "features"))
        features = hf_xattn.VisionFeatures(Path(name, "features"), model)
        collators: dict[str, Callable[[list[dict]], dict[str, torch.Tensor]]] = {
            "pictures": hf_xattn.XAttnDataCollator(processor, train_on="all"),
            "features": hf_xattn.XAttnDataCollator(processor, train_on="all", features=features),
        }
        parts = [rows[start : start + BATCH] for start in range(0, PICTURES, BATCH)]
        ready = {what: [collate(part) for part in parts] for what, collate in collators.items()}

        def steps(batches) -> list[float]:
            losses = []
            for batch in batches:
                model.zero_grad()
                loss = model(**{key: value.to(DEVICE) for key, value in batch.items()}, use_cache=False).loss
                loss.backward()
                losses.append(loss.item())
            return losses

        assert np.allclose(steps(ready["pictures"]), steps(ready["features"]), rtol=1e-4)
        runs: dict[str, Callable[[], object]] = {}
        for what, collate in collators.items():
            runs[what] = lambda collate=collate: steps(collate(part) for part in parts)
            runs[f"{what}, ready"] = lambda batches=ready[what]: steps(batches)
        times = seconds(runs, max(3, repeats // 3))
    figures = {}
    for what, end in (("epoch with a frozen tower", ""), ("the same, batches ready", ", ready")):
        slow, fast = times["pictures" + end], times["features" + end]
        figures[f"{what}: from features, against pictures"] = {
            "value": slow / fast,
            "detail": f"{fast * 1e3:.0f} ms against {slow * 1e3:.0f} ms, {PICTURES} pictures",
        }
    return figures
