"""Imports Llama 3.2 Vision (`MllamaForConditionalGeneration`), and exports models of its shape in its format.

The text model of Mllama is one list of layers. Some layers have cross-attention in place of self-attention. The
self-attention layers alone are a Llama. Each cross-attention layer becomes a block in front of the next self-attention
layer. A cross-attention layer at the end of the list becomes a block after the last layer.

| Mllama (`language_model.`) | here (`model.text_model.`) |
|---|---|
| `embed_tokens` (vocab_size + 8 rows) | `model.embed_tokens`, and its last 8 rows `model.embed_tokens.additional` |
| `layers.<self>` | `model.layers.<i>` |
| `layers.<cross>.cross_attn.{q,k,v,o}_proj`, `{q,k}_norm` | `model.layers.<i>.cross_attention_block.attn.*` |
| `layers.<cross>.{input_layernorm,cross_attn_attn_gate}` | `...block.{attn_norm,attn_gate}` |
| `layers.<cross>.{post_attention_layernorm,mlp,cross_attn_mlp_gate}` | `...block.{mlp_norm,mlp,mlp_gate}` |
| several `layers.<cross>` in a row | `...block.0`, `...block.1`, ... |
| `vision_model`, `multi_modal_projector` | `model.vision_tower`, `model.connector.layers.0` |

There is one difference: for a text token that sees no image, Mllama adds the attention branch of a block, which is then
an average of all image tokens. This package adds nothing.

A model that was imported from Mllama has its shape. A retrofitted model has this shape with these options:

    retrofit(llama, mllama_vision_model, connector_type="linear", image_visibility="latest_group", image_token_id=...,
             cross_attention={"qk_norm": True, "norm_eps": llama.config.rms_norm_eps, "gate": "tanh"})
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    LlamaConfig,
    MllamaConfig,
    MllamaForConditionalGeneration,
    MllamaProcessor,
    MllamaTextConfig,
    MllamaVisionConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import PROCESSOR_NAME, logging

from ..configuration_xattn import XAttnConfig
from ..modeling_xattn import XAttnForConditionalGeneration
from ..utils.checkpoint_files import INTEGERS
from ..utils.whole_folder import whole_folder
from .conversion import (
    LLAMA_FIELDS,
    FolderWriter,
    Recipe,
    Target,
    block_config,
    block_names,
    check_folder,
    check_names,
    check_shape,
    config_of,
    copy_side_files,
    folder_of,
    read_headers,
    read_tensor,
    renamed,
    shapes_of,
    side_files,
)


logger = logging.get_logger(__name__)

ADDITIONAL_TOKENS = 8  # fixed in transformers' model

BLOCK_RULES = [
    (r"cross_attn\.((?:q|k|v|o)_proj|(?:q|k)_norm)\.weight", r"attn.\1.weight"),
    (r"input_layernorm\.weight", r"attn_norm.weight"),
    (r"post_attention_layernorm\.weight", r"mlp_norm.weight"),
    (r"mlp\.((?:gate|up|down)_proj)\.weight", r"mlp.\1.weight"),
    (r"cross_attn_(attn|mlp)_gate", r"\1_gate"),
]
RULES = [
    (r"(?:model\.)?vision_model\.(.+)", r"model.vision_tower.\1"),
    (r"(?:model\.)?multi_modal_projector\.(.+)", r"model.connector.layers.0.\1"),
    (r"(?:language_model\.)?lm_head\.weight", r"model.text_model.lm_head.weight"),
    (r"(?:model\.)?language_model\.(?:model\.)?norm\.weight", r"model.text_model.model.norm.weight"),
]
EMBEDDING_OF_MLLAMA = r"(?:model\.)?language_model\.(?:model\.)?embed_tokens\.weight"
# Names in transformers' model, and those in the published checkpoints.
ORIGINAL_RULES = [
    (r"model\.language_model\.(.+)", r"language_model.model.\1"),
    (r"model\.((?:vision_model|multi_modal_projector)\..+)", r"\1"),
    (r"lm_head\.weight", r"language_model.lm_head.weight"),
]
LAYER_OF_MLLAMA = r"(?:model\.)?language_model\.(?:model\.)?layers\.(\d+)\.(.+)"

# Fields of a saved configuration that are not copied: both names of `image_token_index`, and those that transformers
# writes anew.
RENAMED = ("model_type", "image_token_id", "image_token_index", "transformers_version")
SHARD_BYTES = 5 * 10**9
IMAGE_TOKEN = "<|image|>"  # the marker of Mllama, if the tokenizer names no other
# Files of the source's processor, which are not copied: Mllama's processor writes files of its own.
REPLACED = (PROCESSOR_NAME, "preprocessor_config.json", "video_preprocessor_config.json")
EMBEDDING, LAYERS = "model.text_model.model.embed_tokens", "model.text_model.model.layers"
HEAD = "model.text_model.lm_head.weight"


def places(text_config: MllamaTextConfig) -> dict[int, int]:
    """Returns a layer of the new decoder for each layer of the source.

    A self-attention layer becomes this layer. A cross-attention layer becomes a block in front of it.

    Raises:
        ValueError: for a layer that does not exist, or if no layer has self-attention.
    """
    cross = set(text_config.cross_attention_layers or ())
    if outside := sorted(index for index in cross if index not in range(text_config.num_hidden_layers)):
        raise ValueError(
            f"`cross_attention_layers`: expected indices from 0 to {text_config.num_hidden_layers - 1}, because the "
            f"text model has {text_config.num_hidden_layers} layers, got {outside[:5]}."
        )
    if len(cross) == text_config.num_hidden_layers:
        raise ValueError(
            f"`cross_attention_layers`: expected at least one of the {len(cross)} layers to have self-attention, got "
            "cross-attention in all of them."
        )
    result, count = {}, 0
    for index in range(text_config.num_hidden_layers):
        result[index] = count
        count += index not in cross
    return result


def recipe(config: MllamaConfig) -> Recipe:
    """Returns the recipe that converts an Mllama checkpoint."""
    text, vision = config.text_config, config.vision_config
    assert isinstance(text, MllamaTextConfig) and isinstance(vision, MllamaVisionConfig)
    where = places(text)
    cross = sorted(set(text.cross_attention_layers or ()))
    decoder_places = [where[index] for index in cross]
    num_layers = text.num_hidden_layers - len(cross)
    fields: dict[str, Any] = {name: getattr(text, name) for name in (*LLAMA_FIELDS, "num_key_value_heads")}
    fields["head_dim"] = text.hidden_size // text.num_attention_heads
    fields["tie_word_embeddings"] = False  # transformers' Mllama has a head of its own, whatever its configuration says
    target = XAttnConfig(
        text_config=LlamaConfig(**fields, num_hidden_layers=num_layers, attention_dropout=text.dropout),
        vision_config=vision,
        cross_attention_config=block_config(
            text, context_size=text.hidden_size, num_key_value_heads=text.num_key_value_heads, qk_norm=True
        ),
        cross_attention_layers=decoder_places,
        image_token_id=config.image_token_id,
        image_visibility="latest_group",
        connector_type="linear",
        connector_bias=True,
        additional_vocab_size=ADDITIONAL_TOKENS,
        source_config=config.to_dict(),
        dtype=config.dtype,
    )
    blocks = dict(zip(cross, block_names(LAYERS, decoder_places, num_layers)))
    return Recipe(target, functools.partial(_targets, text.vocab_size, where, blocks))


def _targets(vocab_size: int, where: dict[int, int], blocks: dict[int, str], name: str) -> list[Target] | None:
    if re.fullmatch(EMBEDDING_OF_MLLAMA, name):
        return [
            Target(f"{EMBEDDING}.weight", slice(None, vocab_size)),
            Target(f"{EMBEDDING}.additional.weight", slice(vocab_size, None)),
        ]
    layer = re.fullmatch(LAYER_OF_MLLAMA, name)
    if layer is None:
        new = renamed(name, RULES)
    elif (index := int(layer[1])) not in where:
        return None
    elif index in blocks:
        part = renamed(layer[2], BLOCK_RULES)
        new = None if part is None else f"{blocks[index]}.{part}"
    else:
        new = f"{LAYERS}.{where[index]}.{layer[2]}"
    return None if new is None else [Target(new)]


def export_checkpoint(source: str | Path | XAttnForConditionalGeneration, output: str | Path) -> None:
    """Writes a model as a checkpoint of Llama 3.2 Vision, which transformers' own class and other engines load.

    An imported Llama 3.2 Vision is written back bit for bit. A retrofitted model must have the same shape: a Llama,
    Mllama's vision tower, and blocks of Mllama's kind (the docstring of this module has the options). The checkpoint
    gives the logits of the model up to rounding, except for text tokens that see no image in a call with images. Gates
    and norms, which are float32 in a retrofitted model, are rounded to the dtype of the model, because Mllama loads
    them so. Only one file of the result (at most 5 GB) has to fit into memory, not the model.

    Args:
        source (`str`, `Path` or [`XAttnForConditionalGeneration`]): a folder, a Hub id or a loaded model.
        output (`str` or `Path`): a new or empty folder.

    Raises:
        ValueError: for a model of another shape (the message lists all differences), for tensors that do not fit the
            configuration, and for an `output` that is not empty.

    Example:

    ```python
    >>> import hf_xattn
    >>> from transformers import MllamaForConditionalGeneration

    >>> model = hf_xattn.import_checkpoint("meta-llama/Llama-3.2-11B-Vision-Instruct")
    >>> hf_xattn.export_checkpoint(model, "exported")
    >>> model = MllamaForConditionalGeneration.from_pretrained("exported")
    ```
    """
    check_folder(output)
    changed: PreTrainedConfig
    read: Callable[[str], torch.Tensor]
    if isinstance(source, PreTrainedModel):
        state = source.state_dict()
        folder, changed, read, dtype = None, source.config, state.__getitem__, source.dtype
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if HEAD in state and state[HEAD].data_ptr() == state[f"{EMBEDDING}.weight"].data_ptr():
            del shapes[HEAD]  # a folder does not hold a tied head either
        quantized = [name for name, tensor in state.items() if not tensor.is_floating_point()]
    else:
        folder = folder_of(source)
        headers = read_headers(folder)
        side_files(folder)
        changed, read = config_of(folder, headers), functools.partial(read_tensor, folder, headers)
        dtype = changed.dtype if isinstance(changed.dtype, torch.dtype) else torch.float32
        shapes = {name: header.shape for name, header in headers.items()}
        quantized = [name for name, header in headers.items() if header.dtype in INTEGERS]
    if quantized:
        raise ValueError(
            f"Expected `source` with floating-point weights, got {quantized[0]}, which is quantized ({len(quantized)} "
            "are). Export the model before it is quantized, or `dequantize()` it."
        )
    if not isinstance(changed, XAttnConfig):
        raise ValueError(f"`source` must be a model with cross-attention blocks, got a {changed.model_type!r} model.")
    config: Any = _mllama_config(changed)
    config.dtype = dtype
    made = recipe(config)
    with torch.device("meta"):
        expected = shapes_of(MllamaForConditionalGeneration._from_config(config))
    parts_of = {name: _parts_of(name, made, changed, shapes) for name in expected}
    check_names("`source`", shapes, chain(*parts_of.values()))
    for name, parts in parts_of.items():
        rows = sum(sum(shapes[part][:1]) for part in parts) + _missing_rows(name, changed)
        check_shape("`source`", name, (rows, *shapes[parts[0]][1:]), expected[name])
    with whole_folder(output) as target_folder:
        writer = FolderWriter(target_folder)
        made_of = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in expected.items()}
        files = split_torch_state_dict_into_shards(made_of, max_shard_size=SHARD_BYTES).filename_to_tensors
        for file, names in files.items():
            tensors = {}
            for name in names:
                pieces = [read(part) for part in parts_of[name]]
                if added := _missing_rows(name, changed):
                    pieces.append(pieces[0].new_zeros(added, *pieces[0].shape[1:]))
                tensor = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
                tensors[renamed(name, ORIGINAL_RULES) or name] = tensor.reshape(expected[name]).to(dtype).contiguous()
            writer.write(file, tensors)
        writer.finish()
        config.architectures = [MllamaForConditionalGeneration.__name__]
        config.save_pretrained(target_folder)
        if folder is not None:
            copy_side_files(folder, target_folder)
            _write_processor(folder, target_folder, config.image_token_id)
        elif isinstance(source, PreTrainedModel) and source.generation_config is not None:
            source.generation_config.save_pretrained(target_folder)


def _mllama_config(config: XAttnConfig) -> MllamaConfig:
    """Returns the configuration of the Mllama that equals a model.

    For an imported model this is the configuration of the source, with the changes since then.

    Raises:
        ValueError: for a model of another shape. The message lists each difference.
    """
    original = dict(config.source_config or {})
    if original.get("model_type") != "mllama":
        original = {}
    of_text: dict[str, Any] = original.pop("text_config", None) or {}
    if differences := _differences(config):
        listed = "".join(f"\n- `{name}`: expected {expected}, found {found}" for name, expected, found in differences)
        raise ValueError(
            "`source` cannot be written in Llama 3.2 Vision's format, the only one for exports: its shape differs:"
            + listed
        )
    text: Any = config.text_config
    cross = [place + number for number, place in enumerate(sorted(config.cross_attention_layers))]
    fields = {name: getattr(text, name) for name in (*LLAMA_FIELDS, "num_key_value_heads")}
    text_config = MllamaTextConfig(
        **of_text
        | fields
        | {
            "tie_word_embeddings": False,  # Mllama's embedding has more rows than its head
            "num_hidden_layers": text.num_hidden_layers + len(cross),
            "cross_attention_layers": cross,
            "dropout": config.cross_attention_config.attention_dropout,
        }
    )
    assert [places(text_config)[index] for index in cross] == sorted(config.cross_attention_layers)
    assert config.vision_config is not None and config.image_token_id is not None
    parts = {"text_config": text_config.to_dict(), "vision_config": config.vision_config.to_dict()}
    kept = {name: value for name, value in original.items() if name not in RENAMED}
    return MllamaConfig(**kept | parts | {"image_token_index": config.image_token_id})


def _differences(config: XAttnConfig) -> list[tuple[str, Any, Any]]:
    """Returns the name, the expected value and the found value of each difference from Mllama."""
    text: Any = config.text_config
    wanted: dict[str, Any] = {
        "text_config.model_type": "llama",
        "vision_config.model_type": "mllama_vision_model",
        "connector_type": "linear",
        "connector_bias": True,
        "image_visibility": "latest_group",
        "additional_vocab_in_head": False,
    }
    if text.model_type == "llama":
        wanted |= _of_llama(config, text)
    found = []
    for name, expected in wanted.items():
        value: Any = config
        for field in name.split("."):
            value = getattr(value, field, None)
        if value != expected and not (name == "text_config.head_dim" and value is None):
            found.append((name, repr(expected), repr(value)))
    if 0 in config.cross_attention_layers and config.source_config is None:
        # transformers' Mllama reads the length of the text from the cache of layer 0. With a block in front of it, this
        # cache would hold an image.
        found.append(("cross_attention_layers", "no block in front of layer 0", str(config.cross_attention_layers)))
    if config.image_token_id is None:
        found.append(("image_token_id", "the id of the image marker", "None"))
    if (added := config.additional_vocab_size) > ADDITIONAL_TOKENS:
        found.append(("additional_vocab_size", f"at most {ADDITIONAL_TOKENS}, as in Mllama", str(added)))
    return found


def _of_llama(config: XAttnConfig, text: Any) -> dict[str, Any]:
    """Returns what Mllama expects of a Llama, for which it has no options, and of the blocks, whose sizes are those of
    its other layers.
    """
    head_dim = text.hidden_size // text.num_attention_heads
    of_text = {
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": head_dim,
        "attention_dropout": config.cross_attention_config.attention_dropout,  # Mllama has one field for all attention
        "quantization_config": None,
    }
    of_blocks = {
        "context_size": text.hidden_size,
        "num_attention_heads": text.num_attention_heads,
        "num_key_value_heads": text.num_key_value_heads,
        "head_dim": head_dim,
        "intermediate_size": text.intermediate_size,
        "hidden_act": text.hidden_act,
        "norm_type": "rmsnorm",
        "norm_eps": text.rms_norm_eps,
        "qk_norm_eps": text.rms_norm_eps,
        "qk_norm": True,
        "gate": "tanh",
        "gate_granularity": "scalar",
        "mlp_type": "gated",
        **dict.fromkeys(("attention_bias", "mlp_bias", "quiet_softmax", "position_bias", "context_norm"), False),
        "position": "none",
    }
    parts = {"text_config": of_text, "cross_attention_config": of_blocks}
    return {f"{part}.{name}": value for part, fields in parts.items() for name, value in fields.items()}


def _parts_of(name: str, made: Recipe, config: XAttnConfig, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Returns the names of the parameters that make up a tensor of Mllama, in the order of its rows."""
    parts = [target.name for target in made.targets(name) or []]
    if parts == [HEAD] and HEAD not in shapes and config.text_config.tie_word_embeddings:
        return [f"{EMBEDDING}.weight"]
    if not config.additional_vocab_size:
        parts = [part for part in parts if part != f"{EMBEDDING}.additional.weight"]
    return parts


def _missing_rows(name: str, config: XAttnConfig) -> int:
    """Returns how many rows only Mllama's tensor has, for tokens that the model lacks. They are filled with zeros."""
    return ADDITIONAL_TOKENS - config.additional_vocab_size if re.fullmatch(EMBEDDING_OF_MLLAMA, name) else 0


def _write_processor(source: Path, target: Path, image_token_id: int) -> None:
    """Replaces a copied `XAttnProcessor` by a `MllamaProcessor` with the same parts. Warns of parts that do not fit."""
    file = source / PROCESSOR_NAME
    if not file.is_file() or json.loads(file.read_text()).get("processor_class") != "XAttnProcessor":
        return
    processor: Any = AutoProcessor.from_pretrained(source)
    for name in REPLACED:
        (target / name).unlink(missing_ok=True)
    tokenizer, image_processor = processor.tokenizer, processor.image_processor
    problems = []
    if not hasattr(image_processor, "max_image_tiles"):
        problems.append(f"an image processor that makes tiles, found {type(image_processor).__name__}")
    if tokenizer.bos_token is None:
        problems.append("a tokenizer with a start token (`bos_token`), found none")
    if problems:
        logger.warning(f"No processor was written. Mllama's needs {'; and '.join(problems)}.")
        return
    marker = tokenizer.convert_ids_to_tokens(image_token_id)
    if marker != IMAGE_TOKEN:  # a `MllamaProcessor` reads the attribute `image_token`
        tokenizer = AutoTokenizer.from_pretrained(source, image_token=marker)
    MllamaProcessor(image_processor, tokenizer, chat_template=processor.chat_template).save_pretrained(target)
