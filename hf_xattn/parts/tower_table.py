"""The table of vision towers that `hf-xattn inspect --towers` prints and the guide to towers shows."""

from __future__ import annotations

import inspect

from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from ..images.tower import ARRANGEMENTS, check_tower_class, needed_with_pixels
from ..utils.towers import CLASSES, REFUSED, UNTESTED, class_of_type


def vision_model_types() -> list[str]:
    """Returns each `model_type` of transformers with a model of pictures alone, also those that cannot be a tower."""
    names = sorted({*MODEL_MAPPING_NAMES, *CLASSES} & {*CONFIG_MAPPING})
    return [name for name in names if name in UNTESTED or _reads_pictures_alone(name)]


def why_no_tower(model_type: str) -> str | None:
    """Says in a few words why a model of [`vision_model_types`] cannot be a tower. None if it can."""
    if model_type in UNTESTED or model_type in ARRANGEMENTS:
        return None
    if model_type in REFUSED:
        return REFUSED[model_type].removeprefix("it ")
    tower_class = _class_of(model_type)
    assert tower_class is not None
    if needed_with_pixels(tower_class):
        return "needs more than `pixel_values`"
    try:
        check_tower_class("vision", tower_class)
    except ValueError:
        return "returns no `last_hidden_state`"
    return None


def markdown_table() -> str:
    """Returns the table of all vision models."""
    kinds: dict[str, list[str]] = {}
    for name in vision_model_types():
        reason = why_no_tower(name)
        if reason is not None:
            kind = f"refused: {reason}"
        elif name in UNTESTED:
            kind = f"not tested: {UNTESTED[name]}"
        else:
            kind = "works"
        kinds.setdefault(kind, []).append(f"`{name}`")
    count = len(kinds["works"])
    lines = [f"| {count} of {sum(map(len, kinds.values()))} model types | |", "|---|---|"]
    for kind in sorted(kinds, key=lambda kind: (not kind.startswith("works"), kind)):
        lines.append(f"| {kind} | {', '.join(kinds[kind])} |")
    return "\n".join(lines)


def _class_of(model_type: str) -> type[PreTrainedModel] | None:
    return class_of_type(CONFIG_MAPPING[model_type])


def _reads_pictures_alone(model_type: str) -> bool:
    try:
        parameters = inspect.signature(_class_of(model_type).forward).parameters  # type: ignore[union-attr]
    except (ImportError, ValueError, AttributeError):  # a class that is missing, or whose packages are
        return False
    return "pixel_values" in parameters and "input_ids" not in parameters


__all__ = ["markdown_table", "vision_model_types", "why_no_tower"]
