"""Which text token sees which image token."""

import pytest
import torch
from transformers import DynamicCache, SiglipVisionModel
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging

from helpers.models.marked_models import MARKER, marked_model
from helpers.models.tiny_models import make_model, make_text, pixels, randomize, token_ids, vision_config
from hf_xattn import retrofit
from hf_xattn.cache.image_layout import ImageLayout
from hf_xattn.cache.text_progress import CallersMask, History, TextProgress
from hf_xattn.cache.visibility import decide_visibility, image_order, visible_images
from hf_xattn.layers.context import EVERYTHING, check_cross_attention_mask, fold_mask


GREEDY = {"max_new_tokens": 6, "do_sample": False}


def booleans(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.bool)


def unfold(visibility, rows: int, repeats: int, text_len: int, group: int) -> torch.Tensor:
    """The folded mask as `(B, T, G, N)`, written out with loops."""
    num_keys = visibility.mask.shape[-1]
    full = visibility.mask.expand(rows, 1, repeats * text_len * group, num_keys)
    result = torch.empty(rows * repeats, text_len, group, num_keys, dtype=torch.bool)
    for row in range(rows):
        for repeat in range(repeats):
            for step in range(text_len):
                for head in range(group):
                    index = (repeat * text_len + step) * group + head
                    result[row * repeats + repeat, step, head] = full[row, 0, index]
    return result


def test_no_mask_is_everything():
    """Rules out a mask tensor where none is needed: it would keep the fast kernels away."""
    assert fold_mask(None, image_rows=2, text_rows=4, text_len=3, group=2) == EVERYTHING


@pytest.mark.parametrize("null_key", [False, True])
@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("per_text_row", [False, True])
def test_lay_out_folds_every_query_onto_its_own_mask(null_key, repeats, steps, per_text_row):
    """Rules out a mask whose query order differs from that of the folded queries: text would see
    another row's images.
    """
    rows, text_len, group, num_tokens = 2, 5, 2, 6
    text_rows = rows * repeats
    mask_rows = text_rows if per_text_row else rows
    sees = torch.rand(mask_rows, steps, num_tokens, generator=torch.Generator().manual_seed(steps)) > 0.4
    sees[0, 0] = False
    result = fold_mask(sees, image_rows=rows, text_rows=text_rows, text_len=text_len, group=group, null_key=null_key)
    assert result.mask.shape[:2] == (rows, 1)
    mask = unfold(result, rows, repeats, text_len, group)
    for row in range(text_rows):
        for step in range(text_len):
            expected = sees[row if per_text_row else row // repeats, step if steps > 1 else 0]
            visible = result.visible.expand(text_rows, text_len, 1)[row, step, 0]
            assert visible == expected.any()
            for head in range(group):
                keys = mask[row, step, head]
                if null_key:
                    assert keys[0] and torch.equal(keys[1:], expected)
                else:
                    assert torch.equal(keys, expected if expected.any() else torch.ones_like(expected))


def test_lay_out_padding_needs_no_query_axis():
    """Rules out a padding mask that is blown up to text length: it is the same for every query."""
    mask = fold_mask(booleans([[[1, 0]], [[1, 1]]]), image_rows=2, text_rows=6, text_len=50, group=4).mask
    assert mask.shape == (2, 1, 1, 2)


def test_lay_out_takes_masks_between_image_and_text_rows():
    """Rules out a stored mask of two questions an image that is repeated once an image row when beams come on top."""
    sees = booleans([[[1, 0]], [[0, 1]]])  # two questions about one image
    result = fold_mask(sees, image_rows=1, text_rows=4, text_len=3, group=2)
    mask = unfold(result, 1, 4, 3, 2)
    for row in range(4):
        assert torch.equal(mask[row], sees[row // 2].expand(3, 2, 2))


def test_image_order_skips_padding_images():
    """Rules out padding images that count: markers after them would point one image too far."""
    mask = booleans([[1, 1, 1], [1, 0, 1], [0, 0, 1], [0, 0, 0]])
    assert image_order(mask).tolist() == [[1, 2, 3], [1, 0, 2], [0, 0, 1], [0, 0, 0]]


@pytest.mark.parametrize(
    "mode, expected",
    [
        # text: word, marker, word, marker, marker (one more than images), word
        ("previous", [[0, 0, 0], [1, 0, 0], [1, 0, 0], [1, 0, 1], [1, 0, 1], [1, 0, 1]]),
        ("latest", [[0, 0, 0], [1, 0, 0], [1, 0, 0], [0, 0, 1], [0, 0, 1], [0, 0, 1]]),
    ],
)
def test_visible_images_with_padding_and_too_many_markers(mode, expected):
    """Rules out text that sees an image before its marker, a padding image, or nothing after a generated marker."""
    order = image_order(booleans([[1, 0, 1], [0, 0, 0]]))
    markers = torch.tensor([[0, 1, 1, 2, 3, 3]] * 2)
    seen = visible_images(order, markers, torch.zeros_like(markers), mode)
    assert torch.equal(seen[0], booleans(expected))
    assert not seen[1].any()


class Text:
    """Text that is read piece by piece beside images."""

    def __init__(self, layout, history=False):
        self.layout = layout
        self.progress = TextProgress(history=History(None, (), 0)) if history else TextProgress()

    def sees(self, mode, markers, mask=None):
        shape = (markers if markers is not None else mask).shape
        mask = None if mask is None else CallersMask(mask)
        view = decide_visibility(mode, self.layout, self.progress, markers, mask, *shape[:2])
        self.progress = view.progress
        return view.sees


def tokens(sizes=(2, 2), **fields) -> ImageLayout:
    """Images of two tokens each."""
    return ImageLayout.of(sizes, torch.device("cpu"), **fields)


def test_all_text_sees_all_images_but_padding():
    """Rules out a mask where everything is visible, and padding that is forgotten."""
    text = booleans([[0], [0]])
    assert Text(tokens()).sees("all", text) is None
    mask = booleans([[1, 1, 0, 0], [1, 1, 1, 1]])
    assert torch.equal(Text(tokens(token_mask=mask)).sees("all", text), mask[:, None])


@pytest.mark.parametrize(
    "mode, last", [("previous", [1, 1, 1, 1]), ("latest", [0, 0, 1, 1]), ("latest_group", [0, 0, 1, 1])]
)
def test_sees_counts_markers_over_forwards(mode, last):
    """Rules out a decode step that forgets the markers of the prompt."""
    markers = booleans([[0, 1, 0, 1], [0, 0, 1, 0]])
    whole = Text(tokens()).sees(mode, markers)
    assert whole[0].int().tolist() == [[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], last]
    assert whole[1].int().tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]
    text = Text(tokens())
    steps = [text.sees(mode, markers[:, step : step + 1]) for step in range(4)]
    assert torch.equal(torch.cat(steps, dim=1), whole)


def test_latest_group_with_too_many_markers():
    """Rules out a generated marker that takes the images away."""
    text = Text(tokens(image_mask=booleans([[1, 1], [1, 0]])))
    seen = text.sees("latest_group", booleans([[1, 1, 0, 1, 0], [0, 1, 1, 0, 1]]))
    assert seen[0].int().tolist() == [[1, 1, 0, 0]] + [[1, 1, 1, 1]] * 4
    assert seen[1].int().tolist() == [[0, 0, 0, 0]] + [[1, 1, 0, 0]] * 4


@pytest.mark.parametrize("mode", ["previous", "latest", "latest_group"])
def test_a_marker_too_many_takes_no_later_image(mode):
    """Rules out a chat in which the model wrote a marker, and text in front of the next image's marker sees that
    image.
    """
    text = Text(tokens((1,)))
    for part in ([[1, 0]], [[0]], [[1]]):  # the last one written by the model
        text.sees(mode, booleans(part))
    text.layout = text.layout.append(tokens((1,)))
    seen = text.sees(mode, booleans([[0, 1, 0]]) if mode != "latest_group" else booleans([[1, 0, 0]]))
    after = [1, 1] if mode == "previous" else [0, 1]
    assert seen.int().tolist() == ([[[1, 0], after, after]] if mode != "latest_group" else [[after] * 3])


def test_asking_changes_nothing():
    """Rules out an answer that depends on how often it was asked for (a recomputation, a retry)."""
    text = Text(tokens())
    text.sees("latest", booleans([[1, 0]]))
    before = text.progress
    for _ in range(2):
        view = decide_visibility("latest", text.layout, before, booleans([[1]]), None, 1, 1)
        assert view.sees.int().tolist() == [[[0, 0, 1, 1]]]
    assert text.progress is before and before.counts.tolist() == [[1, 0, 0]]


def test_sees_after_the_batch_was_repeated():
    """Rules out beams that start after the prompt and lose its marker count or its padding."""
    text = Text(tokens(token_mask=booleans([[1, 1, 1, 0], [1, 1, 1, 1]])))
    text.sees("latest", booleans([[1, 1], [0, 1]]))
    seen = text.sees("latest", booleans([[0]] * 4))
    assert seen[:, 0].int().tolist() == [[0, 0, 1, 0], [0, 0, 1, 0], [1, 1, 0, 0], [1, 1, 0, 0]]


def test_the_callers_mask_comes_first_until_the_next_marker():
    """Rules out an explicit per-token mask that is overridden by markers, forgotten at the next step, or held for
    ever.
    """
    text = Text(tokens(token_mask=booleans([[1, 1, 1, 0]])))
    own = booleans([[[0, 0, 0, 0], [0, 1, 0, 1]]])
    assert torch.equal(text.sees("latest", booleans([[1, 0]]), own), own & booleans([[[1, 1, 1, 0]]]))
    assert text.sees("latest", booleans([[0]])).int().tolist() == [[[0, 1, 0, 0]]]
    later = text.sees("latest", booleans([[0, 1, 0]]))
    assert later.int().tolist() == [[[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0]]]
    assert text.sees("latest", booleans([[0]])).int().tolist() == [[[0, 0, 1, 0]]]


@pytest.mark.parametrize("cut", range(7))
def test_cropped_text_has_seen_what_it_had_seen_then(cut):
    """Rules out a marker, or a row of a caller's mask, that outlives the text it belonged to."""
    markers = booleans([[1, 0, 0, 0, 1, 0], [0, 0, 0, 1, 0, 0]])
    own = booleans([[[0, 1, 1, 0], [1, 0, 0, 0]], [[0, 0, 0, 0], [0, 0, 1, 1]]])
    for mode in ("all", "latest", "previous"):
        text, short = Text(tokens(), history=True), Text(tokens(), history=True)
        pieces = [(slice(0, 1), None), (slice(1, 3), own), (slice(3, 4), None), (slice(4, 6), None)]
        for piece, mask in pieces:
            text.sees(mode, markers[:, piece], mask)
            stop = min(piece.stop, cut)
            if piece.start < cut:
                mask = None if mask is None else mask[:, : stop - piece.start]
                short.sees(mode, markers[:, piece.start : stop], mask)
        text.progress = text.progress.at(cut)
        more = booleans([[0, 1, 0], [0, 0, 0]])
        for part in (more[:, :1], more[:, 1:]):
            first, second = text.sees(mode, part), short.sees(mode, part)
            assert (first is None and second is None) or torch.equal(first, second)


def test_rows_that_change_places_take_what_they_have_seen_along():
    """Rules out a beam or a selected row that goes on with another row's markers or mask."""
    markers, own = (
        booleans([[1, 1], [0, 0], [0, 1]]),
        booleans([[[1, 0, 0, 0]] * 2, [[0, 1, 0, 0]] * 2, [[0, 0, 1, 0]] * 2]),
    )
    rows = torch.tensor([2, 2, 0])
    for mask in (None, own):
        text, moved = Text(tokens(), history=True), Text(tokens(), history=True)
        text.sees("previous", markers, mask)
        moved.sees("previous", markers[rows], None if mask is None else mask[rows])
        text.progress = text.progress.take(rows, 3)
        for length in (2, 1):
            text.progress, moved.progress = text.progress.at(length), moved.progress.at(length)
            part = booleans([[0], [0], [0]])
            assert torch.equal(text.sees("previous", part), moved.sees("previous", part))


def test_appended_images_keep_their_own_numbers_and_masks():
    """Rules out later images that take the numbers of earlier ones, or masks that shift."""
    first = tokens(token_mask=booleans([[1, 1, 1, 0]]))
    both = first.append(tokens((2,), image_mask=booleans([[0]])))
    assert both.num_images == 3 and both.num_tokens == 6
    assert both.image_of_token.tolist() == [0, 0, 1, 1, 2, 2]
    assert both.token_mask.int().tolist() == [[1, 1, 1, 0, 1, 1]]
    assert both.image_mask.int().tolist() == [[1, 1, 0]]
    assert tokens().append(tokens()).token_mask is None


def test_selected_rows_keep_their_own_padding():
    """Rules out rows that keep another row's padding."""
    layout = tokens(token_mask=booleans([[1, 1, 1, 1], [1, 1, 0, 0]]), image_mask=booleans([[1, 1], [1, 0]]))
    taken = layout.select(torch.tensor([1, 1, 0]), 2)
    assert taken.token_mask.int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
    assert taken.image_mask.int().tolist() == [[1, 0], [1, 0], [1, 1]]
    assert (taken.num_images, taken.num_tokens) == (2, 4)


def test_masks_of_wrong_dtype_or_shape_are_refused():
    """Rules out a mask of 0 and 1, or of a wrong shape, that is taken for something else."""
    with pytest.raises(TypeError, match=r"`cross_attention_mask`.*torch.int64.*\.bool\(\)"):
        check_cross_attention_mask(torch.ones(2, 4, dtype=torch.long), 2, 3, 4)
    with pytest.raises(ValueError, match=r"`cross_attention_mask`.*\(2, 1, 3, 4\)"):
        check_cross_attention_mask(torch.ones(2, 1, 3, 4, dtype=torch.bool), 2, 3, 4)
    with pytest.raises(ValueError, match=r"\(2, 4\) .*got \(2, 5\)"):
        check_cross_attention_mask(torch.ones(2, 5, dtype=torch.bool), 2, 3, 4)
    with pytest.raises(ValueError, match=r"\(2, 3, 4\) .*got \(2, 1, 4\)"):
        check_cross_attention_mask(torch.ones(2, 1, 4, dtype=torch.bool), 2, 3, 4)
    check_cross_attention_mask(torch.ones(2, 4, dtype=torch.bool), 2, 3, 4)
    check_cross_attention_mask(torch.ones(2, 3, 4, dtype=torch.bool), 2, 3, 4)


@pytest.mark.parametrize("chunk", [1, 2, 3, 12])
@pytest.mark.parametrize("seed", range(6))
def test_latest_group_is_mllamas_rule(seed, chunk):
    """Rules out runs of markers that are cut where a chunk of a prefill, or a decode step, ends."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.where(torch.rand(3, 12, generator=generator) < 0.4, 7, 1)
    ids[0, :3] = 7  # a run at the start, and one row without any
    ids[2] = 1
    counts = (ids == 7).sum(dim=-1)
    num_images = int(counts.max())
    sparse = [get_cross_attention_token_mask(row, 7) for row in ids.tolist()]
    expected = convert_sparse_cross_attention_mask_to_dense(sparse, [[1] * num_images] * 3, 1, 12)[..., 0]
    text = Text(tokens((1,) * num_images, image_mask=torch.arange(num_images)[None] < counts[:, None]))
    seen = [text.sees("latest_group", part == 7) for part in ids.split(chunk, dim=1)]
    assert torch.equal(torch.cat(seen, dim=1), torch.from_numpy(expected).bool())


@torch.no_grad()
@pytest.mark.parametrize("visibility, told", [("all", True), ("latest", False)])
def test_a_later_image_that_earlier_text_does_not_see(visibility, told):
    """Other answers with a cache than without one, and no word about it."""
    model, ids = make_model(image_visibility=visibility, image_token_id=3), token_ids(1)
    ids[0, 1] = 3
    cache = model.encode_images(pixel_values=pixels(1, 1)).fork(DynamicCache(config=model.config.text_config))
    with torch.no_grad(), CaptureLogger(logging.get_logger("hf_xattn.images.conversation")) as said:
        model(ids, cache=cache)
        assert said.out == ""
        model(ids, pixel_values=pixels(1, 1, seed=8), cache=cache)
    assert ("read before the new images came" in said.out) == told


@torch.no_grad()
def test_text_without_markers_of_encoded_images():
    """An answer that has seen no image, as if there were none."""
    model, ids = marked_model()
    cache = model.encode_images(pixel_values=pixels(1, 1))
    for markers, warns in (((0,), False), ((), True)):
        with CaptureLogger(logging.get_logger("hf_xattn.generation_xattn")) as said:
            model.generate(ids(6, *markers), cache=cache, **GREEDY)
        assert ("The text of `generate` has no image marker" in said.out) == warns


def say(model, *args, **given):
    return model.generate(*args, max_new_tokens=4, do_sample=False, **given)


@torch.no_grad()
@pytest.mark.parametrize("visibility", ["all", "latest"])
def test_a_marker_that_is_padding(visibility):
    """Padding that counts as the marker of a picture, and markers that are hidden as padding."""
    text = make_text()
    text.config.pad_token_id = text.generation_config.pad_token_id = MARKER
    model = randomize(retrofit(text, SiglipVisionModel(vision_config()), image_token_id=MARKER, every=2))
    model.config.image_visibility = visibility
    ids = torch.tensor([[MARKER, MARKER, MARKER, 7, 8], [MARKER, 9, 10, 11, 12]])
    mask, images = torch.ones_like(ids), pixels(2, 1)
    mask[0, :2] = 0
    if visibility == "latest":
        with pytest.raises(ValueError, match=f"`pad_token_id` of the text model, got {MARKER} for both"):
            model(ids, attention_mask=mask, pixel_values=images, use_cache=True)
        return
    with pytest.raises(ValueError, match="both `image_token_id` and `pad_token_id`, got none"):
        say(model, ids, pixel_values=images)
    alone = say(model, ids[:1, 2:], attention_mask=mask[:1, 2:], pixel_values=images[:1])
    together = say(model, ids, attention_mask=mask, pixel_values=images)
    assert torch.equal(together[0, 5:], alone[0, 3:])
