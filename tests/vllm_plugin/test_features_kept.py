"""What the tower made of a picture is used again for that picture, and for no other."""

import pytest
import torch

from hf_xattn.vllm_plugin.image_features import ImageFeatures, keys_of


def images(*seeds):
    return torch.stack([torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def names(pixels):
    return [row.numpy().tobytes() for row in keys_of(pixels)]


class Tower:
    def __init__(self, pixels):
        self.pixels, self.ran = pixels, []

    def __call__(self, indices):
        self.ran += indices
        return self.pixels[indices].flatten(1)[:, None]


def read(store, *seeds):
    pixels = images(*seeds)
    tower = Tower(pixels)
    assert torch.equal(store.read(pixels, names(pixels), tower), pixels.flatten(1)[:, None])
    return tower.ran


def test_a_picture_is_encoded_once():
    """A tower that runs for every question, or twice for a picture that stands twice in one."""
    store = ImageFeatures()
    assert read(store, 1, 2, 1) == [0, 1]
    assert read(store, 2, 3, 1) == [1]
    assert read(store, 3) == []


def test_memory_is_bounded():
    """Memory that grows with every picture. What was asked for last stays."""
    size = images(0).numel() * 4
    store = ImageFeatures(2 * size)
    for seed in range(5):
        read(store, seed)
        assert store.nbytes <= 2 * size
    assert read(store, 3, 4) == [] and read(store, 0) == [0]
    none = ImageFeatures(0)
    assert read(none, 1) == [0] and read(none, 1) == [0] and none.nbytes == 0


def test_pictures_that_differ_have_other_names():
    """One pixel less, or the same bytes in another shape or type: an answer about another picture."""
    one = images(1)
    changed = one.clone()
    changed[0, 0, 0, 0] += 1e-6
    assert len({*names(one), *names(changed), *names(one.view(1, 3, 2, 8)), *names(one.view(torch.int32))}) == 4


def test_a_limit_that_is_no_number():
    """An engine that starts, and fails at its first picture."""
    with pytest.raises(ValueError, match="1GB"):
        ImageFeatures("1GB")
