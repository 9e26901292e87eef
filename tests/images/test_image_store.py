"""The image store: an image is encoded once, ever."""

import pytest
import torch

from helpers.inputs.image_stores import MODELS, Counted, asked, assert_same, with_store
from helpers.models.marked_models import MARKER, RULES, fresh_cache, marked
from helpers.models.tiny_mllama import make_mllama
from helpers.models.tiny_models import make_model, pixels, token_ids
from hf_xattn.importers import import_checkpoint
from hf_xattn.utils.transformers_api import CACHE


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("batch,num_images", [(1, 1), (2, 3)])
def test_second_question_runs_no_encoder(kind, batch, num_images):
    """A picture encoded again for every question; other answers than without a store, or from a store than from the
    tower.
    """
    model, ids, images = make_model(**MODELS[kind]), token_ids(batch), pixels(batch, num_images)
    expected, other = asked(model, ids, pixel_values=images), asked(model, ids + 1, pixel_values=images)
    with_store(model)
    with Counted(model) as counts:
        assert_same(asked(model, ids, pixel_values=images), expected)
        assert counts == {"images": batch * num_images, "projections": 4}
        assert_same(asked(model, ids, pixel_values=images), expected)
        assert_same(asked(model, ids + 1, pixel_values=images.clone()), other)
        assert counts == {"images": batch * num_images, "projections": 4}
    store = model.image_store
    assert (store.hits, store.misses) == (2 * batch * num_images, batch * num_images)
    assert store.num_images == batch * num_images and 0 < store.nbytes <= store.max_bytes


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kept", [False, True], ids=["new_conversation", "kept_cache"])
def test_chat_sends_every_image_again(rule, kept):
    """All images of a chat encoded at every turn; stored images in the places of others."""
    model, plain = with_store(marked(rule)), marked(rule)
    turns = [pixels(1, 1, seed=seed) for seed in range(4)]
    text = torch.tensor([[MARKER, 7, 8]])
    caches = (fresh_cache(), fresh_cache()) if kept else (None, None)
    for turn in range(1, 4):
        images = torch.cat(turns[:turn], dim=1)
        with Counted(model) as counts:
            answer = asked(model, text, pixel_values=images, cache=caches[0])
        assert counts == {"images": 1, "projections": 4}, "only the new image"
        assert_same(answer, asked(plain, text, pixel_values=images, cache=caches[1]), equal=False)
        text = torch.cat([answer.sequences, torch.tensor([[MARKER, 10 + turn]])], dim=1)
    assert model.image_store.misses == 3 and model.image_store.hits == (0 if kept else 3)


@pytest.mark.parametrize("rule", ["all", "latest"])
@pytest.mark.parametrize("kind", ["plain", "quiet"])
def test_rows_are_put_together(rule, kind):
    """Hits and misses of a batch in each other's places, an image that comes twice encoded twice, padding images
    stored or seen.
    """
    model = marked(rule, **MODELS[kind])
    a, b, c, d = pixels(4, 1).unbind(0)
    batch = torch.stack([torch.cat([a, b, a]), torch.cat([c, b, d]), torch.cat([b, d, c])])
    image_mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 1, 1]]).bool()
    ids = torch.tensor([[MARKER, 5, MARKER, 6, MARKER, 7], [4, 5, 6, 9, MARKER, 7], [8, MARKER, 6, 5, MARKER, 7]])
    expected = asked(model, ids, pixel_values=batch, image_mask=image_mask)
    with_store(model)
    asked(model, ids[2:], pixel_values=batch[2:, 1:], image_mask=image_mask[2:, 1:])  # d, c
    with Counted(model) as counts:
        assert_same(asked(model, ids, pixel_values=batch, image_mask=image_mask), expected, equal=False)
        assert counts == {"images": 2, "projections": 4}, "a and b"
        assert_same(asked(model, ids, pixel_values=batch, image_mask=image_mask), expected, equal=False)
        assert counts["images"] == 2
    assert (model.image_store.misses, model.image_store.hits) == (4, 4 + 6)
    nobody = torch.zeros_like(image_mask)
    blind = torch.full_like(ids, 5)
    assert_same(
        asked(model, blind, pixel_values=batch, image_mask=nobody),
        asked(marked(rule, **MODELS[kind]), blind, pixel_values=batch, image_mask=nobody),
    )
    assert (model.image_store.misses, model.image_store.hits) == (4, 10)


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("kind", ["plain", "quiet"])
def test_features_are_projected_once(rank, kind):
    """Features projected again; a mask taken for a part of them."""
    model, ids = make_model(vision=False, **MODELS[kind]), token_ids(2)
    states = torch.randn(2, 3, 5, 32) if rank == 4 else torch.randn(2, 5, 32)
    mask = torch.rand(2, states[0].numel() // 32) < 0.7
    expected = [asked(model, ids, cross_attention_states=states, cross_attention_mask=m) for m in (None, mask)]
    with_store(model)
    with Counted(model) as counts:
        for _ in range(2):
            assert_same(asked(model, ids, cross_attention_states=states), expected[0])
            assert_same(asked(model, ids, cross_attention_states=states, cross_attention_mask=mask), expected[1])
    assert counts == {"projections": 4}
    assert model.image_store.num_images == (6 if rank == 4 else 2)


def test_features_that_a_cache_holds_in_part():
    """Features of one axis that grow: the tail taken for the whole."""
    model, plain, ids = with_store(make_model(vision=False)), make_model(vision=False), token_ids(1, 4)
    states = torch.randn(1, 9, 32)
    for served in (model, plain):
        served.cache = fresh_cache()
    for length in (4, 9):
        answers = [
            asked(served, ids, cross_attention_states=states[:, :length], cache=served.cache)
            for served in (model, plain)
        ]
        assert_same(*answers, equal=False)
        ids = torch.cat([answers[0].sequences, token_ids(1, 2)], dim=1)
    assert model.image_store.misses == 2


def test_images_with_other_tiles_are_other_images():
    """The same pixels as other tiles, or a padding tile, taken for the stored image."""
    model = import_checkpoint(make_mllama())
    images = torch.randn(2, 2, 4, 3, 28, 28, generator=torch.Generator().manual_seed(5))
    ids = torch.tensor([[96, 5, 96, 6, 7], [4, 5, 6, 96, 7]])
    ratio_ids = torch.tensor([[6, 3], [2, 0]])
    ratio_mask = torch.tensor([[[1, 1, 1, 1], [1, 1, 0, 0]], [[1, 1, 0, 0], [0, 0, 0, 0]]])

    def ask(ratio_ids=ratio_ids, ratio_mask=ratio_mask):
        return asked(model, ids, pixel_values=images, aspect_ratio_ids=ratio_ids, aspect_ratio_mask=ratio_mask)

    others = [
        {"ratio_ids": torch.tensor([[6, 2], [2, 0]])},
        {"ratio_mask": ratio_mask * torch.tensor([1, 1, 0, 0])},
    ]
    expected, expected_others = ask(), [ask(**other) for other in others]
    with_store(model)
    for _ in range(2):
        assert_same(ask(), expected, equal=False)
    assert (model.image_store.misses, model.image_store.hits) == (3, 3)
    for other, wanted in zip(others, expected_others):
        assert_same(ask(**other), wanted, equal=False)
    assert model.image_store.misses == 5, "each of the others differs in one image"


@pytest.mark.parametrize(
    "how",
    [
        {"num_beams": 3},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 4, "num_return_sequences": 2},
        {"cache_implementation": "static"},
        {"prompt_lookup_num_tokens": 2},
        {"output_attentions": True},
        {"use_cache": False},
    ],
    ids=str,
)
@torch.no_grad()
def test_every_way_to_decode_reads_the_store_alike(how):
    """A decoding method that sees other images, or expands stored ones in place."""
    model = make_model()
    model.set_attn_implementation("eager")
    batch = 1 if "prompt_lookup_num_tokens" in how else 2
    ids, images = token_ids(batch), pixels(batch, 2)

    def ask():
        torch.manual_seed(11)
        return asked(model, ids, pixel_values=images, **how)

    expected = ask()
    with_store(model)
    for _ in range(3):
        assert_same(ask(), expected)
    assert (model.image_store.misses, model.image_store.hits) == (2 * batch, 4 * batch)
    if "output_attentions" in how:
        for mine, theirs in zip(ask().cross_attentions[0], expected.cross_attentions[0], strict=True):
            assert torch.equal(mine, theirs)


@torch.no_grad()
def test_encode_images_and_forks():
    """`encode_images` that encodes again, or gives other caches; a caller's cache that the store and it write into
    together.
    """
    model, plain, ids = with_store(make_model()), make_model(), token_ids(2)
    images = pixels(2, 3)
    encoded, expected = (served.encode_images(pixel_values=images[:, :2]) for served in (model, plain))
    with Counted(model) as counts:
        again = model.encode_images(pixel_values=images[:, :2])
        assert counts == {}
    for cache in (encoded, again):
        assert cache.cross_attention_cache.made_by == expected.cross_attention_cache.made_by
        for mine, theirs in zip(cache.cross_attention_cache.layers, expected.cross_attention_cache.layers, strict=True):
            assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.values, theirs.values)
    # the store's tensors are its own: a caller may do anything with a cache
    for layer in again.cross_attention_cache.layers:
        layer.keys.zero_()
        layer.values.zero_()
    for _ in range(2):
        with Counted(model) as counts:
            answer = asked(model, ids, pixel_values=images, cache=encoded)
        assert_same(answer, asked(plain, ids, pixel_values=images, cache=expected), equal=False)
    assert counts == {}, "the third images too are stored now"
    appended = model.encode_images(pixel_values=images, cache=encoded)
    assert appended is encoded and appended.cross_attention_cache.layout.num_images == 3


@pytest.mark.parametrize("kind", ["plain", "quiet"])
def test_second_turn_on_a_cache_with_text(kind):
    """New images of a later turn from the store, in front of those that the cache holds, or with a second null key."""
    model, plain = with_store(marked("latest", **MODELS[kind])), marked("latest", **MODELS[kind])
    a, b = pixels(2, 2, seed=1).split(1, dim=1)
    ids = torch.tensor([[MARKER, 5, 6], [7, MARKER, 6]])
    asked(model, ids, pixel_values=b)
    for only_new in (True, False):
        answers = []
        for served in (model, plain):
            first = asked(served, ids, pixel_values=a)
            more = torch.cat([first.sequences, torch.tensor([[MARKER, 9]] * 2)], dim=1)
            images = b if only_new else torch.cat([a, b], dim=1)
            with Counted(served) as counts:
                answers.append(asked(served, more, pixel_values=images, cache=first[CACHE]))
            assert counts == ({} if served is model else {"images": 2, "projections": 4})
        assert_same(*answers, equal=False)
