"""`image_rows`: text rows that share an image row in training, in any number and order, against the image repeated for
each of them.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from helpers.models import own_parts
from helpers.models.marked_models import MARKER, fresh_cache
from helpers.models.tiny_decoders import make_tiny, retrofitted
from helpers.models.tiny_models import make_model, pixels, randomize, token_ids
from helpers.references.gradient_checks import assert_same_outputs, outputs_and_gradients, without_dropout
from hf_xattn import freeze_base
from hf_xattn.utils.transformers_api import CACHE


ORDERS = {
    "equal": [0, 0, 1, 1, 2, 2],
    "unsorted": [2, 0, 1, 1, 0, 2],
    "permuted": [2, 0, 1],
    "unequal": [0, 0, 0, 2, 1, 0],
    "some without": [-1, 1, 0, -1, 1, 2],
}
NUM_IMAGES, LENGTH, TOKENS = 2, 9, 16


@functools.cache
def shared_model(name="llama", rule="all", **fields):
    config = {} if rule == "all" else {"image_token_id": MARKER, "image_visibility": rule}
    model = make_model(name, cross_attention_config=dict(fields), **config)
    return without_dropout(model.double())


def text_of(rows, rule="all"):
    """Text with a marker for each of two images, at other places in every row; the last tokens are padding."""
    ids = token_ids(rows, LENGTH)
    mask = torch.ones_like(ids)
    for row in range(rows):
        if rule != "all":
            ids[row, row % 3] = ids[row, row % 3 + 2 + row % 2] = MARKER
        mask[row, LENGTH - row % 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def images_of(index, masks=""):
    """Images with their masks, shared and repeated."""
    index, count = torch.tensor(index), max(index) + 1
    repeated, generator = index.clamp(min=0), torch.Generator().manual_seed(7)
    images = pixels(count, NUM_IMAGES).double()
    shared, every = {"pixel_values": images, "image_rows": index}, {"pixel_values": images[repeated]}
    real = torch.ones(count, NUM_IMAGES, dtype=torch.bool)
    if "images" in masks:
        real[1, 1] = False
        shared["image_mask"] = real
    every["image_mask"] = real[repeated] & (index >= 0)[:, None]
    if "tokens" in masks:
        tokens = torch.rand(count, NUM_IMAGES * TOKENS, generator=generator) < 0.6
        shared["cross_attention_mask"], every["cross_attention_mask"] = tokens, tokens[repeated]
    if "text" in masks:
        text = torch.rand(len(index), LENGTH, NUM_IMAGES * TOKENS, generator=generator) < 0.4
        text[0, 2] = False
        shared["cross_attention_mask"] = every["cross_attention_mask"] = text
    return shared, every


MASKS, RULES = ["", "images", "images and tokens", "text"], ["all", "previous", "latest_group"]


@pytest.mark.parametrize(
    "order, rule, masks",
    [
        (order, RULES[(place + number) % 3], masks)
        for place, order in enumerate(ORDERS)
        for number, masks in enumerate(MASKS)
    ],
)
def test_gradients_are_those_of_repeated_images(order, rule, masks):
    """A text row that looks at another row's images, or with another row's mask; a gradient that is lost or counted
    twice.
    """
    model, index = shared_model(rule=rule), ORDERS[order]
    shared, every = images_of(index, masks)
    text = text_of(len(index), rule)
    expected = outputs_and_gradients(model, **text, **every, use_cache=False)
    assert len(expected[1]) == len(list(model.parameters())), "every weight learns"
    assert all(gradient.any() for name, gradient in expected[1].items() if "k_proj.bias" not in name)
    assert_same_outputs(outputs_and_gradients(model, **text, **shared), expected)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "fields",
    [
        {"quiet_softmax": True},
        {"position_bias": True},
        {"position": own_parts.TURNING},
        {"qk_norm": True},
        {"num_key_value_heads": 1},
    ],
    ids=lambda fields: next(iter(fields)),
)
@pytest.mark.parametrize("order", ["unequal", "some without"])
def test_options_of_the_blocks(order, fields, implementation):
    """A null key, a position bias or attention weights in the rows of the images and not of the text."""
    model = shared_model(**fields)
    # The eager attention of transformers computes its softmax in float32.
    model.set_attn_implementation({"cross_attention_config": implementation})
    assert model.blocks[0].attn.config._attn_implementation == implementation
    shared, every = images_of(ORDERS[order], "images")
    text = text_of(len(ORDERS[order]))
    expected = outputs_and_gradients(
        model, **text, **every, use_cache=False, output_attentions=False, output_cross_attentions=True
    )
    found = outputs_and_gradients(model, **text, **shared, output_attentions=False, output_cross_attentions=True)
    assert_same_outputs(found, expected)
    for weights, wanted in zip(found[0].cross_attentions, expected[0].cross_attentions, strict=True):
        torch.testing.assert_close(weights, wanted, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("order", ["equal", "unequal", "some without"])
def test_one_pass_and_one_projection_for_an_image(order):
    """Sharing in name only: the tower or the projections see the image once for each text row."""
    model, index = shared_model(), ORDERS[order]
    shared, _ = images_of(index)
    passes, projected, hooks = [], [], []
    tower = model.model.vision_tower
    hooks.append(tower.register_forward_pre_hook(lambda _, args, kwargs: passes.append(kwargs), with_kwargs=True))
    for block in model.blocks:
        for projection in (block.attn.k_proj, block.attn.v_proj):
            hooks.append(projection.register_forward_pre_hook(lambda _, args: projected.append(args[0].shape[0])))
    try:
        outputs_and_gradients(model, **text_of(len(index)), **shared)
    finally:
        for hook in hooks:
            hook.remove()
    seen = [value.shape[0] for given in passes for value in given.values() if isinstance(value, torch.Tensor)]
    assert seen == [3 * NUM_IMAGES]
    assert projected == [3] * 4, "keys and values of two blocks"


@torch.no_grad()
def test_a_single_image_token():
    """The short cut for one key, beside a text row that sees none."""
    model, index = make_model(vision=False), torch.tensor([1, 0, 0, -1, 1, 1])
    states, ids = torch.randn(2, 1, 32), token_ids(6)
    every = states[index.clamp(min=0)]
    sees = (index >= 0)[:, None]
    expected = model(ids, cross_attention_states=every, cross_attention_mask=sees, use_cache=False).logits
    found = model(ids, cross_attention_states=states, image_rows=index)
    assert torch.allclose(found.logits, expected, atol=1e-5)
    assert torch.equal(found.logits[3], model(ids[3:4]).logits[0]), "no image: the base, bit for bit"
    assert found.get(CACHE) is None


@pytest.mark.parametrize("frozen", [False, True], ids=["full", "frozen_base"])
def test_recomputation_reads_the_image_of_its_own_row(frozen):
    """Rows that the recomputation does not get: it would read the images of others."""
    model = without_dropout(make_model().double())
    if frozen:
        freeze_base(model, vision=False)
    shared, every = images_of(ORDERS["unequal"])
    text = text_of(6)
    expected = outputs_and_gradients(model, **text, **every, use_cache=False)
    model.gradient_checkpointing_enable()
    assert_same_outputs(outputs_and_gradients(model, **text, **shared), expected)


@pytest.mark.parametrize("model_type", ["bloom", "gpt2"])
def test_rows_share_images_in_decoders_whose_layers_fetch_them(model_type):
    """Decoders whose layers fetch the images themselves."""
    model = without_dropout(randomize(retrofitted(make_tiny(model_type))).double())
    index, states = torch.tensor([1, 0, 1, 1]), torch.randn(2, 5, 16, dtype=torch.float64)
    text = {"input_ids": token_ids(4), "labels": token_ids(4)}
    expected = outputs_and_gradients(model, **text, cross_attention_states=states[index], use_cache=False)
    assert_same_outputs(outputs_and_gradients(model, **text, cross_attention_states=states, image_rows=index), expected)


def test_rows_share_images_under_ddp(tmp_path):
    """A wrapper that hands on positional arguments only, or waits for gradients that do not come."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        model = without_dropout(make_model().double())
        shared, every = images_of(ORDERS["unequal"])
        expected = outputs_and_gradients(model, **text_of(6), **every, use_cache=False)
        wrapped = DistributedDataParallel(model)
        output = wrapped(**text_of(6), **shared)
        model.zero_grad()
        output.loss.backward()
        found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        assert_same_outputs((output, found), expected)
    finally:
        dist.destroy_process_group()


def test_data_parallel_is_refused():
    """One image for four questions on two GPUs of one process: `DataParallel` drops two of the questions without a
    word.
    """
    model, text = make_model(), token_ids(4)
    shared = {"pixel_values": pixels(1), "image_rows": torch.zeros(4, dtype=torch.long)}
    assert model.model._replicate_for_data_parallel()._is_replica, "torch's mark of a replica"
    model.model._is_replica = True
    model(text, pixel_values=pixels(4))
    with pytest.raises(ValueError, match="`image_rows`.*DataParallel.*torchrun"):
        model(text, **shared)


def test_sharing_saves_memory():
    """Keys, values or features that are kept for backward once for each text row."""
    model = freeze_base(without_dropout(make_model()))
    images, ids = pixels(1, 4), token_ids(8)

    def saved_bytes(**inputs):
        kept = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.update({tensor.untyped_storage().data_ptr(): tensor}) or tensor, lambda tensor: tensor
        ):
            loss = model(ids, labels=ids, use_cache=False, **inputs).loss
        assert loss.requires_grad
        return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())

    every = saved_bytes(pixel_values=images.repeat(8, 1, 1, 1, 1))
    once = saved_bytes(pixel_values=images, image_rows=torch.zeros(8, dtype=torch.long))
    assert once < 0.75 * every, (once, every)


IMAGES, ROWS = pixels(2), torch.tensor([0, 0, 1])
REFUSED = {
    "without images": ({"image_rows": ROWS}, "`image_rows` was given without images"),
    "too few": ({"pixel_values": IMAGES, "image_rows": ROWS[:2]}, r"shape \(3,\).*got \(2,\)"),
    "too large": ({"pixel_values": IMAGES, "image_rows": ROWS + 1}, "from 0 to 1.*got 2 for text row 2"),
    "negative": ({"pixel_values": IMAGES, "image_rows": ROWS - 2}, "-1 for a text row without an image, got -2"),
    "unused": ({"pixel_values": IMAGES, "image_rows": ROWS * 0}, r"each of the 2 rows of images, got none for \[1\]"),
    "no rows": ({"pixel_values": IMAGES[:0], "image_rows": ROWS * 0 - 1}, r"got no image: the shape is \(0, 1"),
    "floats": ({"pixel_values": IMAGES, "image_rows": ROWS.float()}, "`image_rows` to hold integers"),
    "a cache": ({"pixel_values": IMAGES, "image_rows": ROWS, "use_cache": True}, "encode_images"),
    "given cache": ({"pixel_values": IMAGES, "image_rows": ROWS, "cache": fresh_cache}, "encode_images"),
    "image mask of the text": (
        {"pixel_values": IMAGES, "image_rows": ROWS, "image_mask": torch.ones(3, 1, dtype=torch.bool)},
        "`image_mask`",
    ),
    "token mask of the text": (
        {"pixel_values": IMAGES, "image_rows": ROWS, "cross_attention_mask": torch.ones(3, 16, dtype=torch.bool)},
        "`cross_attention_mask` of batch 2, got batch 3",
    ),
    "text mask of the images": (
        {"pixel_values": IMAGES, "image_rows": ROWS, "cross_attention_mask": torch.ones(2, 7, 16, dtype=torch.bool)},
        "`cross_attention_mask` of batch 3, got batch 2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_point_at_no_image_are_refused(name):
    """Rows that do not exist, images for nobody, and caches that share images in another way."""
    inputs, words = REFUSED[name]
    inputs = {key: value() if callable(value) else value for key, value in inputs.items()}
    with pytest.raises((TypeError, ValueError), match=words):
        make_model()(token_ids(3), **inputs)


def test_generate_refuses_image_rows_and_says_how():
    """`generate` that takes the argument and gives every text row the images of another."""
    with pytest.raises(ValueError, match="encode_images"):
        make_model().generate(token_ids(3), pixel_values=IMAGES, image_rows=ROWS, max_new_tokens=2)


def test_fewer_images_than_text_rows_name_the_way():
    """Images that are repeated by guess."""
    with pytest.raises(ValueError, match="`encode_images`.*`image_rows`"):
        make_model()(token_ids(4), pixel_values=IMAGES)
