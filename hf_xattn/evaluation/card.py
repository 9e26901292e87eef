"""Writes what was measured into the metadata of a model card (`model-index`), where the Hub reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard

from .evaluation import BLIND, FREQUENT, MODEL, Evaluation


NAMES = {MODEL: "accuracy", BLIND: "accuracy without the picture", FREQUENT: "accuracy of the most frequent answer"}
TASK = "visual-question-answering"
TEXT_TASK = "text-generation"
AS_BASE = "text answers beside a picture that are the base's, word for word"
BESIDE = "text answers beside a picture that contain the right one"
BASE = "text answers of the base that contain the right one"


def read_card(folder: Path) -> ModelCard:
    """The model card of a folder. Raises a `ValueError` if there is none, or if its metadata cannot be read."""
    file = folder / "README.md"
    if not file.is_file():
        raise ValueError(f"Expected {folder} to be a folder with a model card (README.md), got none there.")
    try:
        return ModelCard.load(file)
    except Exception as error:  # of the YAML reader, too
        raise ValueError(f"The metadata of {file} cannot be read: {error}") from error


def write_results(folder: Path, found: Evaluation, data: str) -> None:
    """Adds the results to the card of a folder. Those of the same data that are there already are replaced.

    Args:
        data (`str`): the name of the data.
    """
    card: Any = read_card(folder)
    own = {(data, name) for name in (*NAMES.values(), AS_BASE, BESIDE, BASE)}
    kept = [each for each in card.data.eval_results or [] if (each.dataset_name, each.metric_name) not in own]
    shares = [(TASK, name, found.ways[way].normalised) for way, name in NAMES.items() if way in found.ways]
    if (text := found.beside) is not None:
        named = {AS_BASE: text.as_base, BESIDE: text.model.contained, BASE: text.base.contained}
        shares += [(TEXT_TASK, name, share) for name, share in named.items()]
    made = [
        EvalResult(
            task_type=task,
            dataset_type=data,
            dataset_name=data,
            metric_type="accuracy",
            metric_name=name,
            metric_value=round(share.value, 4),
        )
        for task, name, share in shares
    ]
    card.data.model_name = card.data.model_name or folder.resolve().name
    card.data.eval_results = [*kept, *made]
    card.save(folder / "README.md")
