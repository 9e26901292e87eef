"""Every tensor, cache and row that the public layers and models take: the right answer, or an error that names it.

See `surface.py`. Signatures are read, so a new argument without a row fails here. Other values, such as options and
paths, get the errors of Python and transformers.
"""

import functools
import inspect
import tempfile
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from helpers.inputs.surface import (
    IMAGE_MASK,
    KINDS,
    MASK,
    NOTHING,
    PIXELS,
    RATIO_IDS,
    RATIO_MASK,
    ROWS,
    STATES,
    Fine,
    Surface,
    Wrong,
    check_case,
    image_rows,
    needs,
    switch,
    tensor,
    value,
)
from helpers.models.template_models import make_processor
from helpers.models.tiny_models import make_model, token_ids
from helpers.models.word_models import make_text_checkpoint, make_vision_checkpoint
from hf_xattn import (
    CrossAttentionConfig,
    GatedCrossAttention,
    GatedCrossAttentionBlock,
    XAttnDataCollator,
    XAttnForConditionalGeneration,
    XAttnModel,
    XAttnProcessor,
    importers,
)
from hf_xattn.cache import image_cache
from hf_xattn.images.image_inputs import IMAGE_ARGUMENTS
from hf_xattn.storage import image_files
from hf_xattn.utils.transformers_api import AutoImageProcessor


IDS = token_ids()
ROW = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


# --- what the functions work on, made once

FOLDER = tempfile.TemporaryDirectory()  # removed when the tests end


@functools.cache
def model():
    return make_model()


@functools.cache
def tiled():
    """A model whose vision tower reads tiles."""
    from helpers.models.tiny_mllama import make_mllama

    return importers.import_checkpoint(make_mllama())


@functools.cache
def folder():
    """A folder with a processor's parts."""
    path = Path(tempfile.mkdtemp(dir=FOLDER.name))
    make_text_checkpoint(path / "tokenizer")
    make_vision_checkpoint(path / "image_processor")
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


@torch.no_grad()
def call_cache(function, **given):
    needed = {"cache": images(), "caches": [images(), images()], "rows": [0]}
    names = inspect.signature(function).parameters
    return function(**needs(given, **{name: needed[name] for name in names}))


ENCODED = value(none=None, kind=[1], size=EncoderDecoderCache(DynamicCache(), DynamicCache()))


def call_processor(**given):
    made = XAttnProcessor(**parts())
    return made(**needs(given, text="a dog"))


def call_chat(**given):
    """With an answer at the end, so that it can be continued."""
    chat = [{"role": "user", "content": "a dog"}, {"role": "assistant", "content": "a cat"}]
    return XAttnProcessor(**parts()).apply_chat_template(**needs(given, conversation=chat, tokenize=True))


SURFACES = {
    "collate": Surface(
        XAttnDataCollator.__call__,
        lambda **given: XAttnDataCollator(make_processor())(**needs(given, rows=[ROW])),
        {"rows": value(none=Wrong(None, "got NoneType"), kind=3, rank=Wrong(ROW, "got dict"), size=Wrong([], "empty"))},
    ),
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
    "processor": Surface(
        XAttnProcessor.__call__,
        call_processor,
        {
            "images": value(none=Fine(None), kind=3, rank=torch.zeros(3), dtype=Wrong([3], "got int")),
            "videos": value(none=Fine(None), kind=3, rank=torch.zeros(2, 3, 3), size=Wrong([[]], "no frames")),
            "text": value(
                none=Wrong(None, "`images` or both"),
                kind=3,
                rank=Wrong([["a"]], "one str or more"),
                size=Wrong([], "one str or more"),
                dtype=Wrong([3], "one str or more"),
            ),
        },
        fields={"images", "videos", "text"},
    ),
    "chat": Surface(
        XAttnProcessor.apply_chat_template,
        call_chat,
        {
            "conversation": value(
                none=None,
                kind="a dog",
                rank=Wrong([3], "message 0.*int"),
                size=Wrong([], "one message or more"),
                dtype=Wrong([[3]], "message 0"),
            ),
        },
        fields={"conversation"},
    ),
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
        {"caches": value(none=None, kind=3, rank=[[1]], size=Wrong([], "one image cache or more"))},
    ),
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
