"""Which images a cache holds already, told by their content."""

import pytest
import torch

from hf_xattn.cache.digests import digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8])
def test_digest_tells_images_apart(dtype):
    """Rules out an image that is taken for another one, or for a new one because its batch differs."""
    images = (torch.randn(3, 2, 3, 5, 7) * 50).to(dtype)
    digests = digest(images)
    assert digests.shape == (3, 2) and len(set(digests.flatten().tolist())) == 6
    for row in range(3):
        assert torch.equal(digest(images[row : row + 1]), digests[row : row + 1])
    assert torch.equal(digest(images.flip(0).flip(1)), digests.flip(0).flip(1))
    assert torch.equal(digest(images.transpose(-1, -2).contiguous().transpose(-1, -2)), digests)
    changed = images.clone()
    changed[1, 0, 2, 4, 6] += 1
    assert (digest(changed) != digests).nonzero().tolist() == [[1, 0]]


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
    digests = digest(torch.cat([image, *others])).flatten().tolist()
    assert len(set(digests)) == len(digests)
    assert digest(image.repeat(2, 3, 1, 1)).unique().tolist() == [digests[0]]


def test_a_picture_that_is_turned_is_another_one():
    """A white picture of 64 x 32 pixels that is taken for the cached one of 32 x 64."""
    upright, lying = torch.ones(1, 1, 3, 64, 32), torch.ones(1, 1, 3, 32, 64)
    assert int(digest(upright)) != int(digest(lying)) and int(digest(upright)) == int(digest(upright.clone()))
