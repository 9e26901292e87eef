"""The image store: an image is encoded once, ever, and never taken for another."""

import copy
import gc
import pickle
import threading
from collections import Counter

import pytest
import torch
from conftest import make_model, pixels, token_ids
from conversation_helpers import MARKER, RULES, close, fresh_cache, generate, marked
from test_importers_mllama import make_mllama
from test_perceiver import SMALL

from hf_xattn import XAttnForConditionalGeneration, image_store
from hf_xattn.image_store import ImageStore, StoredImage
from hf_xattn.importers import import_checkpoint


NUM_TOKENS = 16
IMAGE_BYTES = 2 * 2 * NUM_TOKENS * 32 * 4 // 2  # blocks, K and V, tokens, 2 of 4 heads of width 8, float32


def with_store(model, max_bytes=2**30):
    model.enable_image_store(max_bytes)
    return model


class Counted:
    """Counts the images that the vision tower reads, and the calls of K/V projections."""

    def __init__(self, model):
        self.model = model
        self.counts = Counter()

    def __enter__(self):
        tower = self.model.model.vision_tower
        self.hooks = []
        if tower is not None:
            count = lambda module, args, kwargs: self.counts.update(images=len(kwargs["pixel_values"]))  # noqa: E731
            self.hooks.append(tower.register_forward_pre_hook(count, with_kwargs=True))
        for block in self.model.blocks:
            for projection in (block.attn.k_proj, block.attn.v_proj):
                self.hooks.append(projection.register_forward_hook(lambda *_: self.counts.update(projections=1)))
        return self.counts

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()


def asked(model, ids, **kwargs):
    """Tokens and logits of a greedy answer."""
    return generate(model, ids, return_dict_in_generate=True, output_logits=True, **kwargs)


def assert_same(first, second, equal=True):
    assert torch.equal(first.sequences, second.sequences)
    for mine, theirs in zip(first.logits, second.logits, strict=True):
        assert torch.equal(mine, theirs) if equal else close(mine, theirs)


MODELS = {
    "plain": {},
    "quiet": {"cross_attention_config": {"quiet_softmax": True}},
    "qk_norm": {"cross_attention_config": {"qk_norm": True, "num_key_value_heads": 1}},
    "position_bias": {"cross_attention_config": {"position_bias": True}},
    "perceiver": {
        "connector_type": "perceiver",
        "perceiver_config": SMALL,
        "cross_attention_config": {"context_size": 24},
    },
    "default_features": {"vision_feature_select_strategy": "default"},
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("batch,num_images", [(1, 1), (2, 3)])
def test_second_question_runs_no_encoder(kind, batch, num_images):
    """A picture encoded again for every question; other answers than without a store, or from a store than from the tower."""
    model, ids, images = make_model(**MODELS[kind]), token_ids(batch), pixels(batch, num_images)
    expected, other = asked(model, ids, pixel_values=images), asked(model, ids + 1, pixel_values=images)
    with_store(model)
    with Counted(model) as counts:
        assert_same(asked(model, ids, pixel_values=images), expected)
        assert counts == {"images": batch * num_images, "projections": 4}
        assert_same(asked(model, ids, pixel_values=images), expected)
        assert_same(asked(model, ids + 1, pixel_values=images.clone()), other)
        assert counts == {"images": batch * num_images, "projections": 4}
    store = model.image_store
    assert (store.hits, store.misses) == (2 * batch * num_images, batch * num_images)
    assert store.num_images == batch * num_images and 0 < store.nbytes <= store.max_bytes


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kept", [False, True], ids=["new_conversation", "kept_cache"])
def test_chat_sends_every_image_again(rule, kept):
    """All images of a chat encoded at every turn; stored images in the places of others."""
    model, plain = with_store(marked(rule)), marked(rule)
    turns = [pixels(1, 1, seed=seed) for seed in range(4)]
    text = torch.tensor([[MARKER, 7, 8]])
    caches = (fresh_cache(), fresh_cache()) if kept else (None, None)
    for turn in range(1, 4):
        images = torch.cat(turns[:turn], dim=1)
        with Counted(model) as counts:
            answer = asked(model, text, pixel_values=images, past_key_values=caches[0])
        assert counts == {"images": 1, "projections": 4}, "only the new image"
        assert_same(answer, asked(plain, text, pixel_values=images, past_key_values=caches[1]), equal=False)
        text = torch.cat([answer.sequences, torch.tensor([[MARKER, 10 + turn]])], dim=1)
    assert model.image_store.misses == 3 and model.image_store.hits == (0 if kept else 3)


@pytest.mark.parametrize("rule", ["all", "latest"])
@pytest.mark.parametrize("kind", ["plain", "quiet"])
def test_rows_are_put_together(rule, kind):
    """Hits and misses of a batch in each other's places, an image that comes twice encoded twice, padding images stored or seen."""
    model = marked(rule, **MODELS[kind])
    a, b, c, d = pixels(4, 1).unbind(0)
    batch = torch.stack([torch.cat([a, b, a]), torch.cat([c, b, d]), torch.cat([b, d, c])])
    image_mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 1, 1]]).bool()
    ids = torch.tensor([[MARKER, 5, MARKER, 6, MARKER, 7], [4, 5, 6, 9, MARKER, 7], [8, MARKER, 6, 5, MARKER, 7]])
    expected = asked(model, ids, pixel_values=batch, image_mask=image_mask)
    with_store(model)
    asked(model, ids[2:], pixel_values=batch[2:, 1:], image_mask=image_mask[2:, 1:])  # d, c
    with Counted(model) as counts:
        assert_same(asked(model, ids, pixel_values=batch, image_mask=image_mask), expected, equal=False)
        assert counts == {"images": 2, "projections": 4}, "a and b"
        assert_same(asked(model, ids, pixel_values=batch, image_mask=image_mask), expected, equal=False)
        assert counts["images"] == 2
    assert (model.image_store.misses, model.image_store.hits) == (4, 4 + 6)
    nobody = torch.zeros_like(image_mask)
    blind = torch.full_like(ids, 5)
    assert_same(
        asked(model, blind, pixel_values=batch, image_mask=nobody),
        asked(marked(rule, **MODELS[kind]), blind, pixel_values=batch, image_mask=nobody),
    )
    assert (model.image_store.misses, model.image_store.hits) == (4, 10)


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("kind", ["plain", "quiet"])
def test_features(rank, kind):
    """Features projected again; a mask taken for a part of them."""
    model, ids = make_model(vision=False, **MODELS[kind]), token_ids(2)
    states = torch.randn(2, 3, 5, 32) if rank == 4 else torch.randn(2, 5, 32)
    mask = torch.rand(2, states[0].numel() // 32) < 0.7
    expected = [asked(model, ids, cross_attention_states=states, cross_attention_mask=m) for m in (None, mask)]
    with_store(model)
    with Counted(model) as counts:
        for _ in range(2):
            assert_same(asked(model, ids, cross_attention_states=states), expected[0])
            assert_same(asked(model, ids, cross_attention_states=states, cross_attention_mask=mask), expected[1])
    assert counts == {"projections": 4}
    assert model.image_store.num_images == (6 if rank == 4 else 2)


def test_features_that_a_cache_holds_in_part():
    """Features of one axis that grow: the tail taken for the whole."""
    model, plain, ids = with_store(make_model(vision=False)), make_model(vision=False), token_ids(1, 4)
    states = torch.randn(1, 9, 32)
    for served in (model, plain):
        served.cache = fresh_cache()
    for length in (4, 9):
        answers = [
            asked(served, ids, cross_attention_states=states[:, :length], past_key_values=served.cache)
            for served in (model, plain)
        ]
        assert_same(*answers, equal=False)
        ids = torch.cat([answers[0].sequences, token_ids(1, 2)], dim=1)
    assert model.image_store.misses == 2


def test_tiles():
    """The same pixels as other tiles, or a padding tile, taken for the stored image."""
    model = import_checkpoint(make_mllama())
    images = torch.randn(2, 2, 4, 3, 28, 28, generator=torch.Generator().manual_seed(5))
    ids = torch.tensor([[96, 5, 96, 6, 7], [4, 5, 6, 96, 7]])
    ratio_ids = torch.tensor([[6, 3], [2, 0]])
    ratio_mask = torch.tensor([[[1, 1, 1, 1], [1, 1, 0, 0]], [[1, 1, 0, 0], [0, 0, 0, 0]]])

    def ask(ratio_ids=ratio_ids, ratio_mask=ratio_mask):
        return asked(model, ids, pixel_values=images, aspect_ratio_ids=ratio_ids, aspect_ratio_mask=ratio_mask)

    others = [
        {"ratio_ids": torch.tensor([[6, 2], [2, 0]])},
        {"ratio_mask": ratio_mask * torch.tensor([1, 1, 0, 0])},
    ]
    expected, expected_others = ask(), [ask(**other) for other in others]
    with_store(model)
    for _ in range(2):
        assert_same(ask(), expected, equal=False)
    assert (model.image_store.misses, model.image_store.hits) == (3, 3)
    for other, wanted in zip(others, expected_others):
        assert_same(ask(**other), wanted, equal=False)
    assert model.image_store.misses == 5, "each of the others differs in one image"


@pytest.mark.parametrize(
    "how",
    [
        {"num_beams": 3},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 4, "num_return_sequences": 2},
        {"cache_implementation": "static"},
        {"prompt_lookup_num_tokens": 2},
        {"output_attentions": True},
        {"use_cache": False},
    ],
    ids=str,
)
@torch.no_grad()
def test_ways_to_decode(how):
    """A decoding method that sees other images, or expands stored ones in place."""
    model = make_model()
    model.set_attn_implementation("eager")
    batch = 1 if "prompt_lookup_num_tokens" in how else 2
    ids, images = token_ids(batch), pixels(batch, 2)

    def ask():
        torch.manual_seed(11)
        return asked(model, ids, pixel_values=images, **how)

    expected = ask()
    with_store(model)
    for _ in range(3):
        assert_same(ask(), expected)
    misses = 0 if "use_cache" in how else 2 * batch
    assert (model.image_store.misses, model.image_store.hits) == (misses, 2 * misses)
    if "output_attentions" in how:
        for mine, theirs in zip(ask().cross_attentions[0], expected.cross_attentions[0], strict=True):
            assert torch.equal(mine, theirs)


@torch.no_grad()
def test_encode_images_and_forks():
    """`encode_images` that encodes again, or gives other caches; a caller's cache that the store and it write into together."""
    model, plain, ids = with_store(make_model()), make_model(), token_ids(2)
    images = pixels(2, 3)
    encoded, expected = (served.encode_images(pixel_values=images[:, :2]) for served in (model, plain))
    with Counted(model) as counts:
        again = model.encode_images(pixel_values=images[:, :2])
        assert counts == {}
    for cache in (encoded, again):
        assert cache.cross_attention_cache.made_by == expected.cross_attention_cache.made_by
        for mine, theirs in zip(cache.cross_attention_cache.layers, expected.cross_attention_cache.layers, strict=True):
            assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.values, theirs.values)
    # the store's tensors are its own: a caller may do anything with a cache
    for layer in again.cross_attention_cache.layers:
        layer.keys.zero_()
        layer.values.zero_()
    for _ in range(2):
        with Counted(model) as counts:
            answer = asked(model, ids, pixel_values=images, past_key_values=encoded)
        assert_same(answer, asked(plain, ids, pixel_values=images, past_key_values=expected), equal=False)
    assert counts == {}, "the third images too are stored now"
    appended = model.encode_images(pixel_values=images, past_key_values=encoded)
    assert appended is encoded and appended.cross_attention_cache.layout.num_images == 3


@pytest.mark.parametrize("kind", ["plain", "quiet"])
def test_second_turn_on_a_cache_with_text(kind):
    """New images of a later turn from the store, in front of those that the cache holds, or with a second null key."""
    model, plain = with_store(marked("latest", **MODELS[kind])), marked("latest", **MODELS[kind])
    a, b = pixels(2, 2, seed=1).split(1, dim=1)
    ids = torch.tensor([[MARKER, 5, 6], [7, MARKER, 6]])
    asked(model, ids, pixel_values=b)
    for only_new in (True, False):
        answers = []
        for served in (model, plain):
            first = asked(served, ids, pixel_values=a)
            more = torch.cat([first.sequences, torch.tensor([[MARKER, 9]] * 2)], dim=1)
            images = b if only_new else torch.cat([a, b], dim=1)
            with Counted(served) as counts:
                answers.append(asked(served, more, pixel_values=images, past_key_values=first.past_key_values))
            assert counts == ({} if served is model else {"images": 2, "projections": 4})
        assert_same(*answers, equal=False)


# --- the key


def test_content_keys_tell_images_apart():
    """Two images with one key: one user sees the picture of another."""
    from hf_xattn.image_inputs import ImageInputs

    def key(images, dtype=torch.float32, precision="", **kwargs):
        inputs = ImageInputs(name="pixel_values", pixel_values=images, **kwargs)
        return image_store.content_keys(inputs, dtype, [(0, 0)], precision)[0]

    image = torch.randn(1, 1, 3, 4, 8)
    other = image.clone()
    other[0, 0, 2, 3, 7] *= -1
    swapped = image.clone()
    swapped[0, 0, 0, 0, :2] = image[0, 0, 0, 0, :2].flip(0)
    keys = [
        key(image),
        key(other),
        key(swapped),
        key(image.view(1, 1, 3, 8, 4)),
        key(image, torch.bfloat16),
        key(image, precision="autocast"),
        key(torch.zeros(1, 1, 3, 4, 8)),
        key(torch.zeros(1, 1, 3, 4, 9)),
        image_store.content_keys(ImageInputs(name="cross_attention_states", states=image), torch.float32, [(0, 0)])[0],
    ]
    assert len(set(keys)) == len(keys)
    strided = torch.randn(1, 1, 8, 4, 3)
    strided = strided.copy_(image.permute(0, 1, 4, 3, 2)).permute(0, 1, 4, 3, 2)
    assert not strided.is_contiguous() and key(strided) == keys[0]
    assert key(image.double()) == keys[0], "equal in the dtype that the tower reads"


# --- weights and devices


def changes():
    def step(model, ids, images):
        model.train()
        optimizer = torch.optim.AdamW(model.model.vision_tower.parameters(), lr=0.1)
        model(ids, pixel_values=images, labels=ids).loss.backward()
        optimizer.step()
        model.eval()

    def load(model, ids, images):
        state = {name: tensor + 0.05 for name, tensor in model.state_dict().items()}
        model.load_state_dict(state)

    def write(model, ids, images):
        with torch.no_grad():
            model.blocks[1].attn.v_proj.weight[3, 5] += 1.0

    def replace(model, ids, images):
        projection = model.blocks[0].attn.k_proj
        projection.weight = torch.nn.Parameter(projection.weight.detach() * 2)

    def data(model, ids, images):
        model.model.connector.layers[0].weight.data = model.model.connector.layers[0].weight.data * 0.5

    def cast(model, ids, images):
        model.to(torch.bfloat16)

    def features(model, ids, images):
        model.config.vision_feature_select_strategy = "default"

    return {function.__name__: function for function in (step, load, write, replace, data, cast, features)}


@pytest.mark.parametrize("how", changes())
def test_a_changed_weight_drops_all_images(how):
    """Keys and values of weights that are gone."""
    ids, images = token_ids(2), pixels(2, 2)
    model = with_store(make_model())
    asked(model, ids, pixel_values=images)
    changes()[how](model, ids, images)
    answer = asked(model, ids, pixel_values=images.to(model.dtype))
    assert (model.image_store.misses, model.image_store.hits, model.image_store.num_images) == (8, 0, 4)
    model.disable_image_store()
    assert_same(answer, asked(model, ids, pixel_values=images.to(model.dtype)))


def test_weights_that_images_do_not_pass_drop_nothing():
    """A store that is of no use while adapters of the text model are trained."""
    model, ids, images = with_store(make_model()), token_ids(), pixels()
    before = asked(model, ids, pixel_values=images)
    with torch.no_grad():
        model.blocks[0].attn.q_proj.weight.mul_(3)
        model.get_input_embeddings().weight.mul_(3)
    after = asked(model, ids, pixel_values=images)
    assert not torch.equal(before.logits[0], after.logits[0]) and model.image_store.misses == 2
    model.disable_image_store()
    assert_same(after, asked(model, ids, pixel_values=images))


@pytest.mark.parametrize("part", ["cross_attention_block.attn.k_proj", "layers.0.self_attn.q_proj"])
def test_lora(part):
    """Images of an adapter that was switched, scaled or merged."""
    peft = pytest.importorskip("peft")
    model, ids, images = make_model(), token_ids(), pixels()
    names = [name for name, _ in model.named_modules() if name.endswith(part) and ("block" in part or "tower" in name)]
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=names, init_lora_weights=False)).eval()
    layer = next(module for module in model.modules() if hasattr(module, "lora_A"))

    def ask():
        return asked(adapted, ids, pixel_values=images)

    def check():
        answer, misses = ask(), model.image_store.misses
        assert_same(ask(), answer)
        assert model.image_store.misses == misses, "the second time from the store"
        model.disable_image_store()
        assert_same(answer, ask())
        model.enable_image_store()
        ask()
        return answer.logits[0]

    model.enable_image_store()
    seen = [check()]
    with adapted.disable_adapter():
        seen.append(check())
    ask()  # stored with the adapter again
    layer.set_scale("default", 3.0)
    seen.append(check())
    assert not any(torch.equal(seen[0], other) for other in seen[1:])
    adapted.merge_adapter()
    check()


def test_autocast_is_another_precision():
    """Half-precision keys and values for a float32 call, or the other way."""
    model, ids, images = make_model(), token_ids(), pixels()
    with torch.autocast("cpu", torch.bfloat16):
        half = asked(model, ids, pixel_values=images)
    full = asked(model, ids, pixel_values=images)
    with_store(model)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert_same(asked(model, ids, pixel_values=images), half)
        assert_same(asked(model, ids, pixel_values=images), full)
    assert (model.image_store.misses, model.image_store.hits) == (4, 4)


def test_inference_mode():
    """Weights or images of `torch.inference_mode()`, which count no versions and cannot be saved for a backward."""
    ids, images = token_ids(), pixels()
    with torch.inference_mode():
        model = with_store(make_model())
        first = asked(model, ids, pixel_values=images)
    assert_same(asked(model, ids, pixel_values=images), first)
    assert (model.image_store.misses, model.image_store.hits) == (2, 2)
    with torch.inference_mode():
        model.blocks[0].attn.v_proj.weight.view(-1)[5] += 2
        assert not torch.equal(asked(model, ids, pixel_values=images).logits[0], first.logits[0])
    model = with_store(make_model())
    with torch.inference_mode():
        asked(model, ids, pixel_values=images)
    with torch.no_grad():
        cache = model.encode_images(pixel_values=images)
    assert model.image_store.hits == 2
    model(ids, past_key_values=cache, labels=ids).loss.backward()
    assert model.blocks[0].attn.q_proj.weight.grad.abs().max() > 0


def test_other_devices_are_other_makers():
    """Keys and values on a device that the model has left."""
    store = ImageStore(1000)
    image = StoredImage(((torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4)),), torch.device("cpu"))
    assert store.look_up("weights cpu", [b"a"]) == {}
    store.keep("weights cpu", b"a", image)
    assert list(store.look_up("weights cpu", [b"a"])) == [b"a"]
    store.keep("weights cuda", b"b", image)  # encoded by a thread that another one overtook
    assert store.num_images == 1
    assert store.look_up("weights cuda", [b"a"]) == {} and (store.num_images, store.nbytes) == (0, 0)


def test_moved_model_drops_all_images(monkeypatch):
    """A model on another GPU that gets keys and values of the first. There is no second device here, so its name is made up."""
    from hf_xattn import images_xattn

    model, ids, images = with_store(make_model()), token_ids(), pixels()
    generate(model, ids, pixel_values=images)
    device_of = images_xattn.device_of
    places = [torch.device("cpu", 1), torch.device("cpu", 2)]  # a block each
    for name, moved in (("first", places), ("second", places[::-1])):
        by_block = dict(zip([block.attn.k_proj for block in model.blocks], moved))
        monkeypatch.setattr(images_xattn, "device_of", lambda module, at=by_block: at[module])
        generate(model, ids, pixel_values=images)
        generate(model, ids, pixel_values=images)
        assert model.image_store.hits == {"first": 2, "second": 4}[name]
    monkeypatch.setattr(images_xattn, "device_of", device_of)
    assert (model.image_store.misses, model.image_store.num_images) == (6, 2)


def test_offloaded_model(tmp_path):
    """Weights that accelerate keeps elsewhere: devices or an identity that cannot be read, or images encoded again."""
    model, ids, images = make_model(), token_ids(), pixels()
    expected = asked(model, ids, pixel_values=images)
    model.save_pretrained(tmp_path / "model")
    layers = {f"model.text_model.model.layers.{index}": "disk" if index == 3 else "cpu" for index in range(4)}
    parts = ("model.text_model.model.embed_tokens", "model.text_model.model.norm", "model.text_model.lm_head")
    device_map = {**layers, **dict.fromkeys((*parts, "model.connector", "model.text_model.model.rotary_emb"), "cpu")}
    device_map["model.vision_tower"] = "disk"
    offloaded = XAttnForConditionalGeneration.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    assert offloaded.model.vision_tower.device.type == "meta" and offloaded.blocks[1].attn.k_proj.weight.is_meta
    with_store(offloaded)
    with Counted(offloaded) as counts:
        for _ in range(3):
            assert_same(asked(offloaded, ids, pixel_values=images), expected, equal=False)
    assert counts == {"images": 2, "projections": 4}
    assert (offloaded.image_store.misses, offloaded.image_store.hits) == (2, 4)


def test_several_processes_leave_the_store_aside(monkeypatch):
    """A rank that skips the vision tower while the others wait for it in a collective."""
    from hf_xattn import images_xattn

    model = with_store(make_model())
    monkeypatch.setattr(images_xattn, "is_distributed", lambda: True)
    generate(model, token_ids(), pixel_values=pixels())
    assert model.image_store.num_images == model.image_store.misses == 0


# --- training


@pytest.mark.parametrize("part", ["whole", "tower", "block"])
def test_training_mode_leaves_the_store_aside(part):
    """A store of images with dropout."""
    model, ids, images = with_store(make_model()), token_ids(), pixels()
    {"whole": model, "tower": model.model.vision_tower, "block": model.blocks[1]}[part].train()
    generate(model, ids, pixel_values=images)
    assert model.image_store.num_images == model.image_store.misses == 0
    model.eval()
    generate(model, ids, pixel_values=images)
    assert model.image_store.misses == 2


def test_gradients_pass_the_store_by():
    """Gradients that end at stored keys and values, or a graph kept alive by the store."""
    model, ids, images = with_store(make_model()), token_ids(), pixels()
    with torch.no_grad():
        model.encode_images(pixel_values=images)
    cache = model.encode_images(pixel_values=images)
    model(ids, past_key_values=cache, labels=ids).loss.backward()
    assert next(model.model.vision_tower.parameters()).grad is not None
    assert (model.image_store.hits, model.image_store.misses) == (0, 2)
    model(ids, pixel_values=images, use_cache=True)
    assert model.image_store.misses == 2, "`forward` does not use the store"
    assert not any(
        tensor.requires_grad
        for image in model.image_store._images.values()
        for pair in image.keys_values
        for tensor in pair
    )


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
    """A budget passed for a moment, views that keep a whole batch alive, or the image that was just asked for dropped first."""
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
    for wrong, error in (("1GB", TypeError), (1e9, TypeError), (True, TypeError), (0, ValueError), (-1, ValueError)):
        with pytest.raises(error, match=r"`max_bytes`.*got"):
            model.enable_image_store(wrong)
    assert store.max_bytes == 3 * IMAGE_BYTES
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
    """A copy that shares images with a model that is trained on, a lock that cannot be pickled, or images in a checkpoint."""
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
def test_threads(max_bytes):
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
    read = type(model.model)._read_store
    monkeypatch.setattr(type(model.model), "_read_store", lambda *a: calls.update(["read"]) or read(*a))
    generate(model, ids, pixel_values=images, max_new_tokens=4)
    assert calls == {}
    with_store(model)
    generate(model, ids, max_new_tokens=4)
    assert calls == {}
    first = asked(model, ids, pixel_values=images, max_new_tokens=4)
    assert calls == {"hash": 1, "id": 1, "read": 1}
    more = torch.cat([first.sequences, ids[:, :1]], dim=1)
    asked(model, more, pixel_values=images, past_key_values=first.past_key_values)
    assert calls == {"hash": 1, "id": 1, "read": 2}, "the cache knows its images"
    model(ids, pixel_values=images)
    assert calls["read"] == 2


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
