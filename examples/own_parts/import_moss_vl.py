"""Imports a MOSS-VL checkpoint, for one image in each text (see `moss_vl_parts.py`).

python examples/own_parts/import_moss_vl.py SOURCE OUTPUT --size HEIGHT WIDTH --place TOKENS

SOURCE is a folder or a Hub id. All images get the same size, of multiples of 32. TOKENS is the number of text tokens in
front of the image marker in each text, such as those of the system prompt. To use the result, import `moss_vl_parts`
first. It has the processor that makes the `position_ids` of a text; the commands of `hf-xattn` do not find it.

| MOSS-VL (`model.`) | here (`model.`) |
|---|---|
| `language_model.embed_tokens`, `.norm`, `lm_head` | `text_model.model.embed_tokens`, `.norm`, `text_model.lm_head` |
| `language_model.layers.<self>` | `text_model.model.layers.<i>`, a Qwen3's |
| `language_model.layers.<cross>.cross_attn.*`, norms, `mlp`, gates | a block, as of Llama 3.2 Vision |
| `visual.{patch_embed,pos_embed,blocks}` | `vision_tower.*` |
| `visual.merger`, `separator_token` | `connector.layers.0`, `.separator` |
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from moss_vl_parts import NAME, MossVLProcessor, MossVLTowerConfig
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, Qwen3Config, SiglipImageProcessor

from hf_xattn import CrossAttentionConfig, XAttnConfig, XAttnForConditionalGeneration
from hf_xattn.importers import checkpoints, import_checkpoint
from hf_xattn.importers.conversion import Recipe, Target, block_names, folder_of, renamed
from hf_xattn.importers.mllama import BLOCK_RULES, places


TEXT_FIELDS = """
    vocab_size hidden_size hidden_act num_attention_heads num_key_value_heads head_dim intermediate_size rms_norm_eps
    max_position_embeddings attention_bias attention_dropout initializer_range bos_token_id eos_token_id pad_token_id
    """.split()
TOWER_FIELDS = """
    depth hidden_size hidden_act intermediate_size num_heads in_channels patch_size spatial_merge_size
    temporal_patch_size num_position_embeddings out_hidden_size initializer_range
    """.split()
LAYERS = "model.text_model.model.layers"
PREPROCESSOR = "preprocessor_config.json"
RULES = [
    (r"model\.visual\.((?:patch_embed|pos_embed|blocks)\..+)", r"model.vision_tower.\1"),
    (r"model\.visual\.merger\.(.+)", r"model.connector.layers.0.\1"),
    (r"model\.separator_token", r"model.connector.layers.0.separator"),
    (r"model\.language_model\.((?:embed_tokens|norm)\.weight)", r"model.text_model.model.\1"),
    (r"lm_head\.weight", r"model.text_model.lm_head.weight"),
]


class MossVLConfig(PreTrainedConfig):
    """The configuration of a MOSS-VL checkpoint, with its parts as they are in the file."""

    model_type = "moss_vl"

    text_config: dict | None = None
    vision_config: dict | None = None
    image_token_id: int | None = None


def recipe(config: Any, image_size: list[int], place: int) -> Recipe:
    """Returns the recipe that converts a MOSS-VL checkpoint."""
    text, vision = config.text_config, config.vision_config
    check_reading(text, vision)
    layers: Any = SimpleNamespace(**text)
    where = places(layers)  # they stand as in Llama 3.2 Vision
    cross = sorted(set(text["cross_attention_layers"]))
    decoder_places = [where[index] for index in cross]
    num_layers = text["num_hidden_layers"] - len(cross)
    decoder = Qwen3Config(
        **{name: text[name] for name in TEXT_FIELDS if name in text},
        num_hidden_layers=num_layers,
        rope_parameters={"rope_type": "default", "rope_theta": text["rope_theta"]},  # one place on all axes: plain rope
        tie_word_embeddings=False,
    )
    tower = MossVLTowerConfig(
        **{name: vision[name] for name in TOWER_FIELDS if name in vision},
        deepstack_visual_indexes=[],
        image_size=image_size,
    )
    target = XAttnConfig(
        text_config=decoder,
        vision_config=tower,
        cross_attention_config=blocks_of(decoder, tower, text, place),
        cross_attention_layers=decoder_places,
        image_token_id=config.image_token_id,
        image_visibility="previous",
        connector_type=NAME,
        vision_feature_layer=[-1, *(index + 1 for index in sorted(vision["deepstack_visual_indexes"]))],
        dtype=config.dtype,
    )
    blocks = dict(zip(cross, block_names(LAYERS, decoder_places, num_layers)))
    return Recipe(target, functools.partial(targets, where, blocks))


def blocks_of(decoder: Any, tower: MossVLTowerConfig, text: dict[str, Any], place: int) -> CrossAttentionConfig:
    options = {"grid": tower.grid, "place": place, "theta": float(text["rope_theta"])}
    options["sections"] = list(text["rope_scaling"]["mrope_section"])
    return CrossAttentionConfig(
        hidden_size=decoder.hidden_size,
        context_size=tower.out_hidden_size,
        num_attention_heads=decoder.num_attention_heads,
        num_key_value_heads=decoder.num_key_value_heads,
        head_dim=decoder.head_dim,
        intermediate_size=decoder.intermediate_size,
        hidden_act=decoder.hidden_act,
        norm_eps=decoder.rms_norm_eps,
        attention_bias=decoder.attention_bias,
        attention_dropout=decoder.attention_dropout,
        qk_norm=True,
        gate_init=0.0,
        zero_init=False,
        position=NAME,
        position_options=options,
        initializer_range=decoder.initializer_range,
    )


def check_reading(text: dict[str, Any], vision: dict[str, Any]) -> None:
    """Raises a `ValueError` for what no published MOSS-VL has, and this import would read otherwise."""
    scaling = text.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    for name, found, expected in (
        ("rope_scaling.rope_type", kind in ("default", "mrope"), "'default'"),
        ("rope_scaling.mrope_interleaved", scaling.get("mrope_interleaved") is True, "True"),
        ("rope_scaling.mrope_section", len(scaling.get("mrope_section") or ()) == 3, "three numbers"),
        ("rope_theta", isinstance(text.get("rope_theta"), (int, float)), "a number"),
        ("deepstack_visual_indexes", isinstance(vision.get("deepstack_visual_indexes"), list), "a list"),
    ):
        if not found:
            parts = {**text, **vision}
            got = parts.get(name) if "." not in name else scaling
            raise ValueError(f"Expected `{name}` of the checkpoint to be {expected}, got {got!r}.")


def targets(where: dict[int, int], blocks: dict[int, str], name: str) -> list[Target] | None:
    layer = re.fullmatch(r"model\.language_model\.layers\.(\d+)\.(.+)", name)
    if name.endswith("rotary_emb.inv_freq") or name.endswith("rotary_pos_emb.inv_freq"):
        return []  # buffers, which the model computes
    if layer is None:
        new = renamed(name, RULES)
    elif (index := int(layer[1])) not in where:
        return None
    elif index in blocks:
        rules = [*BLOCK_RULES, (r"cross_attn\.((?:q|k|v|o)_proj)\.bias", r"attn.\1.bias")]
        part = renamed(layer[2], rules)
        new = None if part is None else f"{blocks[index]}.{part}"
    else:
        new = f"{LAYERS}.{where[index]}.{layer[2]}"
    return None if new is None else [Target(new)]


def import_moss_vl(source: str, image_size: list[int], place: int) -> XAttnForConditionalGeneration:
    """Converts a MOSS-VL checkpoint, a folder or a Hub id, to a model of this package.

    Args:
        image_size (`list[int]`): height and width of every picture.
        place (`int`): text tokens in front of the marker of every picture.
    """
    AutoConfig.register(MossVLConfig.model_type, MossVLConfig, exist_ok=True)
    known = checkpoints.RECIPES.get(MossVLConfig.model_type)
    checkpoints.RECIPES[MossVLConfig.model_type] = functools.partial(recipe, image_size=image_size, place=place)
    try:
        return import_checkpoint(source)
    finally:
        checkpoints.RECIPES.pop(MossVLConfig.model_type)
        if known is not None:
            checkpoints.RECIPES[MossVLConfig.model_type] = known


def processor_of(source: str, model: XAttnForConditionalGeneration) -> MossVLProcessor:
    """The source's tokenizer, and its normalization of pictures of the one size."""
    folder = folder_of(source)
    read = json.loads((folder / PREPROCESSOR).read_text())
    tower: Any = model.config.vision_config
    height, width = tower.image_size
    resize = SiglipImageProcessor(
        size={"height": height, "width": width}, **{name: read[name] for name in ("image_mean", "image_std")}
    )
    return MossVLProcessor.for_model(model, resize, AutoTokenizer.from_pretrained(folder))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a folder or a Hub id of MOSS-VL")
    parser.add_argument("output", help="a new folder")
    parser.add_argument("--size", type=int, nargs=2, required=True, metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--place", type=int, required=True, metavar="TOKENS")
    given = parser.parse_args(arguments)
    if Path(given.output).exists():
        parser.error(f"expected a new folder, got {given.output}, which exists: remove it, or name another one")
    if given.place < 0:
        parser.error(f"expected --place to be 0 or more tokens, got {given.place}")
    try:
        if not (folder_of(given.source) / PREPROCESSOR).is_file():
            parser.error(f"expected {given.source} to hold {PREPROCESSOR}, which says how pictures are normalized")
        model = import_moss_vl(given.source, given.size, given.place)
    except ValueError as error:
        parser.error(str(error))
    processor = processor_of(given.source, model)
    model.save_pretrained(given.output, with_code=True)
    processor.save_pretrained(given.output)


if __name__ == "__main__":
    main()
