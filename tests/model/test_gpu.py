"""What only a CUDA device can show. Skipped elsewhere."""

import pytest
import torch

from helpers.models.expectation_models import build
from helpers.models.tiny_models import make_model, pixels, token_ids


pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="offloaded caches and CUDA graphs need CUDA streams"
)

OPTIONS = {"max_new_tokens": 6, "do_sample": False}


@pytest.mark.parametrize("cache", ["offloaded", "offloaded_static", "static", "dynamic"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_caches_give_the_same_tokens(name, cache):
    """Keys and values of images that stay on the host, or are lost on the way back from it."""
    model = make_model(name).to("cuda")
    ids, images = token_ids().to("cuda"), pixels(2, 2).to("cuda")
    expected = model.generate(ids, pixel_values=images, use_cache=False, **OPTIONS)
    for _ in range(2):
        tokens = model.generate(ids, pixel_values=images, cache_implementation=cache, **OPTIONS)
        assert torch.equal(tokens, expected)
    image_cache = model.encode_images(pixel_values=images)
    tokens = model.generate(ids, cache=image_cache, cache_implementation=cache, **OPTIONS)
    assert torch.equal(tokens, expected)
    beams = model.generate(ids, pixel_values=images, num_beams=3, **OPTIONS)
    assert torch.equal(model.generate(ids, cache=image_cache, num_beams=3, **OPTIONS), beams)


def test_the_image_store_stays_on_the_device():
    """Keys and values that stay on the host, are counted without their storage, or come back on a device that the
    model has left.
    """
    model, ids, images = make_model(), token_ids(), pixels(2, 2)
    model.enable_image_store()
    model.generate(ids, pixel_values=images, **OPTIONS)
    model.to("cuda")
    ids, images = ids.to("cuda"), images.to("cuda")
    expected = model.generate(ids, pixel_values=images, **OPTIONS)
    assert (model.image_store.misses, model.image_store.num_images) == (8, 4)
    for cache in ("dynamic", "offloaded", "static"):
        tokens = model.generate(ids, pixel_values=images, cache_implementation=cache, **OPTIONS)
        assert torch.equal(tokens, expected)
    assert (model.image_store.misses, model.image_store.hits) == (8, 12)


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("visibility", ["all", "previous", "latest", "latest_group"])
def test_cuda_graphs_give_the_same_tokens(visibility, padded):
    """Addresses that change between steps: a graph would read another image's keys, or the mask of an earlier text."""
    model = make_model(image_visibility=visibility, image_token_id=5).to("cuda")
    for seed in range(3):
        ids, images = token_ids(2, 9, seed=seed), pixels(2, 2, seed=seed).to("cuda")
        ids[ids == 5] = 6
        for marker in (1 + seed, 5):
            ids[:, marker] = 5
        inputs = {"pixel_values": images, "attention_mask": torch.ones_like(ids).to("cuda")}
        if padded:
            inputs["attention_mask"][0, 0] = 0
            inputs["image_mask"] = torch.tensor([[True, True], [True, False]], device="cuda")
            ids[1, 5] = 6
        ids = ids.to("cuda")
        expected = model.generate(ids, **inputs, use_cache=False, **OPTIONS)
        # With a static cache `generate` compiles the decode step in mode "reduce-overhead", which records CUDA graphs.
        assert torch.equal(model.generate(ids, **inputs, cache_implementation="static", **OPTIONS), expected)


def test_cuda_graphs_of_chunks():
    """Chunks of a prompt, which `generate` compiles as well: a count of image markers that the next chunk loses."""
    model = make_model(image_visibility="previous", image_token_id=5).to("cuda")
    ids, images = token_ids(2, 9), pixels(2, 2).to("cuda")
    ids[ids == 5] = 6
    ids[:, [1, 5]] = 5
    ids = ids.to("cuda")
    expected = model.generate(ids, pixel_values=images, use_cache=False, **OPTIONS)
    chunks = {"cache_implementation": "static", "prefill_chunk_size": 3}
    assert torch.equal(model.generate(ids, pixel_values=images, **chunks, **OPTIONS), expected)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_states_that_cuda_graphs_return(implementation):
    """Attentions and hidden states of a step that the next one writes over."""
    model, ids, images = make_model().to("cuda"), token_ids().to("cuda"), pixels(2, 2).to("cuda")
    model.set_attn_implementation(implementation)
    asked = {"output_attentions": True, "output_hidden_states": True, "return_dict_in_generate": True, **OPTIONS}
    expected = model.generate(ids, pixel_values=images, cache_implementation="static", disable_compile=True, **asked)
    found = model.generate(ids, pixel_values=images, cache_implementation="static", **asked)
    for name in ("cross_attentions", "hidden_states"):
        for step, steps in zip(expected[name], found[name], strict=True):
            torch.testing.assert_close(steps, step)


@pytest.mark.parametrize("base", ["dense", "hybrid", "experts", "sliding"])
def test_compiled_steps_with_other_images(base):
    """Numbers of images that become symbols of the graph."""
    model = build(base, "siglip").to("cuda")
    for count in (1, 2, 3):
        ids, images = token_ids(2, 7, seed=count).to("cuda"), pixels(2, count, seed=count).to("cuda")
        expected = model.generate(ids, pixel_values=images, use_cache=False, **OPTIONS)
        tokens = model.generate(ids, pixel_values=images, cache_implementation="static", **OPTIONS)
        assert torch.equal(tokens, expected)


@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_equal_eager(implementation, dtype):
    """A CUDA kernel that reads the folded layout or its mask in another way."""
    block = {"head_dim": 16, "num_key_value_heads": 2}
    model = make_model(dtype=dtype, image_visibility="latest", image_token_id=5, cross_attention_config=block).to(
        "cuda"
    )
    ids, images = token_ids(2, 9).to("cuda"), pixels(2, 2).to("cuda")
    ids[:, [1, 5]] = 5
    model.set_attn_implementation("eager")
    expected = model(ids, pixel_values=images).logits.float()
    for each in model.blocks:
        each.set_attn_implementation(implementation)
        assert each.attn.config._attn_implementation == implementation
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    assert torch.allclose(model(ids, pixel_values=images).logits.float(), expected, atol=tolerance)
