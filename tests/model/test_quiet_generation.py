"""Calls of `generate` and labels that were answered wrongly without a word."""

import copy
import logging

import pytest
import torch
from transformers import GenerationConfig, SiglipVisionModel

from helpers.models import tiny_mllama
from helpers.models.marked_models import MARKER
from helpers.models.template_models import make_tokenizer
from helpers.models.tiny_models import make_model, make_text, pixels, randomize, token_ids, vision_config
from hf_xattn import retrofit


BOS = torch.tensor([[1], [1]])


def say(model, *args, **given):
    return model.generate(*args, max_new_tokens=4, do_sample=False, **given)


@torch.no_grad()
@pytest.mark.parametrize("cached", [True, False])
def test_images_without_text(cached):
    """A caption that is asked for by the pictures alone: one row for two pictures, of a model that saw none."""
    model, images = make_model(), pixels(2, 1)
    options = {} if cached else {"use_cache": False}
    for given in (
        {"pixel_values": images},
        {"cross_attention_states": model.get_image_features(images).pooler_output},
        {"cache": model.encode_images(images), "pixel_values": images + 1},
        {"cache": model.encode_images(images), "cross_attention_mask": torch.ones(2, 16, dtype=torch.bool)},
        {"image_mask": torch.ones(2, 1, dtype=torch.bool)},
    ):
        with pytest.raises(ValueError, match="`input_ids` or `inputs_embeds` beside images, got neither"):
            say(model, **given, **options)
    assert not torch.equal(say(model, BOS, pixel_values=images, **options), say(model, BOS, **options))
    if cached:  # the images are in the cache, and are seen
        alone = say(model, cache=model.encode_images(images[:1]))
        assert torch.equal(alone, say(model, BOS[:1], pixel_values=images[:1]))


@torch.no_grad()
def test_the_code_of_a_custom_generate(tmp_path):
    """A folder with a way of decoding, which calls `generate` again: without the pictures."""
    folder = tmp_path / "custom_generate"
    folder.mkdir()
    (folder / "requirements.txt").touch()
    (folder / "generate.py").write_text(
        "def generate(model, *args, **kwargs):\n"
        "    ids = kwargs.pop('inputs', None)\n"
        "    if ids is None:\n"
        "        ids = args[0] if args else kwargs.pop('input_ids')\n"
        "    return model.generate(ids, **kwargs)\n"
    )
    model, ids, images = make_model(), token_ids(2, 5), pixels(2, 1)
    expected = say(model, ids, pixel_values=images)
    custom = {"custom_generate": str(tmp_path), "trust_remote_code": True}
    assert torch.equal(say(model, ids, pixel_values=images, **custom), expected)
    assert not torch.equal(say(model, ids), expected) and torch.equal(say(model, ids, **custom), say(model, ids))
    for given in ({}, {"pixel_values": images}):
        with pytest.raises(TypeError, match="no `image_inputs` in `generate`, got str"):
            say(model, ids, image_inputs="a", **given)


@torch.no_grad()
@pytest.mark.parametrize("way", ["keyword", "argument", "positional", "partial_argument", "of_the_model"])
def test_token_healing(way):
    """The last token of a prompt, asked for anew without the pictures, wherever `generate` finds the option."""
    model, ids, images = make_model(), torch.tensor([[4, 5, 6, 7, 5]]), pixels(1, 1)
    args, options = (), {"tokenizer": make_tokenizer()}
    if way in ("of_the_model", "partial_argument"):
        model.generation_config.token_healing = True
    if way == "keyword":
        options["token_healing"] = True
    elif way in ("argument", "partial_argument"):
        options["generation_config"] = GenerationConfig(token_healing=True if way == "argument" else None)
    elif way == "positional":
        args = (GenerationConfig(token_healing=True),)
    for given in ({"pixel_values": images}, {"cache": model.encode_images(images)}):
        with pytest.raises(ValueError, match="`token_healing=False` beside images, got True"):
            say(model, ids, *args, **given, **options)
    if way == "of_the_model":  # a keyword has the last word
        say(model, ids, pixel_values=images, token_healing=False)


@torch.no_grad()
@pytest.mark.parametrize("visibility", ["all", "latest"])
def test_a_marker_that_is_padding(visibility):
    """Padding that counts as the marker of a picture, and markers that are hidden as padding."""
    text = make_text()
    text.config.pad_token_id = text.generation_config.pad_token_id = MARKER
    model = randomize(retrofit(text, SiglipVisionModel(vision_config()), image_token_id=MARKER, every=2))
    model.config.image_visibility = visibility
    ids = torch.tensor([[MARKER, MARKER, MARKER, 7, 8], [MARKER, 9, 10, 11, 12]])
    mask, images = torch.ones_like(ids), pixels(2, 1)
    mask[0, :2] = 0
    if visibility == "latest":
        with pytest.raises(ValueError, match=f"`pad_token_id` of the text model, got {MARKER} for both"):
            model(ids, attention_mask=mask, pixel_values=images, use_cache=True)
        return
    with pytest.raises(ValueError, match="both `image_token_id` and `pad_token_id`, got none"):
        say(model, ids, pixel_values=images)
    alone = say(model, ids[:1, 2:], attention_mask=mask[:1, 2:], pixel_values=images[:1])
    together = say(model, ids, attention_mask=mask, pixel_values=images)
    assert torch.equal(together[0, 5:], alone[0, 3:])


@torch.no_grad()
def test_continuous_batching():
    """The prompt without a new token after half a minute, with the error in a log: its steps carry no images."""
    model, ids, images = make_model(), token_ids(2, 5), pixels(2, 1)
    with pytest.raises(ValueError, match="`generate_batch`.* is not supported by XAttnForConditionalGeneration"):
        say(model, ids, pixel_values=images, cache_implementation="paged")
    for given in ({"pixel_values": images}, {}):
        with pytest.raises(ValueError, match="Call `generate` with a batch"):
            model.generate_batch(ids.tolist(), **given)
    for call in (model.init_continuous_batching, model.continuous_batching_context_manager().__enter__):
        with pytest.raises(ValueError, match="For text alone, call `generate_batch` of `model.model.text_model`"):
            call()
    expected = say(model, ids, pixel_values=images)  # transformers reads the option as a keyword alone
    assert torch.equal(say(model, ids, GenerationConfig(cache_implementation="paged"), pixel_values=images), expected)


@torch.no_grad()
def test_labels_of_places_with_gaps():
    """Logits that are trained on the label of the next place given, not of the next token."""
    model, ids, images = make_model(), token_ids(2, 7), pixels(2, 1)
    labels = torch.randint(4, 90, (2, 7), generator=torch.Generator().manual_seed(0))
    for places in ([1, 4, 6], [4, 3], [2, 2]):
        kept = torch.tensor(places)
        with pytest.raises(ValueError, match="`logits_to_keep` with `labels` to be positions side by side"):
            model(ids, pixel_values=images, labels=labels[:, places], logits_to_keep=kept)
    logits = model(ids, pixel_values=images).logits
    kept = torch.tensor([3, 4, 5])
    loss = model(ids, pixel_values=images, labels=labels[:, 3:6], logits_to_keep=kept).loss
    expected = torch.nn.functional.cross_entropy(logits[:, 3:5].flatten(0, 1), labels[:, 4:6].flatten())
    torch.testing.assert_close(loss, expected)
    kept = torch.tensor([1, 4])
    given = {"labels": labels[:, [1, 4]], "shift_labels": labels[:, [2, 5]], "logits_to_keep": kept}
    loss = model(ids, pixel_values=images, **given).loss
    expected = torch.nn.functional.cross_entropy(logits[:, kept].flatten(0, 1), labels[:, [2, 5]].flatten())
    torch.testing.assert_close(loss, expected)


def test_a_class_token_that_is_none(caplog, monkeypatch):
    """`vision_feature_select_strategy="default"` without effect, or that drops the patch in the corner."""
    tiled = tiny_mllama.make_mllama().model.vision_model
    options = {"every": 2, "connector_type": "linear", "vision_feature_select_strategy": "default"}
    with pytest.raises(ValueError, match='"full"` with mllama_vision_model, whose tokens are all read'):
        retrofit(make_text(), copy.deepcopy(tiled), **options)
    with pytest.raises(ValueError, match='"full"` with no vision tower'):
        retrofit(make_text(), every=2, vision_feature_select_strategy="default")
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level("WARNING"):
        retrofit(make_text(), SiglipVisionModel(vision_config()), **options)
    assert "siglip_vision_model: this tower has no class token" in caplog.text
