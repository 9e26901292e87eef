"""Encoded images as values: batches of them, and files."""

import json
import os
import random
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import SiglipVisionModel

from helpers.inputs.damaged_checkpoints import is_ours
from helpers.inputs.image_stores import damaged
from helpers.models.tiny_decoders import make_tiny
from helpers.models.tiny_models import make_model, pixels, randomize, token_ids, vision_config
from hf_xattn import XAttnForConditionalGeneration, retrofit
from hf_xattn.cache import image_cache
from hf_xattn.cache.image_cache import select_images
from hf_xattn.storage.image_files import combine_images, load_image_cache, save_image_cache
from hf_xattn.utils.transformers_api import CACHE


def answers(model, ids, **kwargs):
    return model.generate(ids, max_new_tokens=8, do_sample=False, **kwargs)


def test_combined_caches_equal_one_batch():
    """Rows that change places, or padding that is attended to."""
    model, ids = make_model(), token_ids(3)
    both = pixels(3, 2)
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    caches = [
        model.encode_images(pixel_values=both[:1]),
        model.encode_images(pixel_values=both[1:2, :1]),
        model.encode_images(pixel_values=both[2:]),
    ]
    combined = combine_images(caches)
    expected = model(ids, pixel_values=both, image_mask=mask).logits
    assert torch.allclose(model(ids, cache=combined).logits, expected, atol=1e-5)
    combined = combine_images(caches)
    assert torch.equal(answers(model, ids, cache=combined), answers(model, ids, pixel_values=both, image_mask=mask))


def test_selected_rows_share_nothing_with_the_wrong_image():
    """A question answered about its neighbour's image."""
    model, ids = make_model(), token_ids(3)
    images = pixels(2)
    cache = model.encode_images(pixel_values=images)
    chosen = select_images(cache, [1, 0, 1])
    assert torch.equal(answers(model, ids, cache=chosen), answers(model, ids, pixel_values=images[[1, 0, 1]]))
    assert cache.cross_attention_cache.layers[0].keys.shape[0] == 2
    for rows, outside in (([0, 2], r"\[2\]"), ([-1], r"\[-1\]"), (torch.tensor([1, 5]), r"\[5\]")):
        with pytest.raises(IndexError, match=f"Expected `rows` from 0 to 1, .*got {outside}"):
            select_images(cache, rows)
    for rows in ([], torch.zeros(0, dtype=torch.long), torch.tensor([[0]]), torch.tensor(0)):
        with pytest.raises(ValueError, match="Expected `rows` to be a list of at least one row, got"):
            select_images(cache, rows)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "mamba", "jamba", "deepseek_v32"])
def test_images_of_a_conversation(name, options):
    """Zeros of the text that a conversation held, or its number of rows, in the cache of its images alone."""
    model, images = randomize(retrofit(make_tiny(name), SiglipVisionModel(vision_config()), every=2)).eval(), pixels(2)
    model.generation_config.eos_token_id = None
    made = model.generate(
        token_ids(2), pixel_values=images, max_new_tokens=10, do_sample=False, return_dict_in_generate=True, **options
    )
    for rows in ([1, 0], [1], [0, 1, 1]):
        ids = token_ids(len(rows), seed=5)
        expected = model(ids, pixel_values=images[rows]).logits
        apart = [select_images(made[CACHE], [row]) for row in rows]
        for cache in (select_images(made[CACHE], rows), combine_images(apart)):
            first, last = (model(part, cache=cache).logits for part in ids.split([6, 1], dim=1))
            assert torch.allclose(torch.cat([first, last], dim=1), expected, atol=1e-5)
    made[CACHE].reset()
    again = answers(model, token_ids(2, seed=5), pixel_values=images, cache=made[CACHE])
    assert torch.equal(again, answers(model, token_ids(2, seed=5), pixel_values=images))


@pytest.mark.parametrize("rows", [[True, False], [0.0], torch.tensor([True, False]), torch.tensor([0.0]), ["0"]])
def test_rows_that_are_no_integers(rows):
    """A boolean mask, taken for the rows 1 and 0."""
    cache = make_model().encode_images(pixel_values=pixels(2))
    with pytest.raises(TypeError, match="Expected `rows` to .*integers"):
        select_images(cache, rows)


def test_a_file_of_images_keeps_values_masks_and_digests(tmp_path):
    """K/V, masks or digests that do not survive a file."""
    model, ids = make_model(), token_ids(2)
    images, mask = pixels(2, 2), torch.tensor([[True, True], [True, False]])
    cache = model.encode_images(pixel_values=images, image_mask=mask)
    save_image_cache(cache, tmp_path / "images.safetensors", model)
    loaded = load_image_cache(tmp_path / "images.safetensors", model)
    for before, after in zip(cache.cross_attention_cache.layers, loaded.cross_attention_cache.layers):
        assert torch.equal(before.keys, after.keys) and torch.equal(before.values, after.values)
    assert torch.equal(answers(model, ids, cache=loaded), answers(model, ids, pixel_values=images, image_mask=mask))
    again = model.generate(ids, pixel_values=images, image_mask=mask, cache=loaded, max_new_tokens=2)
    assert again.shape == (2, 9)
    assert loaded.cross_attention_cache.get_seq_length() == 32


def test_files_of_other_weights_are_refused(tmp_path):
    """Keys and values of another model, read as noise."""
    model = make_model()
    file = tmp_path / "images.safetensors"
    save_image_cache(model.encode_images(pixel_values=pixels(1)), file, model)
    for change in (
        lambda other: randomize(other, seed=9),
        lambda other: (
            torch.nn.init.zeros_(other.model.connector.layers[0].bias[:1])
            + other.model.connector.layers[0].bias.data.add_(1)
        ),
        lambda other: other.model.vision_tower.to(torch.bfloat16),
    ):
        other = make_model()
        change(other)
        with pytest.raises(ValueError, match="other weights of this one"):
            load_image_cache(file, other)
    assert model.image_identity() == make_model().image_identity()
    save_file({"a": torch.zeros(1)}, tmp_path / "else.safetensors")
    with pytest.raises(ValueError, match="not an image cache"):
        load_image_cache(tmp_path / "else.safetensors", model)
    (tmp_path / "cut.safetensors").write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_image_cache(tmp_path / "cut.safetensors", model)
    with pytest.raises(FileNotFoundError):
        load_image_cache(tmp_path / "missing.safetensors", model)


def test_caches_of_other_models_are_not_combined():
    """Rows of different widths in one batch."""
    first = make_model().encode_images(pixel_values=pixels(1))
    second = make_model(cross_attention_layers=[0]).encode_images(pixel_values=pixels(1))
    with pytest.raises(
        ValueError, match=r"one model: \(blocks, K/V heads, head width\), got .*\(1, 2, 8\).*\(2, 2, 8\)"
    ):
        combine_images([first, second])


def test_a_file_with_null_keys(tmp_path):
    """A file of quiet softmax, whose first key is not an image's, that is called damaged."""
    model, ids = make_model(cross_attention_config={"quiet_softmax": True}), token_ids()
    cache = model.encode_images(pixel_values=pixels())
    save_image_cache(cache, tmp_path / "images.safetensors", model)
    loaded = load_image_cache(tmp_path / "images.safetensors", model)
    assert loaded.cross_attention_cache.layers[0].keys.shape[2] == 17
    assert torch.equal(answers(model, ids, cache=loaded), answers(model, ids, cache=cache))


def test_a_cache_without_images():
    """An error from deep inside, for a cache that holds text alone."""
    model = make_model()
    cache = model(token_ids(), use_cache=True)[CACHE]
    for call in (lambda: select_images(cache, [0]), lambda: combine_images([cache])):
        with pytest.raises(ValueError, match="XAttnCache that holds no images"):
            call()


@torch.no_grad()
def test_a_reset_cache_forgets_who_encoded_its_images():
    """New images that are refused for the sake of others that are gone."""
    model, ids = make_model(), token_ids()
    cache = model.encode_images(pixel_values=pixels())
    cache.reset()
    model.blocks[0].attn.k_proj.weight.mul_(2)
    found = model(ids, pixel_values=pixels(), cache=cache).logits
    assert torch.allclose(found, model(ids, pixel_values=pixels()).logits, atol=1e-5)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda tensors: tensors.pop("layers.1.values"), "it has no layers.1.values"),
        (lambda tensors: tensors.pop("layers.0.keys"), "layers.0.keys"),
        (
            lambda tensors: tensors.update({"layers.1.keys": tensors["layers.1.keys"][:, :, :20]}),
            r"layers.1.keys.*20, 8\)",
        ),
        (
            lambda tensors: tensors.update({"layers.0.values": tensors["layers.0.values"][:1]}),
            "layers.0.values of shape",
        ),
        (lambda tensors: tensors.pop("digests.0.values"), "it has no digests.0.values"),
        (lambda tensors: tensors.update({"digests.0.values": tensors["digests.0.values"].float()}), "of F32"),
        (
            lambda tensors: tensors.update({"images.token_mask": tensors["images.token_mask"][:, :9]}),
            "images.token_mask",
        ),
        (lambda tensors: tensors.update({"images.image_mask": tensors["images.image_mask"].long()}), "of I64"),
    ],
)
def test_damaged_files_are_refused(tmp_path, change, message):
    """A file without some of its tensors, or with short ones, that fails later inside torch."""
    model, file = make_model(), tmp_path / "images.safetensors"
    mask = torch.tensor([[True, True], [True, False]])
    save_image_cache(model.encode_images(pixel_values=pixels(2, 2), image_mask=mask), file, model)
    with pytest.raises(ValueError, match=f"is damaged: .*{message}"):
        load_image_cache(damaged(file, change), model)
    with pytest.raises(ValueError, match="is damaged"):
        load_image_cache(damaged(file, lambda _: None, {"images": "{}"}), model)


def test_file_with_other_settings_is_refused(tmp_path):
    """Keys of a model whose settings, and not its weights, differ."""
    model, file = make_model(cross_attention_config={"qk_norm": True}), tmp_path / "images.safetensors"
    save_image_cache(model.encode_images(pixel_values=pixels(1)), file, model)
    other = make_model(cross_attention_config={"qk_norm": True, "norm_eps": 1e-2})
    with pytest.raises(ValueError, match="other weights of this one"):
        load_image_cache(file, other)
    encoded = model.encode_images(pixel_values=pixels(1))
    model.blocks[0].attn.k_proj.weight.data.add_(1)
    with pytest.raises(ValueError, match="another model or other weights encoded it"):
        save_image_cache(encoded, file, model)


@torch.no_grad()
def test_files_beside_offloaded_weights(tmp_path):
    """A model some of whose weights lie on disk, which has no weights to compare and no device to load to."""
    model, ids, images = make_model(), token_ids(2), pixels(2)
    file = tmp_path / "images.safetensors"
    encoded = model.encode_images(pixel_values=images)
    save_image_cache(encoded, file, model)
    expected = model(ids, cache=encoded).logits
    model.save_pretrained(tmp_path / "model")
    layers = {f"model.text_model.model.layers.{index}": "disk" if index == 3 else "cpu" for index in range(4)}
    parts = ("model.text_model.model.embed_tokens", "model.text_model.model.norm", "model.text_model.lm_head")
    device_map = {**layers, **dict.fromkeys((*parts, "model.connector", "model.text_model.model.rotary_emb"), "cpu")}
    device_map["model.vision_tower"] = "disk"
    offloaded = XAttnForConditionalGeneration.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    assert next(offloaded.model.vision_tower.parameters()).is_meta and offloaded.blocks[1].attn.k_proj.weight.is_meta
    assert offloaded.image_identity() == model.image_identity()
    loaded = load_image_cache(file, offloaded)
    assert torch.allclose(offloaded(ids, cache=loaded).logits, expected, atol=1e-5)
    again = offloaded.encode_images(pixel_values=images)
    assert torch.allclose(offloaded(ids, cache=again).logits, expected, atol=1e-5)


def test_scripts_import_files_of_images_from_where_they_were():
    """A script for an earlier version that ends at its first line."""
    for function in (combine_images, load_image_cache, save_image_cache):
        assert getattr(image_cache, function.__name__) is function


def caches(file):
    """Changes of a file of encoded images, seeded: (name, bytes, or a function that changes tensors and metadata)."""
    whole = file.read_bytes()
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    generator = random.Random(4)
    for size in (0, 5, 8, 100, end, len(whole) - 1):
        yield f"of {size} bytes", whole[:size]
    yield "with more bytes", whole + b"\0" * 8
    for place in sorted(generator.sample(range(end), 40)):
        data = bytearray(whole)
        data[place] ^= 1 << generator.randrange(8)
        yield f"flip of byte {place}", bytes(data)

    def facts(**changes):
        return lambda tensors, metadata: metadata.update(
            images=json.dumps({**json.loads(metadata["images"]), **changes})
        )

    for sizes in (
        [16, 17],
        [10**12],
        [-16, 32, 16],
        [0, 32],
        ["16", "16"],
        [16.0, 16.0],
        "xx",
        None,
        [],
        {"a": 1},
        [True, 31],
    ):
        yield f"sizes {sizes}", facts(sizes=sizes)
    good = {"of": "pixel_values", "dtype": "float32", "sizes": [1, 1]}
    for change in (
        {"of": "x"},
        {"of": 3},
        {"dtype": "load"},
        {"dtype": 3},
        {"sizes": [10**12]},
        {"sizes": []},
        {"sizes": "x"},
    ):
        yield f"digests {change}", facts(digests=[{**good, **change}])
    for digests in ([3], "x", 3, [{}], [good, good]):
        yield f"digests {digests}", facts(digests=digests)
    for text in ("", "[]", "3", "{", "[" * 10_000, '{"a": ' + "1" * 5000 + "}"):
        yield f"facts {text[:5]} of {len(text)}", lambda tensors, metadata, text=text: metadata.update(images=text)
    for value in ("", "hf_xattn image cache 2", "x"):
        yield f"format {value}", lambda tensors, metadata, value=value: metadata.update(format=value)
    yield "another model", lambda tensors, metadata: metadata.update(identity="0" * 64)
    for name in ("layers.0.keys", "layers.1.values", "digests.0.values"):
        yield f"without {name}", lambda tensors, metadata, name=name: tensors.pop(name)
        yield (
            f"integers for {name}",
            lambda tensors, metadata, name=name: tensors.update({name: tensors[name].to(torch.int32)}),
        )
        yield (
            f"one axis of {name}",
            lambda tensors, metadata, name=name: tensors.update({name: tensors[name].flatten()}),
        )
        yield f"nothing in {name}", lambda tensors, metadata, name=name: tensors.update({name: tensors[name][:0]})
    yield "a surplus tensor", lambda tensors, metadata: tensors.update(surplus=torch.zeros(4))
    yield (
        "a mask of other rows",
        lambda tensors, metadata: tensors.update({"images.token_mask": torch.ones(3, 32, dtype=torch.bool)}),
    )


def test_files_of_encoded_images(tmp_path):
    """Encoded images of another model, or changed ones, that are taken, or an error from inside of torch."""
    model, file, other = make_model(), tmp_path / "images.safetensors", tmp_path / "other.safetensors"
    save_image_cache(model.encode_images(pixel_values=pixels(2, 2)), file, model)
    expected = load_image_cache(file, model).cross_attention_cache
    wrong, count = {}, 0
    for name, change in caches(file):
        count += 1
        if isinstance(change, bytes):
            other.write_bytes(change)
        else:
            with safe_open(file, "pt") as opened:
                tensors, metadata = {n: opened.get_tensor(n) for n in opened.keys()}, dict(opened.metadata())
            change(tensors, metadata)
            save_file({n: tensor.contiguous() for n, tensor in tensors.items()}, other, metadata)
        try:
            got = load_image_cache(other, model).cross_attention_cache
        except Exception as error:
            if not is_ours(error):
                wrong[name] = f"{type(error).__name__}: {error}"
            continue
        same = name.startswith("flip") and all(
            torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values) for a, b in zip(got.layers, expected.layers)
        )
        if not same:
            wrong[name] = "taken"
    assert not wrong, "\n".join(f"{name}: {why}" for name, why in wrong.items())
    assert count >= 80 and not os.path.exists(tmp_path / "run")
