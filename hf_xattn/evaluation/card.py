"""Writes what was measured into the metadata of a model card (`model-index`), where the Hub reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard

from .evaluation import BLIND, FREQUENT, MODEL, Evaluation


NAMES = {MODEL: "accuracy", BLIND: "accuracy without the picture", FREQUENT: "accuracy of the most frequent answer"}
TASK = "visual-question-answering"


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
    own = {(data, name) for name in NAMES.values()}
    kept = [each for each in card.data.eval_results or [] if (each.dataset_name, each.metric_name) not in own]
    made = [
        EvalResult(
            task_type=TASK,
            dataset_type=data,
            dataset_name=data,
            metric_type="accuracy",
            metric_name=name,
            metric_value=round(found.ways[way].normalised.value, 4),
        )
        for way, name in NAMES.items()
        if way in found.ways
    ]
    card.data.model_name = card.data.model_name or folder.resolve().name
    card.data.eval_results = [*kept, *made]
    card.save(folder / "README.md")
