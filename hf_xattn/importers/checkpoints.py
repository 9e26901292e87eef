"""Imports whole checkpoints: the weights are converted file by file, so the model need not fit into memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from ..checkpoints.model_card import write_model_card
from ..configuration_xattn import XAttnConfig
from ..modeling_xattn import XAttnForConditionalGeneration
from ..utils.checkpoint_files import INTEGERS, Stored
from ..utils.whole_folder import whole_folder
from . import idefics, mllama
from .conversion import (
    FolderWriter,
    Recipe,
    Target,
    check_folder,
    check_names,
    check_shape,
    config_of,
    copy_side_files,
    folder_of,
    read_headers,
    shapes_of,
    side_files,
)


# The function that makes the recipe, by the `model_type` of the source.
RECIPES: dict[str, Callable[..., Recipe]] = {"idefics": idefics.recipe, "mllama": mllama.recipe}


def convert_checkpoint(source: str | Path, output: str | Path) -> None:
    """Converts a vision-language checkpoint with cross-attention to a checkpoint of this package.

    The names and shapes of all weights are checked before anything is written. Then the weights are converted file by
    file: only one file of the source has to fit into memory, not the model.

    Args:
        source (`str` or `Path`): a folder or a Hub id.
        output (`str` or `Path`): a new or empty folder. All files appear in it at once, at the end.

    Raises:
        ValueError: for a `source` of a model type that is not supported, without safetensors, or with missing, unknown
            or truncated tensors; and for an `output` that is not empty.

    Example:

    ```python
    >>> import hf_xattn
    >>> from transformers import AutoModelForImageTextToText

    >>> hf_xattn.convert_checkpoint("meta-llama/Llama-3.2-11B-Vision-Instruct", "imported")
    >>> model = AutoModelForImageTextToText.from_pretrained("imported")
    ```
    """
    check_folder(output)
    folder = folder_of(source)
    headers = read_headers(folder)
    recipe = recipe_of(config_of(folder, headers))
    side_files(folder)
    plan = _plan(recipe, headers)
    with whole_folder(output) as target_folder:
        writer = FolderWriter(target_folder)
        for file in sorted({header.file for header in headers.values()}):
            parts: dict[str, torch.Tensor] = {}
            with safe_open(folder / file, "pt") as opened:
                for name in (name for name, header in headers.items() if header.file == file):
                    tensor = opened.get_tensor(name)
                    parts.update((target.name, tensor[target.rows].reshape(shape)) for target, shape in plan[name])
            writer.write(file, parts)
        writer.finish()
        recipe.config.architectures = [XAttnForConditionalGeneration.__name__]
        recipe.config.save_pretrained(target_folder)
        copy_side_files(folder, target_folder)
        write_model_card(_skeleton(recipe.config), target_folder, base=[str(source)])


def import_checkpoint(
    source: str | Path | PreTrainedModel, output: str | Path | None = None
) -> XAttnForConditionalGeneration:
    """Converts a vision-language checkpoint with cross-attention to a model of this package.

    Args:
        source (`str`, `Path` or `PreTrainedModel`): a folder, a Hub id or a loaded model.
        output (`str` or `Path`, *optional*): a new or empty folder to save the model to.

    Returns:
        [`XAttnForConditionalGeneration`]: the model, in the dtype of the source. If the model does not fit into memory,
        call [`convert_checkpoint`] in place of this function, and load the result with a `device_map`.

    Raises:
        ValueError: as [`convert_checkpoint`].

    Example:

    ```python
    >>> import hf_xattn

    >>> model = hf_xattn.import_checkpoint("meta-llama/Llama-3.2-11B-Vision-Instruct", "imported")
    >>> model.config.source_config["model_type"]
    'mllama'
    ```
    """
    if isinstance(source, PreTrainedModel):
        if output is None:
            return _import_model(source)
        check_folder(output)
        model = _import_model(source)
        model.save_pretrained(output)
        return model
    if output is None:
        with tempfile.TemporaryDirectory() as folder:
            model = import_checkpoint(source, Path(folder) / "model")
        model.name_or_path = model.config.name_or_path = ""  # the temporary folder is gone, so no adapter may record it
        return model
    convert_checkpoint(source, output)
    return XAttnForConditionalGeneration.from_pretrained(output, dtype="auto")


def recipe_of(config: PreTrainedConfig) -> Recipe:
    if config.model_type not in RECIPES:
        raise ValueError(
            f"`source` must be a model of type {sorted(RECIPES)}, got a {config.model_type!r} model, which cannot be "
            "imported. A text-only model needs `retrofit`; an 'xattn' model is one of this package already."
        )
    return RECIPES[config.model_type](config)


def _skeleton(config: XAttnConfig) -> XAttnForConditionalGeneration:
    """Returns a model on the meta device: shapes and dtypes without values."""
    with torch.device("meta"):
        return XAttnForConditionalGeneration._from_config(config)


def _plan(recipe: Recipe, headers: dict[str, Stored]) -> dict[str, list]:
    """Returns the target parameters and their shapes for each tensor of the source.

    Raises:
        ValueError: if the tensors of the source do not fit its configuration.
    """
    skeleton = _skeleton(recipe.config)
    expected = shapes_of(skeleton)
    dtypes = {name: tensor.dtype for name, tensor in skeleton.state_dict().items()}
    targets = {name: recipe.targets(name) for name in headers}
    known = [name for name, of_name in targets.items() if of_name is not None and expected.keys() >= {*_names(of_name)}]
    check_names("`source`", headers, known)
    plan: dict[str, list] = {}
    found: set[str] = set()
    for name, header in headers.items():
        plan[name] = [(target, expected[target.name]) for target in targets[name] or ()]
        for target, shape in plan[name]:
            rows = len(range(*target.rows.indices(header.shape[0]))) if header.shape else 1
            check_shape("`source`", name, (rows, *header.shape[1:]), shape)
            if target.name in found:
                raise ValueError(f"`source` holds two tensors for {target.name}: {name}, and one of another name.")
            if header.dtype in INTEGERS and dtypes[target.name].is_floating_point:
                raise ValueError(
                    f"`source` holds {name} of dtype {header.dtype}: expected floating-point weights. Quantized "
                    "checkpoints are not imported."
                )
            found.add(target.name)
    check_names("`source`", found, expected)
    return plan


def _names(targets: list[Target]) -> list[str]:
    return [target.name for target in targets]


def _import_model(source: PreTrainedModel) -> XAttnForConditionalGeneration:
    recipe = recipe_of(source.config)
    state = source.state_dict()
    plan = _plan(recipe, {name: Stored("", shape) for name, shape in shapes_of(source).items()})
    with no_init_weights():
        model = XAttnForConditionalGeneration._from_config(recipe.config, dtype=source.dtype)
    model.tie_weights()
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name, targets in plan.items():
            for target, shape in targets:
                own[target.name].copy_(state[name][target.rows].reshape(shape))
    model.generation_config = source.generation_config or GenerationConfig()
    return model.to(source.device).train(source.training)
