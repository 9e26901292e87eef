"""Every argument of every public function: the right answer, or an error that names it. See `surface.py`.

Signatures are read, so a new argument or a new function without a row fails here.
"""

import dataclasses
import functools
import inspect
import tempfile
from pathlib import Path

import pytest
import torch
from surface import (
    KINDS,
    NOTHING,
    TRANSFORMERS,
    Fine,
    Surface,
    Wrong,
    check_case,
    check_misspelt,
    needs,
    switch,
    tensor,
    value,
)
from surface_adapters import SURFACES as ADAPTERS
from surface_images import IMAGE_MASK, MASK, PIXELS, RATIO_IDS, RATIO_MASK, ROWS, STATES, image_rows
from surface_images import SURFACES as IMAGES
from surface_maps import SURFACES as MAPS
from surface_parts import SURFACES as PARTS
from surface_processor import processor_surfaces
from surface_saving import SURFACES as SAVING
from surface_training import SURFACES as TRAINING
from surface_web import SURFACES as WEB
from tiny_checkpoints import make_text_checkpoint, make_vision_checkpoint
from tiny_models import TEXT_CONFIGS, make_model, make_text, token_ids, vision_config
from transformers import AutoModel, AutoTokenizer, PreTrainedConfig
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

import hf_xattn
from hf_xattn import (
    CrossAttentionConfig,
    GatedCrossAttention,
    GatedCrossAttentionBlock,
    XAttnConfig,
    XAttnForConditionalGeneration,
    XAttnModel,
    XAttnProcessor,
    freeze_base,
    importers,
    retrofit,
)
from hf_xattn.cache import image_cache
from hf_xattn.configuration_xattn import PerceiverConfig
from hf_xattn.images.image_inputs import IMAGE_ARGUMENTS
from hf_xattn.processing import image_limits
from hf_xattn.serving import web
from hf_xattn.storage import image_files
from hf_xattn.utils.transformers_api import AutoImageProcessor


IDS = token_ids()


# --- what the functions work on, made once

FOLDER = tempfile.TemporaryDirectory()  # removed when the tests end


@functools.cache
def model():
    return make_model()


@functools.cache
def tiled():
    """A model whose vision tower reads tiles."""
    from tiny_mllama import make_mllama

    return importers.import_checkpoint(make_mllama())


@functools.cache
def folder():
    """A folder with checkpoints, a processor's parts and an image cache."""
    path = Path(tempfile.mkdtemp(dir=FOLDER.name))
    make_text_checkpoint(path / "tokenizer")
    make_vision_checkpoint(path / "image_processor")
    make_text().save_pretrained(path / "text")
    AutoModel.from_config(vision_config()).save_pretrained(path / "vision")
    image_files.save_image_cache(images(), path / "images.safetensors", model())
    return path


@functools.cache
def images():
    return model().encode_images(pixel_values=PIXELS)


@functools.cache
def parts():
    return {
        "image_processor": AutoImageProcessor.from_pretrained(folder() / "image_processor"),
        "tokenizer": AutoTokenizer.from_pretrained(folder() / "tokenizer"),
    }


# --- calls


def beside(given):
    """What an image argument needs beside it, in `forward`, `generate` and `encode_images`."""
    names = set(given)
    if names & {"aspect_ratio_ids", "aspect_ratio_mask"}:
        shapes = {"aspect_ratio_ids": RATIO_IDS, "aspect_ratio_mask": RATIO_MASK}
        return needs(given, pixel_values=torch.randn(1, 1, 4, 3, 28, 28), **shapes)
    if names & {"image_rows"}:
        return needs(given, pixel_values=PIXELS if given["image_rows"] is None else PIXELS[:1])
    if names & {"cross_attention_mask"}:
        return needs(given, cross_attention_states=STATES)
    if names & {"image_mask", "image_attention_mask", "cache", "cache_dtype"}:
        return needs(given, pixel_values=PIXELS)
    return given


def call_of(method, of_body=False, **needed):
    def call(**given):
        tiles = set(given) & {"aspect_ratio_ids", "aspect_ratio_mask"}
        served = tiled() if tiles else model()
        served = served.model if of_body else served
        given = beside(given)
        if "input_ids" in needed and "inputs_embeds" not in given and "inputs" not in given:
            given = needs(given, input_ids=torch.tensor([[96, 5, 6, 7]]) if tiles else IDS)
        extra = {name: value for name, value in needed.items() if name != "input_ids"}
        return getattr(served, method)(**needs(given, **extra))

    return torch.no_grad()(call)


CACHE = value(none=Fine(None), kind=((STATES, STATES),))
TEXT = {
    "input_ids": tensor(IDS, none=Wrong(None, "none"), size=IDS[:, :0], dtype=IDS.float()),
    "attention_mask": tensor(
        torch.ones(2, 7),
        none=Fine(None),
        size=torch.ones(2, 6),
        dtype=Fine(torch.ones(2, 7, dtype=torch.bool)),
    ),
    "position_ids": tensor(
        torch.arange(7)[None],
        none=Fine(None),
        size=torch.arange(6)[None],
        dtype=torch.arange(7)[None].float(),
    ),
    "cache": CACHE,
    "inputs_embeds": tensor(
        torch.zeros(2, 7, 32),
        none=Wrong(None, "none"),
        size=torch.zeros(2, 7, 31),
        dtype=torch.zeros(2, 7, 32).long(),
    ),
    "use_cache": switch(),
    "output_attentions": switch(),
    "output_cross_attentions": switch(),
    "return_dict": switch(),
    "image_inputs": value(none=Fine(None), kind={"pixel_values": PIXELS}),
}
HEAD = {
    "labels": tensor(IDS, none=Fine(None), size=IDS[:, 1:], dtype=IDS.float()),
    "logits_to_keep": value(none=Fine(None), kind="all", size=-1),
}


@torch.no_grad()
def call_layer(make, **given):
    config = CrossAttentionConfig(hidden_size=32, num_attention_heads=4)
    return make(config)(**needs(given, hidden_states=torch.zeros(2, 7, 32), cross_attention_states=STATES))


LAYER = {
    "hidden_states": tensor(
        torch.zeros(2, 7, 32),
        none=Wrong(None, "None|required"),
        size=torch.zeros(2, 7, 31),
        dtype=torch.zeros(2, 7, 32).long(),
    ),
    "cross_attention_states": tensor(
        STATES, none=Wrong(None, "None|required"), size=Wrong(STATES[:1], "batch 2.*batch 1"), dtype=STATES.long()
    ),
    "cross_attention_mask": tensor(MASK, none=Fine(None), size=MASK[:, 1:], dtype=MASK.float()),
    "cross_attention": value(none=Fine(None), kind={"mask": MASK}),
}


def call_retrofit(**given):
    return retrofit(**needs(given, text=make_text(), vision=AutoModel.from_config(vision_config())))


FIELDS = {
    "image_token_id": value(none=Fine(None), kind="<image>", size=1000, dtype=3.0),
    "image_visibility": value(none=None, kind=3, size="first"),
    "additional_vocab_size": value(none=None, kind="2", size=-1, dtype=2.0),
    "additional_vocab_in_head": value(none=None, kind="yes", size=True),
    "connector_type": value(none=None, kind=3, size="conv"),
    "connector_options": value(none=Fine(None), kind=3, size={"pool": 2}),
    "connector_hidden_act": value(none=None, kind=3, size="gelo"),
    "connector_bias": value(none=None, kind="no"),
    "vision_feature_select_strategy": value(none=None, kind=3, size="cls"),
    "vision_feature_layer": value(none=Fine(None), kind="2", size=9, dtype=1.0),
    "vision_hidden_size": value(none=Fine(None), kind="8", size=0, dtype=8.5),
    "perceiver_config": value(none=Fine(None), kind=3, size=Wrong({"num_latents": 3}, "connector_type")),
    "cross_attention_layers": value(none=Fine(None), kind="1", rank=1, size=[9], dtype=[1.0]),
}


@torch.no_grad()
def call_cache(function, **given):
    needed = {
        "cache": images(),
        "caches": [images(), images()],
        "rows": [0],
        "path": folder() / "images.safetensors",
        "model": model(),
    }
    names = inspect.signature(function).parameters
    return function(**needs(given, **{name: needed[name] for name in names}))


ENCODED = value(none=None, kind=[1], size=EncoderDecoderCache(DynamicCache(), DynamicCache()))
MODEL = value(none=None, kind="model")
SOURCE = value(none=None, kind=3, size="/no/such/folder")
OUTPUT = value(none=None, kind=3)


def call_import(function, **given):
    return function(**needs(given, source="/no/such/folder", output=Path(tempfile.mkdtemp(dir=FOLDER.name)) / "new"))


def call_config(make, **given):
    if make is XAttnConfig:
        given = needs(given, text_config=TEXT_CONFIGS["llama"]())
        if given.get("perceiver_config") is not None and not isinstance(given["perceiver_config"], dict):
            given = needs(given, vision_config=vision_config(), connector_type="perceiver")
    return make(**given)


def own_fields(make):
    return {field.name for field in dataclasses.fields(make)} - {
        field.name for field in dataclasses.fields(PreTrainedConfig)
    }


SIZE = value(none=None, kind="8", size=0, dtype=8.5)
DERIVED = value(none=Fine(None), kind="8", size=0, dtype=8.5)
FLAG = value(none=None, kind="no", dtype=1)
NUMBER = value(none=None, kind="0.5", size=float("nan"))
CHOICE = value(none=None, kind=3, size="other")
PART = value(none=Fine(None), kind=3)
BLOCK_FIELDS = {
    **dict.fromkeys(
        ("hidden_size", "num_attention_heads", "position_bias_num_buckets", "position_bias_max_distance"), SIZE
    ),
    **dict.fromkeys(("context_size", "num_key_value_heads", "head_dim", "intermediate_size"), DERIVED),
    **dict.fromkeys(("hidden_act", "mlp_type", "norm_type", "gate", "gate_granularity", "position"), CHOICE),
    **dict.fromkeys(
        ("attention_bias", "mlp_bias", "zero_init", "qk_norm", "context_norm", "quiet_softmax", "position_bias"), FLAG
    ),
    **dict.fromkeys(("norm_eps", "attention_dropout", "gate_init", "initializer_range"), NUMBER),
    "qk_norm_eps": value(none=Fine(None), kind="0.5", size=float("nan")),
    "gate_options": value(none=Fine(None), kind=3, size={"offset": 4}),
    "position_options": value(none=Fine(None), kind=3, size={"rate": 0.5}),
}
PERCEIVER_FIELDS = {
    **dict.fromkeys(("num_latents", "num_hidden_layers", "num_attention_heads", "head_dim"), SIZE),
    **dict.fromkeys(("hidden_size", "intermediate_size"), DERIVED),
    "num_image_positions": value(none=None, kind="8", size=-1, dtype=8.5),
    "hidden_act": CHOICE,
    "qk_norm": FLAG,
    "norm_eps": NUMBER,
}
MODEL_FIELDS = {
    **FIELDS,
    "additional_vocab_scaled": value(none=None, kind="yes"),
    "text_config": value(none=None, kind=3),
    "vision_config": PART,
    "cross_attention_config": value(none=Fine(None), kind=3, size=Wrong({"hidden_size": 8}, "hidden_size.*8")),
    "source_config": value(none=Fine(None), kind="mllama"),
}

SURFACES = {
    **TRAINING,
    **MAPS,
    **ADAPTERS,
    **SAVING,
    **PARTS,
    **WEB,
    **IMAGES,
    "forward": Surface(
        XAttnForConditionalGeneration.forward, call_of("forward", input_ids=True), image_rows(**TEXT, **HEAD)
    ),
    "body": Surface(XAttnModel.forward, call_of("forward", of_body=True, input_ids=True), image_rows(**TEXT)),
    "generate": Surface(
        XAttnForConditionalGeneration.generate,
        call_of("generate", input_ids=True, max_new_tokens=2, do_sample=False),
        image_rows(
            cross_attention_states={**image_rows()["cross_attention_states"], "device": NOTHING},  # see `tensor`
            vision_features={**image_rows()["vision_features"], "device": NOTHING},
            inputs=tensor(IDS, none=NOTHING, size=IDS[:, :0], dtype=IDS.float()),
            input_ids=tensor(IDS, none=NOTHING, size=IDS[:, :0], dtype=IDS.float()),
            inputs_embeds=tensor(
                torch.zeros(2, 7, 32), none=NOTHING, size=torch.zeros(2, 7, 31), dtype=torch.zeros(2, 7, 32).long()
            ),
            cache=value(none=Fine(None), kind=Wrong(((STATES, STATES),), "tuple")),
            image_rows=value(none=Fine(None), kind=ROWS.numpy(), size=Wrong(ROWS, "generate")),
        ),
        misspelt=(ValueError, TypeError),
        fields={*IMAGE_ARGUMENTS, "inputs", "input_ids", "inputs_embeds", "cache"},
    ),
    "encode_images": Surface(
        XAttnModel.encode_images,
        call_of("encode_images", of_body=True),
        {
            **{n: cases for n, cases in image_rows().items() if n not in ("image_attention_mask", "image_rows")},
            "pixel_values": {**image_rows()["pixel_values"], "none": Wrong(None, "needs")},
            "cross_attention_states": {
                **image_rows()["cross_attention_states"],
                "none": Wrong(None, "needs"),
                "device": NOTHING,  # see `tensor`
            },
            "vision_features": {**image_rows()["vision_features"], "none": Wrong(None, "needs"), "device": NOTHING},
            "cache": CACHE,
            "cache_dtype": value(none=Fine(None), kind=8, size=Wrong("int4", "cache_dtype.*int4"), dtype=torch.int8),
        },
    ),
    "get_image_features": Surface(
        XAttnModel.get_image_features,
        call_of("get_image_features", of_body=True, pixel_values=PIXELS),
        {
            **{name: image_rows()[name] for name in ("aspect_ratio_ids", "aspect_ratio_mask")},
            "image_mask": {**image_rows()["image_mask"], "device": Fine(IMAGE_MASK.to("meta"))},
            "pixel_values": {**image_rows()["pixel_values"], "none": Wrong(None, "needs")},
            "output_hidden_states": switch(),
            "output_attentions": switch(),
            "return_dict": switch(),
        },
    ),
    "retrofit": Surface(
        retrofit,
        call_retrofit,
        {
            **FIELDS,
            "connector_type": {**FIELDS["connector_type"], "none": Fine(None)},
            "text": value(none=None, kind=3, size="/no/such/folder"),
            "vision": value(none=Fine(None), kind=3, size="/no/such/folder"),
            "layers": {  # another name of the same
                kind: Wrong(given, "cross_attention_layers") if kind != "none" and given is not NOTHING else given
                for kind, given in FIELDS["cross_attention_layers"].items()
            },
            "every": value(none=None, kind="4", size=0, dtype=4.0),
            "cross_attention": value(none=Fine(None), kind=3, size=Wrong({"hidden_size": 8}, "hidden_size.*8")),
        },
    ),
    "freeze_base": Surface(
        freeze_base,
        lambda **given: freeze_base(**needs(given, model=make_model())),
        {"model": value(none=None, kind=torch.nn.Linear(2, 2)), "vision": switch()},
    ),
    "enable_image_store": Surface(
        XAttnModel.enable_image_store,
        lambda **given: make_model().enable_image_store(**given),
        {
            "max_bytes": value(none=None, kind="1GB", size=0, dtype=1e9),
            "dtype": value(none=Fine(None), kind=8, size=Wrong("int4", "dtype.*int4"), dtype=torch.int8),
        },
    ),
    "disable_image_store": Surface(
        XAttnModel.disable_image_store, lambda **given: make_model().disable_image_store(**given), {}
    ),
    **processor_surfaces(parts),
    "mask_labels": Surface(
        XAttnForConditionalGeneration.mask_labels,
        call_of("mask_labels"),
        {"labels": tensor(IDS, none=None, rank=Fine(IDS[0]), size=Fine(IDS[:, 1:]), dtype=IDS.float())},
    ),
    "layer": Surface(
        GatedCrossAttention.forward,
        functools.partial(call_layer, GatedCrossAttention),
        {**LAYER, "output_attentions": switch()},
    ),
    "block": Surface(GatedCrossAttentionBlock.forward, functools.partial(call_layer, GatedCrossAttentionBlock), LAYER),
    "select_images": Surface(
        image_cache.select_images,
        functools.partial(call_cache, image_cache.select_images),
        {"cache": ENCODED, "rows": value(none=None, kind="all", rank=0, size=[], dtype=[0.5])},
    ),
    "combine_images": Surface(
        image_files.combine_images,
        functools.partial(call_cache, image_files.combine_images),
        {"caches": value(none=None, kind=3, rank=[[1]], size=Wrong([], "empty"))},
    ),
    "save_image_cache": Surface(
        image_files.save_image_cache,
        functools.partial(call_cache, image_files.save_image_cache),
        {"cache": ENCODED, "path": OUTPUT, "model": MODEL},
    ),
    "load_image_cache": Surface(
        image_files.load_image_cache,
        functools.partial(call_cache, image_files.load_image_cache),
        {"path": OUTPUT, "model": MODEL},
    ),
    **{
        name: Surface(
            getattr(importers, name),
            functools.partial(call_import, getattr(importers, name)),
            {"source": SOURCE, "output": OUTPUT if name != "import_checkpoint" else {**OUTPUT, "none": NOTHING}},
        )
        for name in importers.__all__
    },
    **{
        make.__name__: Surface(make, functools.partial(call_config, make), rows, fields=own_fields(make))
        for make, rows in (
            (CrossAttentionConfig, BLOCK_FIELDS),
            (PerceiverConfig, PERCEIVER_FIELDS),
            (XAttnConfig, MODEL_FIELDS),
        )
    },
}


@pytest.mark.parametrize("name", SURFACES)
def test_every_argument_has_a_row(name):
    """A new argument that nobody asked about."""
    assert SURFACES[name].rows.keys() == SURFACES[name].arguments


CASES = [
    (name, argument, kind)
    for name, surface in SURFACES.items()
    for argument, cases in surface.rows.items()
    for kind in KINDS
    if cases[kind] is not NOTHING
]


@pytest.mark.parametrize(("name", "argument", "kind"), CASES, ids=["-".join(case) for case in CASES])
def test_misfits_are_named(name, argument, kind):
    """An argument taken without a word, or an error from deep inside that names nothing."""
    check_case(SURFACES[name], argument, SURFACES[name].rows[argument][kind])


MISSPELT = [(name, argument) for name, surface in SURFACES.items() for argument in surface.rows]


@pytest.mark.parametrize(("name", "argument"), MISSPELT, ids=["-".join(case) for case in MISSPELT])
def test_misspelt_names_are_refused(name, argument):
    """A misspelt argument that is ignored."""
    check_misspelt(SURFACES[name], argument)


# Called by this package with values that it made; and without arguments.
# What the core and its extras call on a model.
INTERNAL = {
    *("add_images", "image_identity", "project_images", "taking_over"),
    *("find_numbering", "find_samples", "find_source", "images_of_nobody", "why_uncached", "zero_of_others"),
}


def test_every_public_function_has_a_table():
    """A new function, method or configuration that nobody asked about."""
    tabled = {surface.function for surface in SURFACES.values()}
    modules = (hf_xattn, importers, image_cache, image_files, web)
    assert image_limits.ImageLimits in tabled
    public = [getattr(module, name) for module in modules for name in module.__all__]
    models = (XAttnModel, XAttnForConditionalGeneration)
    with_methods = {*models, GatedCrossAttention, GatedCrossAttentionBlock, XAttnProcessor, image_cache.ImageCache}
    with_methods.add(hf_xattn.AttentionMaps)
    missing = [thing for thing in public if callable(thing) and thing not in tabled and thing not in with_methods]
    assert missing == []
    for model_class in models:
        for base in model_class.__mro__:
            if base.__module__.startswith("hf_xattn"):
                for name, member in vars(base).items():
                    is_method = inspect.isfunction(member) or isinstance(member, classmethod)
                    if is_method and not name.startswith("_") and name not in TRANSFORMERS | INTERNAL:
                        of_body = getattr(XAttnModel, name, None)
                        assert member in tabled or of_body in tabled, f"{model_class.__name__}.{name}"
