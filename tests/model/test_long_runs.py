"""Many generates in one process: nothing of them is kept, and nothing compiles again and again."""

import random
import weakref

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from helpers.models.tiny_models import make_model, pixels, token_ids
from helpers.references.memory_checks import STATUS, resident, tensors_alive
from hf_xattn.cache.image_cache import select_images
from hf_xattn.utils.transformers_api import CACHE


slow = pytest.mark.slow
KINDS = ("plain", "static", "beams", "no cache", "assisted", "own cache", "encoded", "sampled", "several images")


def one_call(model, kind, number):
    """A generate with images and a prompt of its own. Returns weak references to what it was given and to what it
    made.
    """
    rng = random.Random(number)
    rows, length = rng.randint(1, 3), rng.randint(2, 12)
    count = rng.randint(2, 3) if kind == "several images" else 1
    ids, images = token_ids(rows, length, seed=number), pixels(rows, count, seed=number)
    options = {"max_new_tokens": rng.randint(1, 5), "do_sample": kind == "sampled", "pixel_values": images}
    made = [images, ids]
    if kind == "static":
        options["cache_implementation"] = "static"
    elif kind == "beams":
        options["num_beams"] = 3
    elif kind == "no cache":
        options["use_cache"] = False
    elif kind == "assisted":
        options["prompt_lookup_num_tokens"] = 2
        ids, options["pixel_values"] = ids[:1], images[:1]
    elif kind in ("own cache", "encoded"):
        cache = EncoderDecoderCache(DynamicCache(config=model.config.text_config), DynamicCache())
        if kind == "encoded":
            cache = select_images(model.encode_images(pixel_values=options.pop("pixel_values")), list(range(rows)))
        options["cache"] = cache
        made.append(cache)
    answer = model.generate(ids, return_dict_in_generate=True, **options)
    made += [answer.sequences]
    if answer.get(CACHE) is not None:
        made.append(answer[CACHE])
    return [weakref.ref(thing) for thing in made]


def check_nothing_is_kept(model, number, before):
    gone = []
    for index in range(number):
        gone += one_call(model, KINDS[index % len(KINDS)], index)
    after = tensors_alive()
    assert not [reference() for reference in gone if reference() is not None]
    assert after[0] <= before[0] and after[1] <= before[1], f"{before} tensors and bytes became {after}"


@pytest.mark.parametrize("max_bytes", [pytest.param(None, marks=slow, id=""), pytest.param(30_000, id="store")])
def test_nothing_is_kept(max_bytes):
    """A model that holds the images, the caches or the answers of calls that are over."""
    model = make_model()
    if max_bytes is not None:
        model.enable_image_store(max_bytes)
    for index in range(2 * len(KINDS)):  # what is made once: buffers of positions, an image store that is full
        one_call(model, KINDS[index % len(KINDS)], index)
    before = tensors_alive()
    if max_bytes is not None:  # the last images are other ones
        blocks = len(model.blocks)
        before = before[0] + 2 * blocks * 4, before[1] + max_bytes
    check_nothing_is_kept(model, 2 * len(KINDS), before)
    if max_bytes is not None:
        assert 0 < model.image_store.nbytes <= max_bytes


@slow
@pytest.mark.skipif(not STATUS.exists(), reason="the memory of a process is in /proc/self/status, which only Linux has")
def test_memory_of_2000_generates():
    """Memory that grows with the number of calls."""
    model = make_model()
    model.enable_image_store(100_000)
    measured = []
    for part in range(10):
        for index in range(part * 200, (part + 1) * 200):
            one_call(model, KINDS[index % len(KINDS)], index)
        measured.append((*tensors_alive(), resident()))
        print(
            f"{(part + 1) * 200} generates: {measured[-1][0]} tensors, {measured[-1][1]:,} bytes, RSS "
            f"{measured[-1][2]:,}"
        )
    counts, sizes, memory = zip(*measured)
    assert max(counts[2:]) <= max(counts[:2]) + 32 and max(sizes[2:]) <= max(sizes[:2]) + 100_000
    assert max(memory[5:]) - max(memory[:5]) < 8 * 2**20  # less than 8 KB a call
    assert model.image_store.nbytes <= 100_000


@slow
def test_nothing_compiles_again_and_again():
    """A graph for each prompt or for each image: compiling takes longer than the answer, and the graphs are kept."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = make_model()
    model.forward = torch.compile(model.forward, backend="eager", dynamic=True)
    graphs = []
    for index in range(10):
        model.generate(
            token_ids(1, 4 + index, seed=index),
            pixel_values=pixels(1, 1, seed=index),
            cache_implementation="static",
            max_new_tokens=4,
            do_sample=False,
            disable_compile=True,  # `generate` would compile once more on a GPU
        )
        graphs.append(counters["stats"]["unique_graphs"])
    torch._dynamo.reset()
    assert graphs[-1] == graphs[4], graphs
