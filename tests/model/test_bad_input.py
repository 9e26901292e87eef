"""Input that does not fit: errors that name the argument and the numbers."""

import pytest
import torch
from PIL import Image
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from helpers.models.tiny_models import VOCAB_SIZE, make_model, pixels, token_ids
from hf_xattn.utils.transformers_api import CACHE


MARKER = 3


def states(batch=2, num_tokens=5, width=32, seed=5):
    return torch.randn(batch, num_tokens, width, generator=torch.Generator().manual_seed(seed))


# What `test_public_surface.py` does not ask of each argument: a wrong type, rank, size or dtype stands there.
BAD_CALLS = {
    "states_rank": ({"cross_attention_states": torch.zeros(2, 32)}, ValueError, r"cross_attention_states.*\(2, 32\)"),
    "states_batch": ({"cross_attention_states": torch.zeros(3, 5, 32)}, ValueError, "batch 2, got batch 3"),
    "states_empty": ({"cross_attention_states": torch.zeros(2, 0, 32)}, ValueError, "no image token"),
    "mask_rank": (
        {"cross_attention_states": states(), "cross_attention_mask": torch.ones(2, 1, 7, 5, dtype=torch.bool)},
        ValueError,
        r"cross_attention_mask.*\(2, 1, 7, 5\)",
    ),
    "mask_text": (
        {"cross_attention_states": states(), "cross_attention_mask": torch.ones(2, 6, 5, dtype=torch.bool)},
        ValueError,
        r"cross_attention_mask.*\(2, 7, 5\).*\(2, 6, 5\)",
    ),
    "mask_alone": (
        {"cross_attention_mask": torch.ones(2, 5, dtype=torch.bool)},
        ValueError,
        "`cross_attention_mask` was given without images",
    ),
    "image_mask_alone": (
        {"image_mask": torch.ones(2, 1, dtype=torch.bool)},
        ValueError,
        "`image_mask` was given without",
    ),
    "pixels_rank": ({"pixel_values": torch.zeros(3, 32, 32)}, ValueError, r"pixel_values.*\(3, 32, 32\)"),
    "pixels_channels": ({"pixel_values": torch.zeros(2, 1, 1, 32, 32)}, ValueError, "3 channels, got 1"),
    "pixels_batch": ({"pixel_values": pixels(3)}, ValueError, "pixel_values.*batch 2, got batch 3"),
    "pixels_none": ({"pixel_values": torch.zeros(2, 0, 3, 32, 32)}, ValueError, "no image"),
    "both": ({"pixel_values": pixels(), "cross_attention_states": states()}, ValueError, "not both"),
    "ids_and_embeds": ({"inputs_embeds": torch.zeros(2, 7, 32)}, ValueError, "exactly one"),
    "no_text": ({"input_ids": None, "pixel_values": pixels()}, ValueError, "exactly one"),
    "ids_rank": ({"input_ids": token_ids()[0]}, ValueError, r"input_ids.*\(7,\)"),
    "ids_list": ({"input_ids": [[5, 6]]}, TypeError, "input_ids.*torch.Tensor, got list"),
    "ids_empty_batch": ({"input_ids": token_ids()[:0]}, ValueError, r"input_ids.*no token.*\(0, 7\)"),
    "ids_vocabulary": ({"input_ids": token_ids() + VOCAB_SIZE}, IndexError, "index out of range"),
    "ids_negative": ({"input_ids": -token_ids()}, IndexError, "index out of range"),
    "embeds_rank": ({"input_ids": None, "inputs_embeds": torch.zeros(2, 32)}, ValueError, r"inputs_embeds.*\(2, 32\)"),
    "labels_int32": ({"labels": token_ids().int()}, TypeError, "labels.*int64.*got torch.int32"),
    "labels_vocabulary": ({"labels": token_ids() + VOCAB_SIZE}, IndexError, "Target .* is out of bounds"),
    "labels_kept": ({"labels": token_ids(), "logits_to_keep": 2}, ValueError, r"labels.*\(2, 2\).*got \(2, 7\)"),
    "cache_list": (
        {
            "cache": [],
            "position_ids": torch.arange(7).repeat(2, 1),
            "attention_mask": torch.ones(2, 7, dtype=torch.long),
        },
        TypeError,
        "`cache`.*cache.*got list",
    ),
    "pixels_list": ({"pixel_values": [pixels()]}, TypeError, "pixel_values.*torch.Tensor, got list"),
    "pixels_pil": ({"pixel_values": Image.new("RGB", (32, 32))}, TypeError, "pixel_values.*got PIL.Image.Image"),
    "mask_list": (
        {"cross_attention_states": states(), "cross_attention_mask": [[True] * 5] * 2},
        TypeError,
        "cross_attention_mask.*got list",
    ),
    "pixels_zero_size": ({"pixel_values": torch.zeros(2, 1, 3, 0, 32)}, ValueError, r"no image.*\(2, 1, 3, 0, 32\)"),
    "pixels_no_rows": ({"pixel_values": pixels()[:0]}, ValueError, r"no image.*\(0, 1, 3, 32, 32\)"),
}


@pytest.fixture(scope="module")
def served():
    return make_model()


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_input_is_named(served, case):
    """A shape that broadcasts, or an error from deep inside that names neither argument nor numbers."""
    arguments, error, message = BAD_CALLS[case]
    arguments = {"input_ids": token_ids(), **arguments}
    with pytest.raises(error, match=message):
        served(**arguments)


GENERATE = {
    "list": ([[5, 6]], TypeError, "`inputs`.*torch.Tensor, got list"),
    "rank": (token_ids()[0], ValueError, r"`inputs`.*\(7,\)"),
    "dtype": (token_ids().float(), TypeError, "`inputs`.*integers.*float32"),
}


@pytest.mark.parametrize("case", GENERATE)
def test_generate_names_its_text(served, case):
    """An error from inside a sampling loop, after the images were encoded."""
    ids, error, message = GENERATE[case]
    with pytest.raises(error, match=message):
        served.generate(ids, pixel_values=pixels())
    with pytest.raises(error, match=message.replace("inputs", "input_ids")):
        served.generate(input_ids=ids, pixel_values=pixels())


@pytest.mark.parametrize("mask", ["list", "rank", "rows", "length"])
def test_generate_names_its_attention_mask(served, mask):
    """An IndexError or a missing `long` from inside transformers, after the images were encoded."""
    ids = token_ids()
    wrong = {
        "list": (torch.ones_like(ids).tolist(), TypeError, "`attention_mask` to be a torch.Tensor, got list"),
        "rank": (torch.ones(7), ValueError, r"`attention_mask` of shape .*, got \(7,\)"),
        "rows": (torch.ones(1, 7), ValueError, r"batch=2.*got \(1, 7\)"),
        "length": (torch.ones(2, 8), ValueError, r"text_len=7.*got \(2, 8\)"),
    }[mask]
    with pytest.raises(wrong[1], match=wrong[2]):
        served.generate(ids, attention_mask=wrong[0], pixel_values=pixels(), max_new_tokens=2)


BAD_POSITIONS = {
    "rows": ("llama", {"position_ids": torch.zeros(3, 7, dtype=torch.long)}, r"batch=2, text_len=7\), got \(3, 7\)"),
    "none": ("llama", {"position_ids": torch.zeros(0, 7, dtype=torch.long)}, r"batch=2, text_len=7\), got \(0, 7\)"),
    "axes": ("llama", {"position_ids": torch.zeros(1, 2, 7, dtype=torch.long)}, None),
    "negative": ("gpt2", {"position_ids": torch.arange(-7, 0)[None]}, "index out of range"),
    "behind": ("gpt2", {"position_ids": torch.arange(122, 129)[None]}, "index out of range"),
    "long": ("gpt2", {"input_ids": token_ids(2, 129)}, "index out of range"),
    "kept_float": ("llama", {"logits_to_keep": torch.tensor([1.0])}, "tensors used as indices must be"),
    "kept_negative": ("llama", {"logits_to_keep": -1}, "`logits_to_keep` to be at least 0.*got -1"),
    "kept_behind": ("llama", {"logits_to_keep": torch.tensor([7])}, "index 7 is out of bounds"),
}


@pytest.mark.parametrize("case", BAD_POSITIONS)
def test_positions_are_refused(case):
    """Logits of other positions than those that were meant. Decoders and torch refuse what they cannot read."""
    decoder, given, message = BAD_POSITIONS[case]
    with torch.no_grad(), pytest.raises((ValueError, IndexError, RuntimeError), match=message):
        make_model(decoder)(**{"input_ids": token_ids(), "pixel_values": pixels(), **given})


def test_text_that_outgrows_the_table_of_positions():
    """The same in a later turn, where the call itself is short; the cache stays as it was."""
    model = make_model("gpt2")
    with torch.no_grad():
        cache = model(token_ids(1, 126), pixel_values=pixels(1), use_cache=True)[CACHE]
        with pytest.raises(IndexError):
            model(token_ids(1, 3), cache=cache)
        assert cache.get_seq_length() == 126 and model(token_ids(1, 2), cache=cache).logits.shape[1] == 2


def test_empty_batches_are_not_encoded(served):
    """An empty cache that fails when it is used."""
    with pytest.raises(ValueError, match="`pixel_values` with at least one image"):
        served.encode_images(pixel_values=pixels()[:0])
    with pytest.raises(ValueError, match="`cross_attention_states` holds no image token"):
        served.encode_images(cross_attention_states=states()[:0])
    with pytest.raises(TypeError, match="`pixel_values`.*numpy.ndarray"):
        served.get_image_features(pixels().numpy())


@torch.no_grad()
def test_images_and_text_on_two_devices():
    """Pixels beside text on another device, where either may be wrong."""
    model = make_model()
    for ids, images in ((token_ids().to("meta"), pixels()), (token_ids(), pixels().to("meta"))):
        message = f"Expected `pixel_values` and the text on the same device, got {images.device} and {ids.device}"
        with pytest.raises(ValueError, match=message):
            model(ids, pixel_values=images)


@torch.no_grad()
def test_text_that_a_hook_moves():
    """Text refused although a hook, such as accelerate's, brings it to the device of the embedding."""
    model, ids = make_model(), token_ids()
    expected = model(ids).logits
    embedding = model.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda module, args: (ids,))
    assert torch.equal(
        model(ids.to("meta"), attention_mask=torch.ones(2, 7), position_ids=torch.arange(7)[None]).logits, expected
    )


def test_labels_that_the_loss_ignores(served):
    """Ignored labels, or those of kept positions, taken for ids outside the vocabulary."""
    ids = token_ids()
    labels = ids.clone()
    labels[:, :3] = -1
    expected = served(ids, labels=labels.masked_fill(labels == -1, -100)).loss
    assert torch.equal(served(ids, labels=labels, ignore_index=-1).loss, expected)
    assert served(ids, labels=ids[:, -3:], logits_to_keep=3).loss.isfinite()


def test_images_need_a_way_in():
    """Pixels ignored by a model without a vision tower; markers that cannot be found in embeddings."""
    model = make_model(vision=False)
    with pytest.raises(ValueError, match="no vision tower.*cross_attention_states"):
        model(token_ids(), pixel_values=pixels())
    with pytest.raises(ValueError, match="no vision tower"):
        model.get_image_features(pixels())
    model = make_model(image_token_id=MARKER, image_visibility="previous")
    with pytest.raises(ValueError, match="image_visibility='previous'.*inputs_embeds"):
        model(inputs_embeds=torch.zeros(2, 7, 32), pixel_values=pixels())


@torch.no_grad()
def test_caches_that_do_not_fit_are_refused():
    """Images of another model or batch, read as noise."""
    model, ids = make_model(), token_ids()
    with pytest.raises(ValueError, match="a cache for text and images, got a DynamicCache"):
        model(ids, pixel_values=pixels(), cache=DynamicCache())
    fewer = make_model(cross_attention_layers=[1]).encode_images(pixel_values=pixels())
    with pytest.raises(ValueError, match="Expected images for 2 cross-attention blocks.*got 1"):
        model(ids, cache=fewer)
    heads = make_model(cross_attention_config={"num_attention_heads": 4, "num_key_value_heads": 4})
    with pytest.raises(ValueError, match="Expected 2 K/V heads.*got 4"):
        model(ids, cache=heads.encode_images(pixel_values=pixels()))
    width = make_model(cross_attention_config={"head_dim": 6})
    with pytest.raises(ValueError, match="Expected 2 K/V heads of width 8.*got 2 of width 6"):
        model(ids, cache=width.encode_images(pixel_values=pixels()))
    two = model.encode_images(pixel_values=pixels())
    with pytest.raises(ValueError, match="multiple of 2, the number of image rows.*got 3"):
        model(token_ids(3), cache=two)
    foreign = EncoderDecoderCache(DynamicCache(), DynamicCache())
    foreign.cross_attention_cache.update(torch.zeros(2, 2, 5, 8), torch.zeros(2, 2, 5, 8), 0)
    with pytest.raises(ValueError, match="empty or filled by this model, got 1 layers"):
        model(ids, pixel_values=pixels(), cache=foreign)
    with pytest.raises(ValueError, match="encode_images.*needs"):
        model.encode_images()
    with pytest.raises(ValueError, match=r"\(batch, num_image_tokens\)"):
        model.encode_images(cross_attention_states=states(), cross_attention_mask=torch.ones(2, 7, 5, dtype=torch.bool))
