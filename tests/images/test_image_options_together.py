"""Rows with different numbers of images and images in int8 together: each row is as it is alone."""

import pytest
import torch

from helpers.models.tiny_models import make_model, pixels, token_ids
from helpers.references.int8_rounding import rounding
from hf_xattn.utils.transformers_api import CACHE


LAYERS = [0, 1, 3]
REAL = torch.tensor([[True, False, False], [True, True, True], [False, False, False]])


def answers(model, ids, images):
    """Logits of the new tokens, one after another."""
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    found = model.generate(ids, **images, **options, output_logits=True)
    return torch.stack(found.logits, dim=1), found[CACHE]


@torch.no_grad()
@pytest.mark.parametrize(
    "way, dtype", [("call", None), ("encoded", None), ("encoded", "int8"), ("store", None), ("store", "int8")]
)
@pytest.mark.parametrize("quiet", [False, True])
def test_each_row_as_alone(dtype, way, quiet):
    """Padding that is rounded or read; a row that gets the tokens or scales of another."""
    sizes = {"cross_attention_layers": LAYERS, "cross_attention_config": {"quiet_softmax": quiet}}
    model, reference = make_model(**sizes), make_model(**sizes)
    if dtype is not None:
        rounding(reference)
    ids, images = token_ids(3), pixels(3, 3)
    given = {"pixel_values": images, "image_mask": REAL}
    if way == "store":
        model.enable_image_store(2**24, dtype=dtype)
    if way == "encoded":
        given = {"cache": model.encode_images(**given, cache_dtype=dtype)}
    logits, cache = answers(model, ids, given)
    assert cache.cross_attention_cache.cache_dtype == dtype
    for row, real in enumerate(REAL):
        alone = {"pixel_values": images[row : row + 1, real]} if real.any() else {}
        expected, _ = answers(reference, ids[row : row + 1], alone)
        torch.testing.assert_close(logits[row], expected[0], rtol=2e-4, atol=2e-4)
