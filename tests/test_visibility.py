"""Which text token sees which image token."""

import pytest
import torch
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from hf_xattn.visibility import (
    EVERYTHING,
    ImageTokens,
    check_cross_attention_mask,
    digest_images,
    image_order,
    lay_out,
    visible_images,
)


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
    assert lay_out(None, image_rows=2, text_rows=4, text_len=3, group=2) == EVERYTHING


@pytest.mark.parametrize("null_key", [False, True])
@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("per_text_row", [False, True])
def test_lay_out_folds_every_query_onto_its_own_mask(null_key, repeats, steps, per_text_row):
    """Rules out a mask whose query order differs from that of the folded queries: text would see another row's images."""
    rows, text_len, group, num_tokens = 2, 5, 2, 6
    text_rows = rows * repeats
    mask_rows = text_rows if per_text_row else rows
    sees = torch.rand(mask_rows, steps, num_tokens, generator=torch.Generator().manual_seed(steps)) > 0.4
    sees[0, 0] = False
    result = lay_out(sees, image_rows=rows, text_rows=text_rows, text_len=text_len, group=group, null_key=null_key)
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
    mask = lay_out(booleans([[[1, 0]], [[1, 1]]]), image_rows=2, text_rows=6, text_len=50, group=4).mask
    assert mask.shape == (2, 1, 1, 2)


def test_lay_out_takes_masks_between_image_and_text_rows():
    """Rules out a stored mask of two questions an image that is repeated once an image row when beams come on top."""
    sees = booleans([[[1, 0]], [[0, 1]]])  # two questions about one image
    result = lay_out(sees, image_rows=1, text_rows=4, text_len=3, group=2)
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


def tokens(**fields) -> ImageTokens:
    """Two images of two tokens each."""
    return ImageTokens(num_images=2, image_of_token=torch.tensor([0, 0, 1, 1]), **fields)


def test_sees_all():
    """Rules out a mask where everything is visible, and padding that is forgotten."""
    assert tokens().sees("all", None, None) is None
    mask = booleans([[1, 1, 0, 0], [1, 1, 1, 1]])
    assert torch.equal(tokens(token_mask=mask).sees("all", None, None), mask[:, None])


@pytest.mark.parametrize(
    "mode, last", [("previous", [1, 1, 1, 1]), ("latest", [0, 0, 1, 1]), ("latest_group", [0, 0, 1, 1])]
)
def test_sees_counts_markers_over_forwards(mode, last):
    """Rules out a decode step that forgets the markers of the prompt."""
    markers = booleans([[0, 1, 0, 1], [0, 0, 1, 0]])
    whole = tokens().sees(mode, markers, None)
    assert whole[0].int().tolist() == [[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], last]
    assert whole[1].int().tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]
    images = tokens()
    steps = [images.sees(mode, markers[:, step : step + 1], None) for step in range(4)]
    assert torch.equal(torch.cat(steps, dim=1), whole)


def test_latest_group_with_too_many_markers():
    """Rules out a generated marker that takes the images away."""
    images = tokens(image_mask=booleans([[1, 1], [1, 0]]))
    markers = booleans([[1, 1, 0, 1, 0], [0, 1, 1, 0, 1]])
    seen = images.sees("latest_group", markers, None)
    assert seen[0].int().tolist() == [[1, 1, 0, 0]] + [[1, 1, 1, 1]] * 4
    assert seen[1].int().tolist() == [[0, 0, 0, 0]] + [[1, 1, 0, 0]] * 4


@pytest.mark.parametrize("mode", ["previous", "latest", "latest_group"])
def test_a_marker_too_many_takes_no_later_image(mode):
    """Rules out a chat in which the model wrote a marker, and text in front of the next image's marker sees that image."""
    first = ImageTokens(1, torch.tensor([0]))
    first.sees(mode, booleans([[1, 0]]), None)
    first.sees(mode, booleans([[0]]), None)
    first.sees(mode, booleans([[1]]), None)  # written by the model
    both = first.append(ImageTokens(1, torch.tensor([0])))
    seen = both.sees(mode, booleans([[0, 1, 0]]) if mode != "latest_group" else booleans([[1, 0, 0]]), None)
    after = [1, 1] if mode == "previous" else [0, 1]
    assert seen.int().tolist() == ([[[1, 0], after, after]] if mode != "latest_group" else [[after] * 3])


def test_sees_after_the_batch_was_repeated():
    """Rules out beams that start after the prompt and lose its marker count or its padding."""
    images = tokens(token_mask=booleans([[1, 1, 1, 0], [1, 1, 1, 1]]))
    images.sees("latest", booleans([[1, 1], [0, 1]]), None)
    seen = images.sees("latest", booleans([[0]] * 4), None)
    assert seen[:, 0].int().tolist() == [[0, 0, 1, 0], [0, 0, 1, 0], [1, 1, 0, 0], [1, 1, 0, 0]]


def test_sees_puts_the_callers_mask_first_and_keeps_it():
    """Rules out an explicit per-token mask that is overridden by markers, or forgotten at the next decode step."""
    images = tokens(token_mask=booleans([[1, 1, 1, 0]]))
    own = booleans([[[0, 0, 0, 0], [0, 1, 0, 1]]])
    assert torch.equal(images.sees("latest", booleans([[1, 1]]), own), own & booleans([[[1, 1, 1, 0]]]))
    later = images.sees("latest", booleans([[1]]), None)
    assert later.int().tolist() == [[[0, 1, 0, 0]]]


def test_append():
    """Rules out later images that take the numbers of earlier ones, or masks that shift."""
    first = tokens(token_mask=booleans([[1, 1, 1, 0]]), text_mask=booleans([[1, 0, 0, 0]]))
    first.markers_seen = torch.tensor([2])
    later = ImageTokens(1, torch.tensor([0, 0]), image_mask=booleans([[0]]))
    both = first.append(later)
    assert both.num_images == 3 and both.num_tokens == 6
    assert both.image_of_token.tolist() == [0, 0, 1, 1, 2, 2]
    assert both.token_mask.int().tolist() == [[1, 1, 1, 0, 1, 1]]
    assert both.image_mask.int().tolist() == [[1, 1, 0]]
    assert both.text_mask.int().tolist() == [[1, 0, 0, 0, 1, 1]]
    assert both.markers_seen.tolist() == [2]
    assert tokens().append(tokens()).token_mask is None


def test_append_digests():
    """Rules out a digest that covers half of the images: a repeated image would be taken for a new one."""
    one, two = torch.tensor([[1, 2]]), torch.tensor([[3, 4]])
    both = tokens(digest=one, digest_of="image").append(tokens(digest=two, digest_of="image"))
    assert both.digest.tolist() == [[1, 2, 3, 4]] and both.digest_of == "image"
    assert tokens(digest=one, digest_of="image").append(tokens(digest=two, digest_of="token")).digest is None
    assert tokens(digest=one, digest_of="image").append(tokens()).digest is None


def test_select():
    """Rules out rows that keep another row's padding, markers or digest."""
    images = tokens(
        token_mask=booleans([[1, 1, 1, 1], [1, 1, 0, 0]]),
        image_mask=booleans([[1, 1], [1, 0]]),
        text_mask=booleans([[1, 1, 1, 1], [0, 1, 0, 0]]),
        markers_seen=torch.tensor([2, 1]),
        digest=torch.tensor([[1, 2], [3, 4]]),
        digest_of="image",
    )
    taken = images.select(torch.tensor([1, 1, 0]))
    assert taken.token_mask.int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
    assert taken.image_mask.int().tolist() == [[1, 0], [1, 0], [1, 1]]
    assert taken.text_mask.int().tolist() == [[0, 1, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1]]
    assert taken.markers_seen.tolist() == [1, 1, 2]
    assert taken.digest.tolist() == [[3, 4], [3, 4], [1, 2]] and taken.digest_of == "image"
    assert (taken.num_images, taken.num_tokens) == (2, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8])
def test_digest_tells_images_apart(dtype):
    """Rules out an image that is taken for another one, or for a new one because its batch differs."""
    images = (torch.randn(3, 2, 3, 5, 7) * 50).to(dtype)
    digests = digest_images(images)
    assert digests.shape == (3, 2) and len(set(digests.flatten().tolist())) == 6
    for row in range(3):
        assert torch.equal(digest_images(images[row : row + 1]), digests[row : row + 1])
    assert torch.equal(digest_images(images.flip(0).flip(1)), digests.flip(0).flip(1))
    assert torch.equal(digest_images(images.transpose(-1, -2).contiguous().transpose(-1, -2)), digests)
    changed = images.clone()
    changed[1, 0, 2, 4, 6] += 1
    assert (digest_images(changed) != digests).nonzero().tolist() == [[1, 0]]


def test_digest_depends_on_the_order_of_pixels():
    """Rules out a plain sum, which is the same for an image and its mirror image, and for any two that swap pixels."""
    images = torch.randn(1, 1, 3, 5, 7)
    assert not torch.equal(digest_images(images), digest_images(images.flip(-1)))
    assert not torch.equal(digest_images(torch.zeros(1, 1, 4)), digest_images(torch.zeros(1, 1, 5)))


def test_mask_errors():
    """Rules out a mask of 0 and 1, or of a wrong shape, that is taken for something else."""
    with pytest.raises(TypeError, match=r"`cross_attention_mask`.*torch.int64.*\.bool\(\)"):
        check_cross_attention_mask(torch.ones(2, 4, dtype=torch.long), 2, 3, 4)
    with pytest.raises(ValueError, match=r"`cross_attention_mask`.*\(2, 1, 3, 4\)"):
        check_cross_attention_mask(torch.ones(2, 1, 3, 4, dtype=torch.bool), 2, 3, 4)
    with pytest.raises(ValueError, match=r"\(2, 4\), got \(2, 5\)"):
        check_cross_attention_mask(torch.ones(2, 5, dtype=torch.bool), 2, 3, 4)
    with pytest.raises(ValueError, match=r"\(2, 3, 4\), got \(2, 1, 4\)"):
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
    images = ImageTokens(
        num_images, torch.arange(num_images), image_mask=torch.arange(num_images)[None] < counts[:, None]
    )
    seen = [images.sees("latest_group", part == 7, None) for part in ids.split(chunk, dim=1)]
    assert torch.equal(torch.cat(seen, dim=1), torch.from_numpy(expected).bool())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [12, 13])
def test_digests_tell_images_apart(dtype, size):
    """An image with flipped signs, swapped pixels or one other bit that passes for the one in the cache."""
    image = torch.randn(1, 1, 3, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    others = [image.roll(1, dims=-1), image.flip(-1), -image, torch.zeros_like(image), image.abs()]
    for first in range(3 * size):
        for second in range(first, 3 * size):
            other = image.clone().view(-1)
            other[first] *= -1
            other[second] *= -1 if second > first else 1
            others.append(other.view_as(image))
    digests = digest_images(torch.cat([image, *others])).flatten().tolist()
    assert len(set(digests)) == len(digests)
    assert digest_images(image.repeat(2, 3, 1, 1)).unique().tolist() == [digests[0]]
