"""Input that does not fit: errors that name the argument and the numbers."""

import pytest
import torch
from conftest import make_model, pixels, token_ids
from transformers.cache_utils import DynamicCache, EncoderDecoderCache


MARKER = 3


def states(batch=2, num_tokens=5, width=32, seed=5):
    return torch.randn(batch, num_tokens, width, generator=torch.Generator().manual_seed(seed))


BAD_CALLS = {
    "states_rank": ({"cross_attention_states": torch.zeros(2, 32)}, ValueError, r"cross_attention_states.*\(2, 32\)"),
    "states_width": ({"cross_attention_states": torch.zeros(2, 5, 31)}, ValueError, "context_size=32.*31"),
    "states_batch": ({"cross_attention_states": torch.zeros(3, 5, 32)}, ValueError, "batch 3, expected 2"),
    "states_dtype": (
        {"cross_attention_states": torch.zeros(2, 5, 32, dtype=torch.long)},
        TypeError,
        "cross_attention_states.*floating point.*int64",
    ),
    "states_empty": ({"cross_attention_states": torch.zeros(2, 0, 32)}, ValueError, "no image token"),
    "mask_dtype": (
        {"cross_attention_states": states(), "cross_attention_mask": torch.ones(2, 5)},
        TypeError,
        "cross_attention_mask.*boolean.*float32",
    ),
    "mask_rank": (
        {"cross_attention_states": states(), "cross_attention_mask": torch.ones(2, 1, 7, 5, dtype=torch.bool)},
        ValueError,
        r"cross_attention_mask.*\(2, 1, 7, 5\)",
    ),
    "mask_tokens": (
        {"cross_attention_states": states(), "cross_attention_mask": torch.ones(2, 6, dtype=torch.bool)},
        ValueError,
        r"cross_attention_mask.*\(2, 5\).*\(2, 6\)",
    ),
    "mask_text": (
        {"cross_attention_states": states(), "cross_attention_mask": torch.ones(2, 6, 5, dtype=torch.bool)},
        ValueError,
        r"cross_attention_mask.*\(2, 7, 5\).*\(2, 6, 5\)",
    ),
    "mask_alone": (
        {"cross_attention_mask": torch.ones(2, 5, dtype=torch.bool)},
        ValueError,
        "`cross_attention_mask` was given without images",
    ),
    "image_mask_alone": (
        {"image_mask": torch.ones(2, 1, dtype=torch.bool)},
        ValueError,
        "`image_mask` was given without",
    ),
    "image_mask_shape": (
        {"pixel_values": pixels(), "image_mask": torch.ones(2, 2, dtype=torch.bool)},
        ValueError,
        r"image_mask.*\(2, 1\).*\(2, 2\)",
    ),
    "image_mask_dtype": (
        {"pixel_values": pixels(), "image_mask": torch.ones(2, 1, dtype=torch.long)},
        TypeError,
        "image_mask.*boolean.*int64",
    ),
    "pixels_rank": ({"pixel_values": torch.zeros(3, 32, 32)}, ValueError, r"pixel_values.*\(3, 32, 32\)"),
    "pixels_channels": ({"pixel_values": torch.zeros(2, 1, 1, 32, 32)}, ValueError, "1 channels.*takes 3"),
    "pixels_batch": ({"pixel_values": pixels(3)}, ValueError, "pixel_values.*batch 3, expected 2"),
    "pixels_dtype": (
        {"pixel_values": torch.zeros(2, 1, 3, 32, 32, dtype=torch.uint8)},
        TypeError,
        "pixel_values.*floating point.*uint8",
    ),
    "pixels_none": ({"pixel_values": torch.zeros(2, 0, 3, 32, 32)}, ValueError, "no image"),
    "both": ({"pixel_values": pixels(), "cross_attention_states": states()}, ValueError, "not both"),
    "ids_and_embeds": ({"inputs_embeds": torch.zeros(2, 7, 32)}, ValueError, "exactly one"),
    "no_text": ({"input_ids": None, "pixel_values": pixels()}, ValueError, "exactly one"),
    "ids_rank": ({"input_ids": token_ids()[0]}, ValueError, r"input_ids.*\(7,\)"),
}


@pytest.fixture(scope="module")
def served():
    return make_model()


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_input_is_named(served, case):
    """A shape that broadcasts, or an error from deep inside that names neither argument nor numbers."""
    arguments, error, message = BAD_CALLS[case]
    arguments = {"input_ids": token_ids(), **arguments}
    with pytest.raises(error, match=message):
        served(**arguments)


def test_images_need_a_way_in():
    """Pixels ignored by a model without a vision tower; markers that cannot be found in embeddings."""
    model = make_model(vision=False)
    with pytest.raises(ValueError, match="no vision tower.*cross_attention_states"):
        model(token_ids(), pixel_values=pixels())
    with pytest.raises(ValueError, match="no vision tower"):
        model.get_image_features(pixels())
    model = make_model(image_token_id=MARKER, image_visibility="previous")
    with pytest.raises(ValueError, match="image_visibility='previous'.*inputs_embeds"):
        model(inputs_embeds=torch.zeros(2, 7, 32), pixel_values=pixels())


@torch.no_grad()
def test_caches_that_do_not_fit_are_refused():
    """Images of another model or batch, read as noise."""
    model, ids = make_model(), token_ids()
    with pytest.raises(ValueError, match="DynamicCache, which has no place for images"):
        model(ids, pixel_values=pixels(), past_key_values=DynamicCache())
    fewer = make_model(cross_attention_layers=[1]).encode_images(pixel_values=pixels())
    with pytest.raises(ValueError, match="Expected images for 2 cross-attention blocks.*got 1"):
        model(ids, past_key_values=fewer)
    heads = make_model(cross_attention_config={"num_attention_heads": 4, "num_key_value_heads": 4})
    with pytest.raises(ValueError, match="Expected 2 K/V heads.*got 4"):
        model(ids, past_key_values=heads.encode_images(pixel_values=pixels()))
    width = make_model(cross_attention_config={"head_dim": 6})
    with pytest.raises(ValueError, match="Expected 2 K/V heads of width 8.*got 2 of width 6"):
        model(ids, past_key_values=width.encode_images(pixel_values=pixels()))
    two = model.encode_images(pixel_values=pixels())
    with pytest.raises(ValueError, match="multiple of 2, the image rows.*got 3 text rows"):
        model(token_ids(3), past_key_values=two)
    foreign = EncoderDecoderCache(DynamicCache(), DynamicCache())
    foreign.cross_attention_cache.update(torch.zeros(2, 2, 5, 8), torch.zeros(2, 2, 5, 8), 0)
    with pytest.raises(ValueError, match="filled by another model"):
        model(ids, pixel_values=pixels(), past_key_values=foreign)
    with pytest.raises(ValueError, match="encode_images.*needs"):
        model.encode_images()
    with pytest.raises(ValueError, match=r"\(batch, num_image_tokens\)"):
        model.encode_images(cross_attention_states=states(), cross_attention_mask=torch.ones(2, 7, 5, dtype=torch.bool))
