"""Ctrl-C at any moment of `generate`, and many generates at once on one model."""

import random
import sys
import threading

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from helpers.models.tiny_models import make_model, pixels, token_ids
from hf_xattn.cache.xattn_cache import XAttnCache


slow = pytest.mark.slow
NEW = 6


class CtrlC:
    """In the `with` statement, KeyboardInterrupt is raised at the n-th call of a Python function, wherever that is."""

    def __init__(self, number):
        self.left = number
        self.calls = 0

    def __enter__(self):
        sys.setprofile(self.count)
        return self

    def __exit__(self, kind, error, trace):
        sys.setprofile(None)
        return kind is KeyboardInterrupt

    def count(self, frame, event, argument):
        if event == "call":
            self.calls += 1
            if self.calls == self.left:
                raise KeyboardInterrupt


def generate(model, ids, **inputs):
    return model.generate(ids, do_sample=False, max_new_tokens=NEW, **inputs)


def empty_cache(model, kind):
    config = model.config.get_text_config(decoder=True)
    text = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=40)
    return EncoderDecoderCache(text, DynamicCache())


def reset_if_broken(cache, kind):
    """Empties a cache whose text nothing can take back: one of static size, which each layer overwrites."""
    if not getattr(cache, "broken", False):
        return False
    assert kind == "static"
    cache.reset()
    return True


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # interrupts that Python swallows itself
@pytest.mark.parametrize("times", [2, pytest.param(60, marks=slow)], ids=["some", "many"])
@pytest.mark.parametrize("store", [False, True], ids=["", "store"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_ctrl_c_in_generate(kind, store, times):
    """A model that answers otherwise after an interrupt; a cache with half a forward pass in it, or with half an
    image.
    """
    model, ids, images = make_model(), token_ids(2, 9), pixels(2, 1)
    expected = generate(model, ids, pixel_values=images)
    if store:
        model.enable_image_store(2**24)
    more = torch.cat([expected, token_ids(2, 4, seed=8)], dim=1)
    second = generate(model, more, pixel_values=images)
    with CtrlC(0) as whole:
        generate(model, ids, pixel_values=images, cache=empty_cache(model, kind))
    with CtrlC(0) as turn:
        generate(model, more, pixel_values=images, cache=empty_cache(model, kind))
    rng = random.Random(f"{kind} {store} {times}")
    for _ in range(times):
        cache = empty_cache(model, kind)
        with CtrlC(rng.randrange(1, whole.calls)):
            generate(model, ids, pixel_values=images, cache=cache)
        assert torch.equal(generate(model, ids, pixel_values=images), expected)
        if store:
            model.image_store.clear()
        reset_if_broken(cache, kind)
        length = int(cache.get_seq_length())
        # As after any call: what is cached is the beginning of the answer, and the rest is read.
        assert torch.equal(
            generate(model, expected[:, : max(length + 1, 9)], pixel_values=images, cache=cache)[:, : 9 + NEW],
            expected,
        )
        cache = empty_cache(model, kind)
        generate(model, ids, pixel_values=images, cache=cache)
        with CtrlC(rng.randrange(1, turn.calls)):
            generate(model, more, cache=cache)
        given = {"pixel_values": images} if reset_if_broken(cache, kind) else {}
        length = int(cache.get_seq_length())
        again = second[:, : max(length + 1, more.shape[1])]
        assert torch.equal(generate(model, again, cache=cache, **given)[:, : second.shape[1]], second)


def test_ctrl_c_while_a_cache_is_adopted():
    """A caller's cache that became half of ours: every later call with it fails."""
    model, ids, images = make_model(), token_ids(2, 9), pixels(2, 1)
    expected = generate(model, ids, pixel_values=images)
    cache = empty_cache(model, "dynamic")
    with CtrlC(0) as whole:
        XAttnCache.adopt(cache)
    assert whole.calls > 5
    for number in range(1, whole.calls):  # the last call is the one of `__exit__`
        cache = empty_cache(model, "dynamic")
        with CtrlC(number):
            XAttnCache.adopt(cache)
        assert torch.equal(generate(model, ids, pixel_values=images, cache=cache), expected), number


@pytest.mark.parametrize("max_bytes", [None, 2**24, 20_000], ids=["no store", "store", "small store"])
def test_eight_threads_get_the_answers_about_their_own_images(max_bytes):
    """An answer about the picture of another thread."""
    model = make_model()
    if max_bytes is not None:
        model.enable_image_store(max_bytes)
    cases = [
        (token_ids(1 + seed % 2, 5 + seed, seed=seed), {"pixel_values": pixels(1 + seed % 2, 1 + seed % 3, seed=seed)})
        for seed in range(8)
    ]
    options = [{}, {"num_beams": 2}, {"cache_implementation": "static"}, {"use_cache": False}]
    expected = [generate(model, ids, **images, **options[number % 4]) for number, (ids, images) in enumerate(cases)]
    assert len({str(tokens.tolist()) for tokens in expected}) == 8
    start, wrong = threading.Barrier(8), []

    def ask(number):
        ids, images = cases[number]
        try:
            start.wait(60)
            for _ in range(2):
                if not torch.equal(generate(model, ids, **images, **options[number % 4]), expected[number]):
                    wrong.append(number)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert wrong == [] and not any(thread.is_alive() for thread in threads)
