"""Imports and exports whole checkpoints."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from huggingface_hub.constants import HF_HUB_OFFLINE
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from ..checkpoints.loading_checks import check_config_file
from ..checkpoints.model_card import write_model_card
from ..configuration_xattn import XAttnConfig
from ..modeling_xattn import XAttnForConditionalGeneration
from ..utils.checkpoint_files import INTEGERS, check_source
from ..utils.config_sizes import check_layer_count
from ..utils.whole_folder import WholeFolder
from . import idefics, mllama
from .mllama_processor import write_processor
from .mllama_shape import missing_rows, mllama_config, parts_of, with_rows
from .recipe import Recipe, fits, take
from .streaming import (
    FolderTensors,
    FolderWriter,
    Header,
    check_folder,
    copy_side_files,
    read_headers,
    read_tensors,
    side_files,
)


# By `model_type` of the source.
RECIPES: dict[str, Callable[..., Recipe]] = {"idefics": idefics.recipe, "mllama": mllama.recipe}
EXPORTABLE = ("mllama",)
MLLAMA_CLASS = "MllamaForConditionalGeneration"
SHARD_BYTES = 5 * 10**9


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
    folder = _folder_of(source)
    headers = read_headers(folder)
    recipe = _recipe(_config_of(folder, headers))
    side_files(folder)
    plan = _plan(recipe, headers)
    with WholeFolder(output) as target_folder:
        writer = FolderWriter(target_folder)
        for file, tensors in read_tensors(folder, headers):
            parts = {
                target.name: take(tensor, target, shape) for name, tensor in tensors for target, shape in plan[name]
            }
            writer.write(file, parts)
        writer.finish()
        recipe.config.architectures = [XAttnForConditionalGeneration.__name__]
        recipe.config.save_pretrained(target_folder)
        copy_side_files(folder, target_folder)
        with torch.device("meta"):  # the card needs shapes only
            skeleton = XAttnForConditionalGeneration._from_config(recipe.config, dtype=recipe.config.dtype)
        write_model_card(skeleton, target_folder, base=[str(source)])


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


def export_checkpoint(source: str | Path | XAttnForConditionalGeneration, output: str | Path) -> None:
    """Writes a model of Llama 3.2 Vision's shape as an Mllama checkpoint, which transformers' own class and other
    engines load.

    A model that was imported from Mllama goes back bit for bit. A retrofit is taken if it has the same shape
    (`mllama_shape.py` tells the options): a Llama, Mllama's vision tower and blocks of Mllama's kind. The checkpoint
    gives the model's logits to rounding, with one exception: for text that sees no image in a batch or a row with
    images, Mllama adds its attention branch, this package adds nothing. Gates and norms, float32 in a retrofit, get
    the dtype of the model, as Mllama loads them.

    Reads the weights of a folder one by one, so that one file of the result (5 GB at most) has to fit into memory, not
    the model.

    Args:
        source (`str`, `Path` or [`XAttnForConditionalGeneration`]): a folder, a Hub id or a loaded model.
        output (`str` or `Path`): a new or empty folder.

    Raises:
        ValueError: if the model has another shape (the message lists all differences), if its tensors do not fit its
            configuration, or if `output` is not empty.
    """
    check_folder(output)
    changed: PreTrainedConfig
    state: Mapping[str, torch.Tensor]
    if isinstance(source, PreTrainedModel):
        folder, changed, state = None, source.config, source.state_dict()
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        dtype = source.dtype
    else:
        folder = _folder_of(source)
        headers = read_headers(folder)
        changed = _config_of(folder, headers)
        side_files(folder)
        state, shapes = FolderTensors(folder, headers), {name: header.shape for name, header in headers.items()}
        dtype = torch.float32
    if isinstance(changed.dtype, torch.dtype):
        dtype = changed.dtype
    if not isinstance(changed, XAttnConfig):
        raise ValueError(f"`source` must be a model with cross-attention blocks, got a {changed.model_type!r} model.")
    original = changed.source_config or {}
    imported = original.get("model_type") in EXPORTABLE
    config = AutoConfig.for_model(**original) if imported else mllama_config(changed)
    recipe = _recipe(config)
    expected = _shapes(_skeleton_of_source(config))
    for name, shape in expected.items():
        _check_parts(name, shape, parts_of(name, recipe, changed), shapes, missing_rows(name, changed))
    with WholeFolder(output) as target_folder:
        writer = FolderWriter(target_folder)
        for number, names in enumerate(_shards(expected, dtype), start=1):
            tensors = {}
            for name in names:
                parts = [state[part] for part in parts_of(name, recipe, changed)]
                tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
                tensor = with_rows(tensor, missing_rows(name, changed))
                tensors[mllama.original_name(name)] = tensor.reshape(expected[name]).to(dtype).contiguous()
            writer.write(f"model-{number:05d}.safetensors", tensors)
        writer.finish()
        config.architectures = [MLLAMA_CLASS]
        config.save_pretrained(target_folder)
        if folder is not None:
            copy_side_files(folder, target_folder)
            write_processor(folder, target_folder, config.image_token_id)
        elif isinstance(source, PreTrainedModel) and source.generation_config is not None:
            source.generation_config.save_pretrained(target_folder)


def _check_parts(
    name: str, shape: tuple[int, ...], parts: list[str], shapes: dict[str, tuple[int, ...]], added: int
) -> None:
    """Raises a `ValueError` if parts of an exported tensor are missing, or do not give the tensor's shape with `added`
    rows.
    """
    if missing := [part for part in parts if part not in shapes]:
        raise ValueError(f"`source` is not complete: expected {missing[0]}, which becomes {name}, but it is missing.")
    made = shapes[parts[0]]
    if len(parts) > 1:
        made = (sum(shapes[part][0] for part in parts), *made[1:])
    if added:
        made = (made[0] + added, *made[1:])
    if not fits(made, shape):
        raise ValueError(
            f"`source` has another shape than its configuration: expected {shape} for {name}, got {tuple(made)}."
        )


def _recipe(config: PreTrainedConfig) -> Recipe:
    if config.model_type not in RECIPES:
        raise ValueError(
            f"`source` must be a model of type {sorted(RECIPES)}, got a {config.model_type!r} model, which cannot be "
            "imported. For a text-only model use `retrofit`."
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


def _config_of(folder: Path, headers: dict[str, Header]) -> PreTrainedConfig:
    """Reads the configuration in a folder, after its sizes were checked.

    Raises:
        ValueError: for a configuration that no model has, or that transformers cannot read.
    """
    try:
        fields = check_config_file(folder, {})
        check_layer_count(fields, len(headers), f"{folder / 'config.json'}")
        return AutoConfig.from_pretrained(folder)
    except (OSError, ImportError):
        raise
    except Exception as error:
        raise ValueError(f"`source` ({folder}): {error if str(error) else type(error).__name__}") from error


def _folder_of(source: str | Path) -> Path:
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
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(source), ignore_patterns=["*.bin", "*.pth", "*.pt", "original/*"]))


def _shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes of the tensors in a checkpoint of this model."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}


def _shards(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> list[list[str]]:
    """Splits names into files of at most `SHARD_BYTES`, in the given order."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        bytes_ = math.prod(shape) * dtype.itemsize
        if shards[-1] and size + bytes_ > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += bytes_
    return shards


def _skeleton(config: XAttnConfig) -> XAttnForConditionalGeneration:
    with torch.device("meta"):
        return XAttnForConditionalGeneration._from_config(config)


def _skeleton_of_source(config: PreTrainedConfig) -> PreTrainedModel:
    from transformers import MllamaForConditionalGeneration

    with torch.device("meta"):
        return MllamaForConditionalGeneration._from_config(config)


def _plan(recipe: Recipe, headers: dict[str, Header]) -> dict[str, list]:
    """Returns, for each tensor of the source, the target parameters and their shapes.

    Raises:
        ValueError: if names or shapes do not fit the model type, or if tensors are missing.
    """
    skeleton = _skeleton(recipe.config)
    expected = _shapes(skeleton)
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
    recipe = _recipe(source.config)
    tied = getattr(source, "all_tied_weights_keys", None) or {}
    state = {name: tensor for name, tensor in source.state_dict().items() if name not in tied}
    plan = _plan(recipe, {name: Header("", tuple(tensor.shape)) for name, tensor in state.items()})
    with no_init_weights():
        model = XAttnForConditionalGeneration._from_config(recipe.config, dtype=source.dtype)
    model.tie_weights()
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name, tensor in state.items():
            for target, shape in plan[name]:
                own[target.name].copy_(take(tensor, target, shape))
    model.generation_config = source.generation_config or GenerationConfig()
    return model.to(source.device).train(source.training)
