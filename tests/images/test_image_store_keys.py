"""The image store: an image is never taken for another, nor for one of other weights; where the store is left aside."""

import pytest
import torch

from helpers.inputs.image_stores import Counted, asked, assert_same, with_store
from helpers.models.marked_models import generate
from helpers.models.tiny_models import make_model, pixels, token_ids
from hf_xattn import XAttnForConditionalGeneration
from hf_xattn.storage import image_store
from hf_xattn.storage.image_store import ImageStore, StoredImage


# --- the key


def test_content_keys_tell_images_apart():
    """Two images with one key: one user sees the picture of another."""
    from hf_xattn.images.image_inputs import ImageInputs

    def key(images, dtype=torch.float32, precision="", **kwargs):
        inputs = ImageInputs(name="pixel_values", images=images, **kwargs)
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
        image_store.content_keys(ImageInputs(name="cross_attention_states", images=image), torch.float32, [(0, 0)])[0],
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

    def layer(model, ids, images):
        model.config.vision_feature_layer = 1

    return {function.__name__: function for function in (step, load, write, replace, data, cast, features, layer)}


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


@torch.no_grad()
@pytest.mark.parametrize("how", ["numpy", "hook"])
def test_clear_after_a_change_that_goes_unnoticed(how):
    """Images of before that outlive `clear`, which documents name for a write through a NumPy view and a hook on the
    connector.
    """
    model, ids, images = with_store(make_model()), token_ids(), pixels()
    asked(model, ids, pixel_values=images)
    if how == "hook":
        model.model.connector.register_forward_hook(lambda *args: args[-1] + 1)
    else:
        model.blocks[0].attn.k_proj.weight.detach().numpy()[1:3] += 1
    model.image_store.clear()
    found = asked(model, ids, pixel_values=images)
    model.disable_image_store()
    assert_same(found, asked(model, ids, pixel_values=images), equal=False)


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
def test_another_adapter_gets_no_images_from_the_store(part):
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


def test_the_store_works_with_tensors_of_inference_mode():
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
    model(ids, cache=cache, labels=ids).loss.backward()
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
    """A model on another GPU that gets keys and values of the first. There is no second device here, so its name is
    made up.
    """
    from hf_xattn.storage import image_store

    model, ids, images = with_store(make_model()), token_ids(), pixels()
    generate(model, ids, pixel_values=images)
    device_of = image_store.device_of
    places = [torch.device("cpu", 1), torch.device("cpu", 2)]  # a block each
    for name, moved in (("first", places), ("second", places[::-1])):
        by_block = dict(zip([block.attn.k_proj for block in model.blocks], moved))
        monkeypatch.setattr(image_store, "device_of", lambda module, at=by_block: at[module])
        generate(model, ids, pixel_values=images)
        generate(model, ids, pixel_values=images)
        assert model.image_store.hits == {"first": 2, "second": 4}[name]
    monkeypatch.setattr(image_store, "device_of", device_of)
    assert (model.image_store.misses, model.image_store.num_images) == (6, 2)


def test_an_offloaded_model_encodes_each_image_once(tmp_path):
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
    from hf_xattn.storage import image_store

    model = with_store(make_model())
    monkeypatch.setattr(image_store, "is_distributed", lambda: True)
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
    model(ids, cache=cache, labels=ids).loss.backward()
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
