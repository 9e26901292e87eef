"""Rows with different numbers of images, and images with different numbers of tiles: what is padding costs nothing and
changes nothing.
"""

import pytest
import torch

from helpers.models import own_parts
from helpers.models.marked_models import MARKER, fresh_cache
from helpers.models.tiny_mllama import TILED, make_mllama
from helpers.models.tiny_models import make_model, pixels, token_ids
from hf_xattn.importers import import_checkpoint
from hf_xattn.utils.transformers_api import CACHE


COUNTS = (1, 3, 0, 2)
ROWS, MOST, TOKENS, LENGTH = len(COUNTS), max(COUNTS), 16, 6
REAL = torch.arange(MOST) < torch.tensor(COUNTS)[:, None]


def counted(model):
    """Makes a model count the image tokens (tower: images) that pass its parts. Returns the counts."""
    counts: dict[str, list[int]] = {}

    def count(name, dims):
        def hook(module, args, kwargs, output):
            given = args[0] if args else kwargs["pixel_values"]
            counts.setdefault(name, []).append(given.shape[:dims].numel())

        return hook

    body, attn = model.base_model, model.blocks[0].attn
    if body.vision_tower is not None:
        tiled = body.vision_tower.config.model_type == "mllama_vision_model"
        body.vision_tower.register_forward_hook(count("tower", 2 if tiled else 1), with_kwargs=True)
        body.connector.register_forward_hook(count("connector", -1), with_kwargs=True)
    attn.k_proj.register_forward_hook(count("k_proj", -1), with_kwargs=True)
    attn.v_proj.register_forward_hook(count("v_proj", -1), with_kwargs=True)
    return counts


def only(total):
    return {"tower": [sum(COUNTS)], "connector": [total], "k_proj": [total], "v_proj": [total]}


@torch.no_grad()
@pytest.mark.parametrize("quiet", [False, True])
def test_padding_images_cost_nothing(quiet):
    """Padding images that pass the tower, the connector or the projections: at once, later, or without a cache."""
    model = make_model(cross_attention_config={"quiet_softmax": quiet})
    counts, ids = counted(model), token_ids(ROWS, LENGTH)
    images = {"pixel_values": pixels(ROWS, MOST), "image_mask": REAL}
    cache = model(ids, use_cache=True, **images)[CACHE]
    assert counts == only(sum(COUNTS) * TOKENS)
    model(ids[:, :1], cache=cache)
    assert len(counts["k_proj"]) == 1
    for call in (
        lambda: model.generate(ids, max_new_tokens=3, do_sample=False, **images),
        lambda: model(ids, cache=model.encode_images(**images)),
    ):
        counts.clear()
        call()
        assert counts == only(sum(COUNTS) * TOKENS)
    counts.clear()
    model.generate(ids, max_new_tokens=3, do_sample=False, use_cache=False, **images)
    assert counts == only(sum(COUNTS) * TOKENS)


@torch.no_grad()
def test_features_and_token_masks_cost_nothing():
    """Padding among features that the caller gives, or in a mask over tokens."""
    model, ids = make_model(), token_ids(2, LENGTH)
    counts = counted(model)
    features = model.get_image_features(pixels(2, 2)).last_hidden_state.unflatten(0, (2, 2))
    counts.clear()
    model(ids, vision_features=features, image_mask=torch.tensor([[True, False], [True, True]]))
    assert counts == {name: [3 * TOKENS] for name in ("connector", "k_proj", "v_proj")}
    counts.clear()
    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 1]]).bool()
    model(ids, cross_attention_states=torch.randn(2, 8, 32), cross_attention_mask=mask)
    assert counts == {"k_proj": [5], "v_proj": [5]}


@torch.no_grad()
@pytest.mark.parametrize("store", [False, True])
def test_padding_tiles_cost_nothing(store):
    """Padding tiles that pass the connector or the projections. The tower gets them: real tiles look at them."""
    model = import_checkpoint(make_mllama())
    given = {name: value for name, value in TILED["batch"].items() if name != "cross_attention_mask"}
    expected = model(**given).logits
    if store:
        model.enable_image_store()
    counts = counted(model)
    tiles = int(given["aspect_ratio_mask"][given["aspect_ratio_ids"] > 0].sum())
    assert given["aspect_ratio_mask"].numel() == 16 and tiles == 7
    ids = given.pop("input_ids")
    cache = model.encode_images(**given)
    tokens = cache.cross_attention_cache.layout.num_tokens // 8  # two images of four tiles
    assert counts["tower"] == [3] and counts["k_proj"] == counts["v_proj"] == [tiles * tokens]
    assert counts["connector"] == [tiles * tokens]
    assert torch.allclose(model(ids, cache=cache).logits, expected, atol=1e-5)


FORMS = {
    "all": {},
    "quiet": {"cross_attention_config": {"quiet_softmax": True}},
    "norms": {"cross_attention_config": {"qk_norm": True, "context_norm": True}},
    "position_bias": {"cross_attention_config": {"position_bias": True}},
    "position": {"cross_attention_config": {"position": own_parts.TURNING, "qk_norm": True}},
    "mqa": {"cross_attention_config": {"num_key_value_heads": 1}},
    "perceiver": {
        "connector_type": "perceiver",
        "perceiver_config": {
            "num_latents": 3,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 8,
            "intermediate_size": 32,
            "num_image_positions": 5,
        },
        "cross_attention_config": {"context_size": 24},
    },
    **{rule: {"image_visibility": rule, "image_token_id": MARKER} for rule in ("previous", "latest", "latest_group")},
    "quiet_latest": {
        "image_visibility": "latest",
        "image_token_id": MARKER,
        "cross_attention_config": {"quiet_softmax": True},
    },
    "text_mask": {},
    "image_attention_mask": {},
}


def case(form, dtype=torch.float64):
    """A model and its inputs, for all rows and for each row alone."""
    model, ids = make_model(**FORMS[form]).to(dtype), token_ids(ROWS, LENGTH)
    ids[ids == MARKER] = MARKER + 1
    for row, count in enumerate(COUNTS):
        ids[row, [1, 2, 4][:count]] = MARKER
    images = pixels(ROWS, MOST).to(dtype)
    generator = torch.Generator().manual_seed(5)
    by_image = torch.rand(ROWS, LENGTH, MOST, generator=generator) > 0.4
    by_token = torch.rand(ROWS, LENGTH, MOST * TOKENS, generator=generator) > 0.4
    whole = {"pixel_values": images, "image_mask": REAL}
    alone = [{"pixel_values": images[row : row + 1, :count]} if count else {} for row, count in enumerate(COUNTS)]
    if form == "image_attention_mask":
        whole[form] = by_image
    if form == "text_mask":
        whole["cross_attention_mask"] = by_token
    for row, count in enumerate(COUNTS):
        if form == "image_attention_mask" and count:
            alone[row][form] = by_image[row : row + 1, :, :count]
        if form == "text_mask" and count:
            alone[row]["cross_attention_mask"] = by_token[row : row + 1, :, : count * TOKENS]
    return model, ids, whole, alone


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_each_row_as_alone(form):
    """A row that is read too short, another row's tokens, a mask that is cut at the wrong end: with every form of
    mask, then and later.
    """
    model, ids, whole, alone = case(form)
    result, token = model(ids, use_cache=True, **whole), token_ids(ROWS, 1, seed=9)
    later = model(token, cache=result[CACHE]).logits
    for row, images in enumerate(alone):
        own = model(ids[row : row + 1], use_cache=True, **images)
        assert torch.allclose(result.logits[row], own.logits[0], atol=1e-9)
        assert torch.allclose(later[row], model(token[row : row + 1], cache=own[CACHE]).logits[0], atol=1e-9)
    base = model.base_model.text_model(ids).logits
    without = COUNTS.index(0)
    assert torch.equal(result.logits[without], base[without]) and not torch.allclose(result.logits, base, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("form", ["all", "quiet_latest", "position_bias", "position"])
def test_beams_turns_and_selected_rows(form):
    """Groups of other rows than those that a search, a later turn with more images, or a selection has left."""
    model, ids, whole, alone = case(form)
    options = {"max_new_tokens": 5, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    beams = model.generate(ids, **whole, **options)
    cache, more = fresh_cache(), pixels(ROWS, 2, seed=8).double()
    new = torch.tensor([[1, 1], [0, 0], [0, 1], [1, 0]]).bool()
    second = token_ids(ROWS, LENGTH, seed=11)
    second[:, :2] = MARKER
    model(ids, cache=cache, **whole)
    turn = model(second, cache=cache, pixel_values=more, image_mask=new).logits
    rows, last = torch.tensor([3, 0, 0, 2]), token_ids(4, 2, seed=12)
    cache.batch_select_indices(rows)
    selected = model(last, cache=cache).logits
    for row, images in enumerate(alone):
        own = fresh_cache()
        assert torch.equal(beams[row], model.generate(ids[row : row + 1], **images, **options)[0])
        model(ids[row : row + 1], cache=own, **images)
        added = more[row : row + 1, new[row]]
        given = {"pixel_values": added} if added.shape[1] else {}
        assert torch.allclose(turn[row], model(second[row : row + 1], cache=own, **given).logits[0], atol=1e-9)
        for place in (rows == row).nonzero()[:, 0].tolist():
            fork = fresh_cache()
            model(ids[row : row + 1], cache=fork, **images)
            model(second[row : row + 1], cache=fork, **given)
            assert torch.allclose(selected[place], model(last[place : place + 1], cache=fork).logits[0], atol=1e-9)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("form", ["all", "perceiver", "previous", "text_mask"])
def test_gradients_as_of_each_row_alone(form, checkpointing):
    """A gradient that is lost, or that a row gets of another one."""
    model, ids, whole, alone = case(form)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    model(ids, **whole).logits.square().sum().backward()
    together = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_disable()
    for row, images in enumerate(alone):
        model(ids[row : row + 1], **images).logits.square().sum().backward()
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            assert torch.allclose(together[name], weight.grad, rtol=1e-7, atol=1e-7), name
    assert model.blocks[0].attn.k_proj.weight.grad.abs().sum() > 0


def test_ragged_rows_can_share_images():
    """Groups of text rows, where attention needs groups of image rows."""
    model = make_model().double()
    images, ids = pixels(3, 2).double(), token_ids(5, LENGTH)
    mask = torch.tensor([[True, False], [True, True], [False, False]])
    of_text = torch.tensor([1, 0, -1, 1, 2])
    together = model(ids, pixel_values=images, image_mask=mask, image_rows=of_text).logits
    for row, image in enumerate(of_text.tolist()):
        own = images[image : image + 1, mask[image]]
        given = {"pixel_values": own} if image >= 0 and own.shape[1] else {}
        assert torch.allclose(together[row], model(ids[row : row + 1], **given).logits[0], atol=1e-9)


@torch.no_grad()
def test_text_rows_with_padding_of_their_own():
    """Tokens that only some of the text rows of an image row see, seen by all of them or by none."""
    model, ids = make_model().double(), token_ids(4, LENGTH)
    images = pixels(2, 3).double()
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 1]]).bool()
    cache = model.encode_images(images)
    together = model(ids, cache=cache, image_mask=mask).logits
    for row in range(4):
        own = images[row // 2 : row // 2 + 1, mask[row]]
        given = {"pixel_values": own} if own.shape[1] else {}
        assert torch.allclose(together[row], model(ids[row : row + 1], **given).logits[0], atol=1e-9)


def test_a_batch_of_padding_images_gives_gradients_of_zero():
    """A tower that other processes wait for, or whose weights get no gradient, where a batch has
    padding images only.
    """
    model, ids = make_model(), token_ids(2, LENGTH)
    counts = counted(model)
    nothing = torch.zeros(2, 2, dtype=torch.bool)
    logits = model(ids, pixel_values=torch.full((2, 2, 3, 32, 32), torch.nan), image_mask=nothing).logits
    assert counts["tower"] == [1] and torch.equal(logits, model(ids).logits)
    logits.sum().backward()
    assert all(
        weight.grad is not None and weight.grad.isfinite().all() for weight in model.base_model.connector.parameters()
    )


@torch.no_grad()
@pytest.mark.parametrize("whole_model", [True, False])
def test_compiled_code_computes_padding(whole_model):
    """Answers for the padding of the batch that was there when code was compiled, or code that is compiled for every
    batch.
    """
    model, ids = make_model(), token_ids(2, LENGTH)
    compiled = make_model()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    if whole_model:
        compiled.forward = torch.compile(compiled.forward, backend=backend, fullgraph=True)
    else:
        for block in compiled.blocks:
            block.attn.compile(backend=backend)
    for mask in ([[1, 0, 0], [1, 1, 1]], [[1, 1, 1], [1, 0, 0]], [[1, 1, 0], [0, 1, 1]], [[0, 1, 0], [1, 1, 0]]):
        images = {"pixel_values": pixels(2, 3), "image_mask": torch.tensor(mask).bool()}
        assert torch.allclose(compiled(ids, **images).logits, model(ids, **images).logits, atol=1e-5)
    assert len(graphs) <= (1 if whole_model else 2 * len(model.blocks))


@torch.no_grad()
def test_compiled_code_reads_no_nan_of_padding():
    """Features of padding with NaN, which `generate` reads in eager mode and compiled code multiplies by 0."""
    model, compiled, ids = make_model(), make_model(), token_ids(2, LENGTH)
    compiled.forward = torch.compile(compiled.forward, backend="eager")
    states = torch.randn(2, 2, TOKENS, 32)
    states[0, 1] = torch.nan
    given = {"cross_attention_states": states, "image_mask": torch.tensor([[True, False], [True, True]])}
    given["attention_mask"] = torch.ones_like(ids).index_fill(1, torch.tensor([0]), 0)
    options = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    found, expected = (each.generate(ids, use_cache=False, **given, **options) for each in (compiled, model))
    assert torch.allclose(torch.stack(found.logits), torch.stack(expected.logits), atol=1e-5)
