"""Imports whole checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.constants import HF_HUB_OFFLINE
from safetensors import safe_open
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from ..checkpoints.loading_checks import check_config_file
from ..checkpoints.model_card import write_model_card
from ..configuration_xattn import XAttnConfig
from ..modeling_xattn import XAttnForConditionalGeneration
from ..utils.checkpoint_files import INTEGERS, Stored, check_source
from ..utils.config_checks import check_layer_count
from ..utils.whole_folder import WholeFolder
from . import idefics, mllama
from .recipe import Recipe, fits
from .streaming import FolderWriter, check_folder, copy_side_files, read_headers, side_files


# By `model_type` of the source.
RECIPES: dict[str, Callable[..., Recipe]] = {"idefics": idefics.recipe, "mllama": mllama.recipe}


def convert_checkpoint(source: str | Path, output: str | Path) -> None:
    """Converts a vision-language checkpoint with cross-attention to a checkpoint of this package.

    Checks names, shapes and completeness before it writes anything. Then converts the weights file by file, so that
    one file of the source has to fit into memory, not the model.

    Args:
        source (`str` or `Path`): a folder or a Hub id.
        output (`str` or `Path`): a new or empty folder, which gets all files at once, at the end.

    Raises:
        ValueError: if the model type of `source` is not supported, if `source` has no safetensors or has missing,
            unknown or truncated tensors, or if `output` is not empty.
    """
    check_folder(output)
    folder = folder_of(source)
    headers = read_headers(folder)
    recipe = recipe_of(config_of(folder, headers))
    side_files(folder)
    plan = _plan(recipe, headers)
    with WholeFolder(output) as target_folder:
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
        output (`str` or `Path`, *optional*): a new or empty folder for the result.

    Returns:
        [`XAttnForConditionalGeneration`]: the model, in the source's dtype. If the model does not fit into memory, use
        [`convert_checkpoint`] and load the result with a `device_map`.

    Raises:
        ValueError: as [`convert_checkpoint`].
    """
    if isinstance(source, PreTrainedModel):
        if output is not None:
            check_folder(output)
        model = _import_model(source)
        if output is not None:
            model.save_pretrained(output)
        return model
    if output is None:
        with tempfile.TemporaryDirectory() as folder:
            return import_checkpoint(source, Path(folder) / "model")
    convert_checkpoint(source, output)
    return XAttnForConditionalGeneration.from_pretrained(output, dtype="auto")


def recipe_of(config: PreTrainedConfig) -> Recipe:
    """Returns the recipe of a model type, or raises a `ValueError`."""
    if config.model_type not in RECIPES:
        raise ValueError(
            f"`source` must be a model of type {sorted(RECIPES)}, got a {config.model_type!r} model, which cannot be "
            "imported. A text-only model needs `retrofit`; an 'xattn' model is one of this package already."
        )
    try:
        return RECIPES[config.model_type](config)
    except ValueError:
        raise
    except Exception as error:  # sizes of zero, missing parts, lists that are none
        raise ValueError(
            f"`source` has a configuration of a {config.model_type!r} model that cannot be one: "
            f"{type(error).__name__}: {error}."
        ) from error


def config_of(folder: Path, headers: dict[str, Stored]) -> PreTrainedConfig:
    """Reads the configuration in a folder, after its sizes were checked. Raises a `ValueError` if it cannot be one."""
    try:
        fields = check_config_file(folder, {})
        check_layer_count(fields, len(headers), f"{folder / 'config.json'}")
        return AutoConfig.from_pretrained(folder)
    except (OSError, ImportError):
        raise
    except Exception as error:
        raise ValueError(f"`source` ({folder}): {error if str(error) else type(error).__name__}") from error


def folder_of(source: str | Path) -> Path:
    """Returns the folder of a source. Downloads a Hub id."""
    if not isinstance(source, (str, Path)):
        raise TypeError(f"`source` must be a folder, a Hub id or a loaded model, got {type(source).__name__}.")
    folder = Path(source)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"`source` ({folder}) holds no config.json.")
        return folder
    check_source("source", source)
    if HF_HUB_OFFLINE:
        raise ValueError(f"`source` ({source}) is not a folder, and the Hub is out of reach (offline mode).")
    return Path(snapshot_download(str(source), ignore_patterns=["*.bin", "*.pth", "*.pt", "original/*"]))


def shapes_of(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes of the tensors in a checkpoint of this model."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}


def _skeleton(config: XAttnConfig) -> XAttnForConditionalGeneration:
    """A model of shapes and dtypes, without values."""
    with torch.device("meta"):
        return XAttnForConditionalGeneration._from_config(config)


def _plan(recipe: Recipe, headers: dict[str, Stored]) -> dict[str, list]:
    """Returns the target parameters and their shapes for each tensor of the source. Refuses sources that do not fit."""
    skeleton = _skeleton(recipe.config)
    expected = shapes_of(skeleton)
    dtypes = {name: tensor.dtype for name, tensor in skeleton.state_dict().items()}
    plan: dict[str, list] = {}
    unknown, found = [], set()
    for name, header in headers.items():
        targets = recipe.targets(name)
        if targets is None or any(target.name not in expected for target in targets):
            unknown.append(name)
            continue
        plan[name] = []
        for target in targets:
            shape = expected[target.name]
            rows = len(range(*target.rows.indices(header.shape[0]))) if header.shape else 1
            if not fits((rows, *header.shape[1:]), shape):
                raise ValueError(
                    f"`source` holds {name} of shape {tuple(header.shape)}, which does not fit its configuration: "
                    f"expected {shape} for {target.name}."
                )
            plan[name].append((target, shape))
            if header.dtype in INTEGERS and dtypes[target.name].is_floating_point:
                raise ValueError(
                    f"`source` holds {name} of dtype {header.dtype}: expected floating-point weights. Quantized "
                    "checkpoints are not imported."
                )
            found.add(target.name)
    if unknown:
        raise ValueError(f"`source` holds tensors that its model type does not have: {_few(unknown)}.")
    if missing := sorted(expected.keys() - found):
        raise ValueError(f"`source` is not complete: no tensor for {_few(missing)}.")
    return plan


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _import_model(source: PreTrainedModel) -> XAttnForConditionalGeneration:
    recipe = recipe_of(source.config)
    tied = getattr(source, "all_tied_weights_keys", None) or {}
    state = {name: tensor for name, tensor in source.state_dict().items() if name not in tied}
    plan = _plan(recipe, {name: Stored("", tuple(tensor.shape)) for name, tensor in state.items()})
    with no_init_weights():
        model = XAttnForConditionalGeneration._from_config(recipe.config, dtype=source.dtype)
    model.tie_weights()
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name, tensor in state.items():
            for target, shape in plan[name]:
                own[target.name].copy_(tensor[target.rows].reshape(shape))
    model.generation_config = source.generation_config or GenerationConfig()
    return model.to(source.device).train(source.training)
