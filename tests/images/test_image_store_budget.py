"""The image store: its budget, its copies, threads, and what it costs."""

import copy
import gc
import pickle
import threading
from collections import Counter

import pytest
import torch

from helpers.inputs.image_stores import IMAGE_BYTES, MODELS, asked, assert_same, with_store
from helpers.models.marked_models import generate
from helpers.models.tiny_models import make_model, pixels, token_ids
from hf_xattn import XAttnForConditionalGeneration
from hf_xattn.storage import image_store
from hf_xattn.storage.image_store import ImageStore, StoredImage
from hf_xattn.utils.transformers_api import CACHE


# --- the budget


def storages_of(store):
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for image in store._images.values()
        for pair in image.keys_values
        for tensor in pair
    }


@pytest.mark.parametrize("kind", ["plain", "quiet", "qk_norm"])
def test_budget_is_never_passed(kind):
    """A budget passed for a moment, views that keep a whole batch alive, or the image that was just asked for dropped
    first.
    """
    model, ids = make_model(**MODELS[kind]), token_ids(4)
    with_store(model, 10**9)
    generate(model, ids, pixel_values=pixels(4, 1))
    size = model.image_store.nbytes // 4
    assert sum(storages_of(model.image_store).values()) == model.image_store.nbytes
    if kind == "plain":
        assert size == IMAGE_BYTES
    store = with_store(make_model(**MODELS[kind]), 3 * size + size // 2)
    seen = []
    keep = store.image_store.keep

    def watched(*args):
        keep(*args)
        seen.append((store.image_store.nbytes, sum(storages_of(store.image_store).values())))

    store.image_store.keep = watched
    images = pixels(8, 1)
    for first in (0, 4, 2):
        expected = generate(model, ids, pixel_values=images[first : first + 4])
        assert torch.equal(generate(store, ids, pixel_values=images[first : first + 4]), expected)
    assert max(counted for counted, _ in seen) == 3 * size and all(counted == held for counted, held in seen)


def test_least_recently_used_goes_first():
    """The picture of the running chat dropped for one that nobody asked about again."""
    model, ids = make_model(), token_ids(1)
    with_store(model, 2 * IMAGE_BYTES)
    a, b, c = pixels(3, 1).split(1)
    for image in (a, b, a, c, a):
        generate(model, ids, pixel_values=image)
    assert (model.image_store.hits, model.image_store.misses) == (2, 3)
    generate(model, ids, pixel_values=b)
    assert model.image_store.misses == 4, "b had to go for c"
    generate(model, ids, pixel_values=a)
    assert (model.image_store.hits, model.image_store.misses) == (3, 4), "c had to go for b"
    assert model.image_store.nbytes == 2 * IMAGE_BYTES


def test_image_larger_than_the_budget():
    """A store emptied for an image that does not fit all the same, or a call that fails."""
    model, ids, images = make_model(), token_ids(2), pixels(2, 1)
    expected = asked(model, ids, pixel_values=images)
    with_store(model, IMAGE_BYTES - 1)
    for _ in range(2):
        assert_same(asked(model, ids, pixel_values=images), expected)
    assert (model.image_store.hits, model.image_store.misses, model.image_store.nbytes) == (0, 4, 0)
    store = ImageStore(64)

    def image(width):
        return StoredImage(((torch.zeros(1, 1, 1, width), torch.zeros(1, 1, 1, width)),), torch.device("cpu"))

    store.look_up("m", [])
    store.keep("m", b"small", image(4))
    store.keep("m", b"large", image(40))
    assert list(store._images) == [b"small"]


def test_enable_twice_disable_and_clear():
    """A second budget that is ignored, or one that drops what would fit; memory that stays."""
    model, ids = make_model(), token_ids(3)
    assert model.image_store is None and model.model.image_store is None
    model.disable_image_store()
    model.enable_image_store()
    store = model.image_store
    assert store is model.model.image_store and store.max_bytes == 2**30
    generate(model, ids, pixel_values=pixels(3, 1))
    model.enable_image_store(max_bytes=2 * IMAGE_BYTES)
    assert model.image_store is store and (store.max_bytes, store.num_images) == (2 * IMAGE_BYTES, 2)
    model.enable_image_store(3 * IMAGE_BYTES)
    assert (store.num_images, store.misses) == (2, 3)
    assert "num_images=2" in repr(store) and f"nbytes={2 * IMAGE_BYTES}" in repr(store)
    store.clear()
    assert (store.num_images, store.nbytes, store.hits, store.misses) == (0, 0, 0, 0)
    model.disable_image_store()
    assert model.image_store is None
    del store
    gc.collect()
    assert not any(isinstance(thing, ImageStore) for thing in gc.get_referrers(StoredImage))


# --- copies


def test_copies_are_empty(tmp_path):
    """A copy that shares images with a model that is trained on, a lock that cannot be pickled, or images in a
    checkpoint.
    """
    model, ids, images = with_store(make_model(), 10**6), token_ids(), pixels()
    expected = asked(model, ids, pixel_values=images)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.image_store is not model.image_store
        assert (twin.image_store.max_bytes, twin.image_store.num_images, twin.image_store.misses) == (10**6, 0, 0)
        assert_same(asked(twin, ids, pixel_values=images), expected)
        assert twin.image_store.misses == 2
    assert model.image_store.misses == 2
    model.save_pretrained(tmp_path)
    loaded = XAttnForConditionalGeneration.from_pretrained(tmp_path)
    assert loaded.image_store is None
    assert "image_store" not in (tmp_path / "config.json").read_text()


# --- threads


@pytest.mark.parametrize("max_bytes", [2**30, 3 * IMAGE_BYTES], ids=["all_fit", "three_fit"])
def test_threads_get_the_answers_about_their_own_images(max_bytes):
    """Answers about the picture of another thread, a broken count, or threads that wait for ever."""
    model, ids = make_model(), token_ids(1)
    images = pixels(6, 1).split(1)
    expected = [generate(model, ids, pixel_values=image, max_new_tokens=2) for image in images]
    with_store(model, max_bytes)
    wrong, calls = [], 12

    def chat(seed):
        order = torch.randint(0, 6, (calls,), generator=torch.Generator().manual_seed(seed)).tolist()
        try:
            for index in order:
                answer = generate(model, ids, pixel_values=images[index], max_new_tokens=2)
                if not torch.equal(answer, expected[index]):
                    wrong.append(index)
                if model.image_store.nbytes > max_bytes:
                    wrong.append("bytes")
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=chat, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    store = model.image_store
    assert wrong == [] and not any(thread.is_alive() for thread in threads)
    assert store.hits + store.misses == 4 * calls
    assert sum(storages_of(store).values()) == store.nbytes == store.num_images * IMAGE_BYTES


def test_no_lock_while_encoding():
    """Every client waits while one image is encoded."""
    model, ids = with_store(make_model()), token_ids(1)
    a, b = pixels(2, 1).split(1)
    generate(model, ids, pixel_values=a)
    inside, go_on = threading.Event(), threading.Event()

    def slow(*_):
        inside.set()
        assert go_on.wait(60)

    hook = model.model.vision_tower.register_forward_pre_hook(slow)
    thread = threading.Thread(target=generate, args=(model, ids), kwargs={"pixel_values": b})
    thread.start()
    assert inside.wait(60)
    generate(model, ids, pixel_values=a)  # a hit, while the other thread encodes
    assert model.image_store.hits == 1
    go_on.set()
    thread.join(60)
    hook.remove()
    assert model.image_store.num_images == 2


# --- costs


def test_costs_nothing_where_it_is_not_asked(monkeypatch):
    """A hash or an identity of the weights at a decode step, for a text, or without a store."""
    model, ids, images = make_model(), token_ids(), pixels()
    calls = Counter()
    hashing, identity = image_store.content_keys, type(model.model).image_identity
    monkeypatch.setattr(image_store, "content_keys", lambda *a, **k: calls.update(["hash"]) or hashing(*a, **k))
    monkeypatch.setattr(type(model.model), "image_identity", lambda self: calls.update(["id"]) or identity(self))
    read = image_store.StoreReader.read
    monkeypatch.setattr(image_store.StoreReader, "read", lambda *a: calls.update(["read"]) or read(*a))
    generate(model, ids, pixel_values=images, max_new_tokens=4)
    assert calls == {}
    with_store(model)
    generate(model, ids, max_new_tokens=4)
    assert calls == {}
    first = asked(model, ids, pixel_values=images, max_new_tokens=4)
    assert calls == {"hash": 1, "id": 1, "read": 1}
    more = torch.cat([first.sequences, ids[:, :1]], dim=1)
    asked(model, more, pixel_values=images, cache=first[CACHE])
    assert calls == {"hash": 1, "id": 1, "read": 1}, "the cache knows its images"
    model(ids, pixel_values=images)
    assert calls["read"] == 1


def test_wrong_device_is_named():
    """A store that fails first, with an error of its own, or hides the wrong device behind a stored image."""
    model, ids, images = with_store(make_model()), token_ids(), pixels()
    generate(model, ids, pixel_values=images)
    with pytest.raises(ValueError, match="`pixel_values`.*on meta"):
        generate(model, ids, pixel_values=images.to("meta"))


def test_failed_call_stores_nothing():
    """An entry without all blocks, after an error in one of them."""
    model, ids, images = with_store(make_model()), token_ids(), pixels()

    def fail(*_):
        raise RuntimeError("out of memory")

    hook = model.blocks[1].attn.v_proj.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        generate(model, ids, pixel_values=images)
    hook.remove()
    assert model.image_store.num_images == 0
    expected = asked(make_model(), ids, pixel_values=images)
    for _ in range(2):
        assert_same(asked(model, ids, pixel_values=images), expected)
