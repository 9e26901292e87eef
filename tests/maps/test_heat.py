"""Attention as a colour over the picture."""

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.models.tiny_models import make_model, pixels, token_ids
from hf_xattn import attention_maps
from hf_xattn.maps.answer_maps import COLOUR, OPACITY, SIDE, lit, looks


def expected(picture, heat, covered=(1.0, 1.0)):
    """The same picture, pixel by pixel."""
    shown = np.asarray(picture).astype(float)
    colour = np.asarray(Image.new("RGB", (1, 1), COLOUR))[0, 0]
    high, wide = round(picture.height * covered[0]), round(picture.width * covered[1])
    for y in range(high):
        for x in range(wide):
            here = float(heat[y * heat.shape[0] // high, x * heat.shape[1] // wide]) ** 0.7 * OPACITY / 255
            shown[y, x] = shown[y, x] * (1 - here) + colour * here
    return shown


@pytest.mark.parametrize("covered", [(1.0, 1.0), (0.75, 0.5)])
def test_heat_lies_on_its_patch(covered):
    """Rows and columns that are exchanged; heat beside the patches; a picture that is changed."""
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (12, 16, 3), dtype=np.uint8))
    before = picture.tobytes()
    heat = torch.tensor([[0.0, 1.0], [0.5, 0.0], [0.0, 0.1]])
    found = np.asarray(lit(picture, heat, covered))
    assert picture.tobytes() == before
    np.testing.assert_allclose(found, expected(picture, heat, covered), atol=2)


@pytest.mark.parametrize("layers", [[1, 3], [1, 1, 3]], ids=["one block a layer", "two blocks in a layer"])
def test_heat_lies_on_the_patches_of_its_layer(layers):
    """Heat of the first of two blocks, or of another token or picture; pictures with a scale each."""
    model = make_model(cross_attention_layers=layers)
    inputs = {"input_ids": token_ids(batch=1), "pixel_values": pixels(1, num_images=2)}
    maps = attention_maps(model, inputs, max_new_tokens=3, do_sample=False)
    behind = slice(maps.num_given - 1, -1)  # the weights behind a token are at the position before it
    for layer in ("mean", *maps.layers):
        grids = [maps.grid(image, layer=layer, head="mean")[behind] for image in range(2)]
        most = max(float(grid.max()) for grid in grids)
        for tokens in (range(1), range(1, 3)):
            for image, (picture, share) in enumerate(looks(maps, tokens, layer)):
                heat = grids[image][tokens.start : tokens.stop].mean(dim=0)
                assert share == pytest.approx(float(heat.sum()), abs=1e-5)
                read = Image.fromarray((maps.pixels(image) * 255).round().byte().numpy())
                scale = SIDE // max(read.size)
                assert picture.size == (read.width * scale, read.height * scale)
                found = np.asarray(picture)[scale // 2 :: scale, scale // 2 :: scale]  # as the model reads it
                np.testing.assert_allclose(found, expected(read, heat / most), atol=2)


def test_looks_need_patches():
    """Heat on a picture whose tokens lie nowhere on it."""
    perceiver = {"num_latents": 4, "num_hidden_layers": 1}
    blocks = {"context_size": make_model().config.vision_config.hidden_size}
    model = make_model(connector_type="perceiver", perceiver_config=perceiver, cross_attention_config=blocks)
    inputs = {"input_ids": token_ids(batch=1), "pixel_values": pixels(batch=1)}
    with pytest.raises(ValueError, match="perceiver"):
        looks(attention_maps(model, inputs), range(1))
