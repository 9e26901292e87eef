"""Checks which models can be a vision tower, and makes the table of `hf-xattn inspect --towers` and of the guide."""

from __future__ import annotations

import dataclasses
import inspect
import typing

from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from ..images.tower import ARRANGEMENTS, NO_HIDDEN_STATE, PASS_ITS_BASE
from ..utils.towers import CLASSES, REFUSED, TEXT_IS_OPTIONAL, UNTESTED, class_of, class_of_type


def check_tower_class(name: str, tower_class: type[PreTrainedModel]) -> None:
    """Raises a `ValueError` for a model that needs more than pixels, or that returns no `last_hidden_state`.

    `name` is the name of the argument with the tower, for the error.
    """
    model_type = getattr(tower_class.config_class, "model_type", None)
    if model_type in ARRANGEMENTS:  # an arrangement passes what else the tower needs
        return
    parameters = inspect.signature(tower_class.forward).parameters
    if "pixel_values" not in parameters:
        raise ValueError(
            f"Expected `{name}` to be a vision model, which takes `pixel_values`, got a {tower_class.__name__}, which "
            "does not."
        )
    needed = _needed_with_pixels(tower_class)
    if needed:
        raise ValueError(
            f"Expected `{name}` to be a vision model that takes `pixel_values` alone, got a {tower_class.__name__}, "
            f"which also needs {', '.join(f'`{parameter}`' for parameter in needed)}."
        )
    outputs = _annotated_outputs(tower_class)
    if outputs and not any("last_hidden_state" in fields for fields in outputs.values()):
        fields = sorted(set().union(*outputs.values()))
        found = f"{NO_HIDDEN_STATE.format(tower_class.__name__)} {fields}"
        raise ValueError(f"Expected `{name}` to be {found}. {PASS_ITS_BASE}")
    reason = REFUSED.get(str(model_type))
    if reason is None and next(iter([*parameters][1:]), None) == "input_ids" and model_type not in TEXT_IS_OPTIONAL:
        reason = f"it reads text, too. {PASS_ITS_BASE[:-1]}"
    if reason is not None:
        raise ValueError(
            f"Expected `{name}` to be a vision model that gives each image features of its own, got a "
            f"{tower_class.__name__}, which cannot be a tower: {reason}."
        )


def _needed_with_pixels(tower_class: type[PreTrainedModel]) -> list[str]:
    """Returns the arguments that the `forward` of a vision model requires, besides `pixel_values`."""
    return [
        parameter.name
        for parameter in inspect.signature(tower_class.forward).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name not in ("self", "pixel_values")
    ]


def _annotated_outputs(tower_class: type[PreTrainedModel]) -> dict[str, set[str]]:
    """Returns the fields of each output class in the annotation of `forward`. Empty if the annotation names none."""
    try:
        annotation = typing.get_type_hints(inspect.unwrap(tower_class.forward)).get("return")
    except Exception:  # custom code may be annotated with names that exist for type checkers only
        return {}
    kinds = typing.get_args(annotation) or (annotation,)
    outputs = [kind for kind in kinds if (typing.get_origin(kind) or kind) is not tuple]
    if not all(isinstance(kind, type) and dataclasses.is_dataclass(kind) for kind in outputs):
        return {}
    return {kind.__name__: {field.name for field in dataclasses.fields(kind)} for kind in outputs}


def check_tower_config(name: str, config: PreTrainedConfig) -> None:
    """Runs [`check_tower_class`] for a configuration, before weights are read.

    A configuration is not checked if transformers has no model class for it.
    """
    if (tower_class := class_of(config)) is not None:
        check_tower_class(name, tower_class)


def check_comes_back(name: str, tower: PreTrainedModel) -> None:
    """Raises a `ValueError` if a saved model would load with a tower of another class than `tower` has."""
    built, own = class_of(tower.config), type(tower)
    # A class for the same configuration is allowed: a tower with a projection, for example, loads without it.
    of_same_type = own.__module__.startswith("transformers.") and own.config_class is type(tower.config)
    if built is not None and not (isinstance(tower, built) or of_same_type or tower.is_remote_code()):
        raise ValueError(
            f"Expected `{name}` to be a {built.__name__}, which is built for a {type(tower.config).__name__} when a "
            f"saved model is loaded, got a {type(tower).__name__}. {PASS_ITS_BASE}"
        )


def vision_model_types() -> list[str]:
    """Returns each `model_type` whose model in transformers reads images and no text, also if it cannot be a tower."""
    names = sorted({*MODEL_MAPPING_NAMES, *CLASSES} & {*CONFIG_MAPPING})
    return [name for name in names if name in UNTESTED or _reads_images_alone(name)]


def why_no_tower(model_type: str) -> str | None:
    """Returns in a few words why a model of [`vision_model_types`] cannot be a tower; None if it can."""
    if model_type in UNTESTED or model_type in ARRANGEMENTS:
        return None
    if model_type in REFUSED:
        return REFUSED[model_type].removeprefix("it ")
    tower_class = _class_of(model_type)
    assert tower_class is not None
    if _needed_with_pixels(tower_class):
        return "needs more than `pixel_values`"
    try:
        check_tower_class("vision", tower_class)
    except ValueError:
        return "returns no `last_hidden_state`"
    return None


def markdown_table() -> str:
    """Returns the table of all vision models, for `hf-xattn inspect --towers` and the guide."""
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


def _reads_images_alone(model_type: str) -> bool:
    try:
        parameters = inspect.signature(_class_of(model_type).forward).parameters  # type: ignore[union-attr]
    except (ImportError, ValueError, AttributeError):  # transformers lacks the class, or a package that it needs
        return False
    return "pixel_values" in parameters and "input_ids" not in parameters


__all__ = ["markdown_table", "vision_model_types", "why_no_tower"]
