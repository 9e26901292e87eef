"""`vision_features`: what the vision tower has returned before, in place of pixels."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText, AutoProcessor, CLIPVisionConfig, ConvNextConfig

from helpers.inputs.damaged_checkpoints import is_ours
from helpers.models.encoded_features import save_features
from helpers.models.tiny_mllama import TILED, make_mllama
from helpers.models.tiny_models import make_model, make_text, pixels, token_ids
from hf_xattn import VisionFeatures, XAttnConfig, XAttnForConditionalGeneration, attention_maps, freeze
from hf_xattn.importers import import_checkpoint
from hf_xattn.training.vision_features import SHARDS
from hf_xattn.utils.checkpoint_files import sha256_of


class Runs:
    """Counts how often the vision tower of a model runs."""

    def __init__(self, model):
        self.count = 0
        model.base_model.vision_tower.register_forward_hook(self._run)

    def _run(self, *args):
        self.count += 1


def with_tower(vision, **config):
    text = make_text()
    config = XAttnConfig(text_config=text.config, vision_config=vision, cross_attention_layers=[1, 3], **config)
    torch.manual_seed(3)
    model = XAttnForConditionalGeneration(config, text_model=text).eval()
    for block in model.blocks:
        torch.nn.init.normal_(block.attn.o_proj.weight)
    return model


def clip(**config):
    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return with_tower(CLIPVisionConfig(**sizes, image_size=32, patch_size=8), **config)


PERCEIVER = {"num_latents": 3, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8, "intermediate_size": 32}
MODELS = {
    "siglip": make_model,
    "mlp": lambda: make_model(connector_type="mlp"),
    "perceiver": lambda: make_model(
        connector_type="perceiver", perceiver_config=PERCEIVER, cross_attention_config={"context_size": 24}
    ),
    "markers": lambda: make_model(image_visibility="latest", image_token_id=3),
    "class token": clip,
    "without class token": lambda: clip(vision_feature_select_strategy="default"),
    "convolutional": lambda: with_tower(
        ConvNextConfig(hidden_sizes=[8, 24], depths=[1, 1], num_stages=2, patch_size=4)
    ),
    "bfloat16": lambda: make_model().bfloat16(),
}


def features_of(model, images):
    """What the tower returns, with the images on axis 1."""
    with torch.no_grad():
        return model.get_image_features(images).last_hidden_state.unflatten(0, images.shape[:2])


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_pixels(name):
    """A class token kept or dropped twice, padding images that text sees, a tower that runs anyway; in every call that
    takes images.
    """
    model, images, ids = MODELS[name](), pixels(2, 2), token_ids(2, 9)
    ids[:, 1] = ids[0, 4] = 3
    features = features_of(model, images)
    mask = torch.tensor([[True, True], [True, False]])
    features[mask] = features_of(model, images[mask][:, None])[:, 0]  # without padding, as in the calls
    given = {"pixel_values": images, "image_mask": mask}, {"vision_features": features, "image_mask": mask}
    runs = Runs(model)
    calls = (
        lambda images: model(ids, **images).logits,
        lambda images: model(ids, use_cache=False, **images).logits,
        lambda images: model.generate(ids, max_new_tokens=4, do_sample=False, **images),
        lambda images: model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=False, **images),
        lambda images: model(ids, cache=model.encode_images(**images)).logits,
    )
    for call in calls:
        expected = call(given[0])
        before = runs.count
        assert before and torch.equal(call(given[1]), expected) and runs.count == before
    assert not torch.equal(calls[0](given[1]), model(ids).logits)
    if name != "convolutional":  # one image in each row, without an axis for it
        one = {"pixel_values": images[:, 0], "image_mask": mask[:, :1]}
        ids[:, 4] = 5
        expected = model(ids, **one).logits
        del one["pixel_values"]
        first = features_of(model, images[:, :1])[:, 0]
        assert torch.equal(model(ids, vision_features=first, **one).logits, expected)


@torch.no_grad()
def test_features_of_tiles_hide_the_padding():
    """Padding tiles that text sees, or tiles taken for images."""
    model = import_checkpoint(make_mllama())
    given = dict(TILED["batch"])
    expected = model(**given).logits
    features = model.get_image_features(
        **{name: given[name] for name in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")}
    ).last_hidden_state
    features[given["aspect_ratio_mask"] == 0] = 7.0  # padding tiles
    del given["pixel_values"]
    runs = Runs(model)
    assert torch.equal(model(**given, vision_features=features).logits, expected) and runs.count == 0
    with pytest.raises(ValueError, match="`aspect_ratio_ids` is required with `vision_features`"):
        model(given["input_ids"], vision_features=features)
    with pytest.raises(ValueError, match=r"max_num_tiles=4, tokens, width=48\).*got \(2, 2, 3, 5, 48\)"):
        model(**given, vision_features=features[:, :, 1:])


@torch.no_grad()
@pytest.mark.parametrize("store", [False, True])
def test_features_that_come_again(store):
    """Known images encoded again or appended twice, in a conversation or with an image store."""
    model, ids = make_model(), token_ids(2, 4)
    a, b, c = (features_of(model, pixels(2, 1, seed=seed)) for seed in (50, 51, 52))
    if store:
        model.enable_image_store()
    first = model.encode_images(vision_features=torch.cat([a, b], dim=1))
    again = model.encode_images(vision_features=torch.cat([c, a, b], dim=1))
    if store:
        assert (model.image_store.hits, model.image_store.misses) == (4, 6)
    keys = [cache.cross_attention_cache.layers[0].keys for cache in (first, again)]
    assert torch.allclose(keys[0], keys[1][:, :, 16:], atol=1e-5)
    model(ids, cache=first, vision_features=torch.cat([a, b, c], dim=1))
    assert first.cross_attention_cache.get_seq_length() == 3 * 16
    with pytest.raises(ValueError, match="Expected `vision_features` to hold all images"):
        model(ids, cache=first, vision_features=torch.cat([b, a], dim=1))


def test_features_train_the_connector_as_pixels_do():
    """A connector that learns nothing from features, or other things than from pixels."""
    gradients = []
    images, ids = pixels(2, 2), token_ids()
    for name in ("pixel_values", "vision_features"):
        model = freeze(make_model(connector_type="mlp")).train()
        given = {name: images if name == "pixel_values" else features_of(model, images)}
        model(ids, labels=ids, **given).loss.backward()
        gradients.append({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
    assert any("connector" in name for name in gradients[0]) and gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())


def test_a_tower_that_trains_is_refused():
    """A tower that is said to train, and whose outputs never change. Outside of training there is nothing to refuse."""
    model, ids = make_model().train(), token_ids()
    features = features_of(model, pixels())
    with pytest.raises(ValueError, match="Expected a frozen vision tower.*trainable weights.*hf_xattn.freeze"):
        model(ids, vision_features=features)
    with torch.no_grad():
        model(ids, vision_features=features)
    model.eval()(ids, vision_features=features)
    freeze(model).train()(ids, vision_features=features)
    freeze(model, names={"*.post_layernorm.*": False})
    with pytest.raises(ValueError, match=r"2 trainable weights \(.*post_layernorm"):
        model(ids, vision_features=features)


def test_features_that_do_not_fit_are_refused():
    """Features that are another thing, or stand beside other images."""
    model, ids = make_model(), token_ids()
    features = features_of(model, pixels())
    with pytest.raises(ValueError, match="Expected `pixel_values` or `vision_features`, not both"):
        model(ids, pixel_values=pixels(), vision_features=features)
    with pytest.raises(ValueError, match="Expected `vision_features` or `cross_attention_states`, not both"):
        model(ids, cross_attention_states=torch.zeros(2, 3, 32), vision_features=features)
    with pytest.raises(ValueError, match=r"width=24.*got \(2, 1, 16, 32\)"):
        model(ids, vision_features=torch.zeros(2, 1, 16, 32))
    with pytest.raises(ValueError, match=r"at least one image.*\(2, 0, 16, 24\)"):
        model(ids, vision_features=features[:, :0])
    with pytest.raises(ValueError, match="Expected no `aspect_ratio_ids`"):
        model(ids, vision_features=features, aspect_ratio_ids=torch.ones(2, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="Expected no `vision_features`, because this model has no vision tower"):
        make_model(vision=False)(ids, vision_features=features)
    with pytest.raises(ValueError, match=r"`image_mask` of shape \(2, 1\)"):
        model(ids, vision_features=features, image_mask=torch.ones(2, 3, dtype=torch.bool))


@torch.no_grad()
@pytest.mark.parametrize("new", [None, 3])
def test_attention_maps_of_features_know_the_patches(new):
    """Maps that do not know how many images there are, or where their patches lie."""
    model, images = make_model(), pixels(2, 2)
    given = {"input_ids": token_ids()}
    options = {} if new is None else {"max_new_tokens": new, "do_sample": False}
    maps = attention_maps(model, {**given, "vision_features": features_of(model, images)}, **options)
    expected = attention_maps(model, {**given, "pixel_values": images}, **options)
    assert maps.num_images == 2
    for image in (0, 1):
        assert torch.equal(maps.grid(image=image, row=1), expected.grid(image=image, row=1))


def shards(digest, tensors, metadata):
    """Changes of a shard: (name, bytes of the file, or tensors and metadata)."""
    real = tensors[digest]

    def instead(tensor):
        return {**tensors, digest: tensor}, metadata

    yield "NaN", instead(real * torch.nan)
    yield "an infinite value", instead(torch.cat([real[:-1], real[-1:] * 1e30 * 1e30]))
    yield "integers", instead(real.to(torch.int32))
    yield "truth values", instead(real > 0)
    yield "one axis", instead(real.flatten())
    yield "three axes", instead(real[None])
    yield "no tokens", instead(real[:0])
    yield "other width", instead(real[:, :-1])
    yield "other rows", instead(real[:-1])
    yield "another tower", (tensors, {**metadata, "tower": "0" * 64})
    yield "another dtype", instead(real.half())
    yield "another image processor", (tensors, {**metadata, "image_processor": "0" * 64})
    yield "another format", (tensors, {**metadata, "format": "x"})
    yield "no metadata", (tensors, None)
    yield "the picture left out", ({name: each for name, each in tensors.items() if name != digest}, metadata)
    yield "tiles of no picture", ({**tensors, f"{digest}.x": real.clone()}, metadata)


def test_damaged_folders_of_features_are_refused(tmp_path, tmp_path_factory):
    """Features of another shape or of no number that a model learns from, or an error from inside of safetensors or
    torch.
    """
    model, data, features = save_features(tmp_path_factory.mktemp("features"))
    ours, processor = AutoModelForImageTextToText.from_pretrained(model), AutoProcessor.from_pretrained(model)
    pictures = [data / name for name in ("red.png", "again.png")]
    others = sorted(path for path in data.glob("*.png") if sha256_of(path) != sha256_of(pictures[0]))[:1]
    digest = sha256_of(pictures[0])
    tensors, metadata = {}, None
    for path in features.glob(SHARDS):
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            tensors |= {name: file.get_tensor(name) for name in file.keys()}
    file = tmp_path / SHARDS.replace("*", "1")
    save_file(tensors, file, metadata)
    whole = file.read_bytes()

    def read():
        found = VisionFeatures(tmp_path, ours).reader(processor)._look_up([[*pictures[:1], *others]])
        with torch.no_grad():
            ours(torch.ones(1, 4, dtype=torch.long), vision_features=found["vision_features"])

    read()
    cases = [*shards(digest, tensors, metadata)]
    cases += [(f"{size} bytes", whole[:size]) for size in (0, 5, 8, 100, len(whole) // 2, len(whole) - 1)]
    cases += [("no safetensors", b"\x80\x04c__builtin__\nexec\n" + whole), ("more bytes", whole + b"\0" * 8)]
    wrong = {}
    for name, content in cases:
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            save_file({key: tensor.contiguous() for key, tensor in content[0].items()}, file, content[1])
        try:
            read()
        except Exception as error:
            if not is_ours(error):
                wrong[name] = f"{type(error).__name__}: {str(error)[:200]}"
        else:
            wrong[name] = "taken"
    assert not wrong, "\n".join(f"{name}: {why}" for name, why in wrong.items())
