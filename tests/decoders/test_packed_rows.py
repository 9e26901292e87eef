"""Packed rows: several samples in one text row, whose positions start again. Each sees its own text and images, or the
row is refused.
"""

import functools

import pytest
import torch
from transformers import DataCollatorWithFlattening, LlamaForCausalLM
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

from helpers.models import own_parts
from helpers.models.marked_models import MARKER, RULES, fresh_cache
from helpers.models.tiny_decoders import make_tiny, retrofitted
from helpers.models.tiny_models import make_model, pixels, randomize
from helpers.references.gradient_checks import assert_same_outputs, outputs_and_gradients, without_dropout
from hf_xattn import XAttnConfig, XAttnForConditionalGeneration
from hf_xattn.images.image_inputs import ImageInputs
from hf_xattn.parts.packed_rows import PackedText, find_samples
from hf_xattn.utils.architectures import ARCHITECTURES
from hf_xattn.utils.transformers_api import CACHE, is_before


# Rows of samples: number of tokens, and where each sample has a marker.
ONE_ROW = [[(5, [1, 3]), (3, []), (1, []), (6, [0, 1, 4])]]
TWO_ROWS = [[(4, [3]), (4, [0])], [(2, []), (6, [2])]]
WHOLE_AND_PACKED = [[(8, [2])], [(3, [0]), (5, [1])]]
EXACT = 1e-10  # in float64
ROWS = {"one row": ONE_ROW, "two rows": TWO_ROWS, "one of two rows": WHOLE_AND_PACKED}


@functools.cache
def packing_model(name="llama", rule="previous", implementation="sdpa", **block):
    text = make_tiny(name)
    config = XAttnConfig(
        text_config=text.config,
        vision_config=make_model().config.vision_config,
        cross_attention_config=block,
        cross_attention_layers=[1, 3],
        image_token_id=MARKER,
        image_visibility=rule,
    )
    model = randomize(XAttnForConditionalGeneration(config, text_model=text))
    model.set_attn_implementation(implementation)
    return without_dropout(model.double())


def samples_of(rows, images=True):
    """The rows packed, and their samples padded."""
    generator = torch.Generator().manual_seed(5)
    flat = [sample for row in rows for sample in row]
    widest, most = max(length for length, _ in flat), max(len(markers) for _, markers in flat)
    texts = [torch.randint(4, 96, (length,), generator=generator) for length, _ in flat]
    for text, (_, markers) in zip(texts, flat):
        text[markers] = MARKER
    pictures = pixels(sum(len(markers) for _, markers in flat)).double()[:, 0]

    ids, mask = torch.zeros(len(flat), widest, dtype=torch.long), torch.zeros(len(flat), widest, dtype=torch.long)
    padded, real = torch.zeros(len(flat), most, 3, 32, 32).double(), torch.zeros(len(flat), most, dtype=torch.bool)
    first = 0
    for index, (text, (length, markers)) in enumerate(zip(texts, flat)):
        ids[index, :length], mask[index, :length], real[index, : len(markers)] = text, 1, True
        padded[index, : len(markers)] = pictures[first : first + len(markers)]
        first += len(markers)
    unpacked = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    count = len(rows[0])
    in_rows = [texts[: len(rows[0])], texts[count:]][: len(rows)]
    wide = max(sum(len(markers) for _, markers in row) for row in rows)
    images_in_rows, real_in_rows = torch.zeros(len(rows), wide, 3, 32, 32).double(), torch.zeros(len(rows), wide).bool()
    first = 0
    for index, row in enumerate(rows):
        held = sum(len(markers) for _, markers in row)
        images_in_rows[index, :held], real_in_rows[index, :held] = pictures[first : first + held], True
        first += held
    packed = {
        "input_ids": torch.stack([torch.cat(row) for row in in_rows]),
        "position_ids": torch.stack([torch.cat([torch.arange(len(text)) for text in row]) for row in in_rows]),
    }
    packed["labels"] = packed["input_ids"].masked_fill(packed["position_ids"] == 0, -100)
    if images:
        unpacked |= {"pixel_values": padded, "image_mask": real}
        packed |= {"pixel_values": images_in_rows} | ({} if real_in_rows.all() else {"image_mask": real_in_rows})
    return packed, unpacked, mask.bool()


def samples_found(model, text):
    return find_samples(model.model._interface, model.config, text, None, None, ImageInputs(), True)


def assert_unpacked(model, rows=ONE_ROW, images=True, atol=EXACT, **more):
    """Packed rows give the loss, the logits and the gradients of their samples in rows of their own."""
    packed, unpacked, real = samples_of(rows, images)
    expected, gradients = outputs_and_gradients(model, **unpacked, use_cache=False)
    found, of_packed = outputs_and_gradients(model, **packed, **more)
    assert found.get(CACHE) is None
    assert torch.allclose(found.logits.flatten(0, 1), expected.logits[real], atol=atol)
    found.logits = expected.logits
    assert_same_outputs((found, of_packed), (expected, gradients), atol)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rows", ROWS)
def test_gradients_are_those_of_unpacked_samples(rows, rule, implementation):
    """A sample that sees the images or the text of another in its row."""
    # The eager attention of transformers computes its softmax in float32.
    atol = 1e-5 if implementation == "eager" else EXACT
    assert_unpacked(packing_model(rule=rule, implementation=implementation), ROWS[rows], atol=atol)


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "gptj", "mistral", "gemma3_text"])
def test_each_decoder_that_packs_equals_unpacked_rows(name):
    """Decoders with learned positions, with sliding windows, or whose layers fetch the images themselves."""
    # Gemma's norms and GPT-J's attention compute in float32.
    assert_unpacked(packing_model(name), atol=1e-5 if name in ("gemma3_text", "gptj") else EXACT)


@pytest.mark.parametrize("rows", ROWS)
def test_a_position_encoding_counts_within_each_sample(rows):
    """Places of text that are counted through the whole row, or of image tokens through the images of other samples."""
    assert_unpacked(packing_model(position=own_parts.TURNING), ROWS[rows])


def test_packed_text_without_images_is_not_joined():
    """Packed text without images, which a cache by default would join silently."""
    assert_unpacked(packing_model(), [[(5, []), (3, []), (4, [])]], images=False)


def test_recomputation_keeps_packed_samples_apart():
    """Masks of samples that the recomputation does not get."""
    model = without_dropout(make_model(image_token_id=MARKER, image_visibility="previous").double())
    packed, unpacked, _ = samples_of(ONE_ROW)
    expected = outputs_and_gradients(model, **unpacked, use_cache=False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found = outputs_and_gradients(model, **packed)
    expected[0].logits = found[0].logits
    assert_same_outputs(found, expected)


def test_a_mask_of_the_caller_in_place_of_markers():
    """Packed rows of a model without markers."""
    model = without_dropout(make_model().double())
    packed, unpacked, real = samples_of(ONE_ROW)
    image_of_token = torch.arange(5).repeat_interleave(16)
    owner = torch.tensor([0, 0, 3, 3, 3])[image_of_token]
    sample = (packed["position_ids"] == 0).cumsum(-1) - 1
    expected = model(**unpacked, use_cache=False).logits[real]
    found = model(**packed, cross_attention_mask=sample[..., None] == owner).logits
    assert torch.allclose(found.flatten(0, 1), expected, atol=1e-10)


@pytest.mark.parametrize("how", ["no cache", "checkpointing", "beside a packed row"])
def test_positions_that_leave_some_out(how):
    """A sample that starts at a later position than the one before ends: transformers splits the text, and the images
    were joined.
    """
    model = without_dropout(make_model(image_token_id=MARKER, image_visibility="previous").double())
    packed, unpacked, real = samples_of([[(4, [3]), (4, [1])]])
    expected = model(**unpacked, use_cache=False).logits[real]
    later = packed["position_ids"] + torch.tensor([0, 0, 0, 0, 9, 9, 9, 9])
    options = {"use_cache": False} if how == "no cache" else {}
    if how == "checkpointing":
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    if how == "beside a packed row":
        later = torch.cat([later, packed["position_ids"]])
        packed = {name: torch.cat([values, values]) for name, values in packed.items()}
    found = model(**{**packed, "position_ids": later}, **options).logits[0]
    assert torch.allclose(found, expected, atol=1e-6)  # the rotary embedding is float32


def test_left_padding_with_positions_of_three_axes():
    """Padding of such positions taken for the end of a sample, or a sample that starts again taken for padding."""
    ids, mask = torch.arange(4, 10)[None], torch.tensor([[0, 0, 1, 1, 1, 1]])
    positions = torch.tensor([[1, 1, 0, 1, 2, 3]]).repeat(3, 1, 1)
    text = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}
    assert samples_found(make_model(), text) is None
    with pytest.raises(ValueError, match="Packed rows"):
        samples_found(make_model(), {**text, "position_ids": positions.flip(-1)})


def test_packed_rows_can_share_images():
    """Packed rows that look at the same images."""
    model = packing_model(rule="all")
    rows = [[(4, [3]), (4, [0])], [(3, [1]), (5, [2])], [(2, [1]), (6, [0])]]
    packed = [samples_of([row])[0] for row in rows]
    text = {name: torch.cat([each[name] for each in packed]) for name in ("input_ids", "position_ids", "labels")}
    images, index = pixels(2, 2).double(), torch.tensor([1, 0, 1])
    expected = outputs_and_gradients(model, **text, pixel_values=images[index])
    assert_same_outputs(outputs_and_gradients(model, **text, pixel_values=images, image_rows=index), expected)


def test_collators_of_transformers_and_trl():
    """What padding-free collators hand to a model: bounds for FlashAttention, numbers of samples."""
    model = packing_model()
    rows = [{"input_ids": torch.arange(4, 4 + length).tolist()} for length in (5, 3, 4)]
    flat = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(rows)
    padded = torch.zeros(3, 5, dtype=torch.long)
    for index, row in enumerate(rows):
        padded[index, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
    mask = (padded > 0).long()
    expected = model(padded, attention_mask=mask, labels=padded.masked_fill(mask == 0, -100), use_cache=False)
    assert torch.allclose(model(**flat).loss, expected.loss, atol=1e-12)
    trl = pytest.importorskip("trl")
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    assert trl
    flat = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, pad_to_multiple_of=8)(rows)
    assert torch.allclose(model(**flat).loss, expected.loss, atol=1e-12)


@pytest.mark.parametrize("name", ["bloom", "mpt", "opt", "gpt_oss", "mamba", "mamba2", "falcon_h1", "lfm2"])
@pytest.mark.parametrize("images", [False, True])
def test_decoders_that_cannot_pack(name, images):
    """A decoder whose samples read one another, and whose answer is wrong without a word."""
    model = retrofitted(make_tiny(name))
    states = {"cross_attention_states": torch.randn(1, 5, 16)} if images else {}
    ids, positions = torch.arange(4, 10)[None], torch.tensor([[0, 1, 2, 0, 1, 2]])
    with pytest.raises(ValueError, match=f"Packed rows .*got .*'{name}'"):
        model(ids, position_ids=positions, **states)
    if "position_ids" in model.model._interface.arguments:
        assert model(ids, position_ids=torch.arange(6)[None], **states).logits.isfinite().all()


def test_packed_rows_of_custom_decoders_are_refused():
    """A decoder of custom code whose type is one of transformers, and whose masks nobody has tried."""

    class Custom(LlamaForCausalLM):
        pass

    model = retrofitted(Custom(make_tiny("llama").config))
    with pytest.raises(ValueError, match="Packed rows .*got Custom"):
        model(torch.arange(4, 10)[None], position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))


PACKED, _, _ = samples_of(ONE_ROW)
ALL_TRUE = torch.ones(1, 15, dtype=torch.long)
FOUR_AXES = torch.ones(1, 1, 15, 15, dtype=torch.bool).tril()
REFUSED = {
    "padding mask": ({"attention_mask": ALL_TRUE}, "got an `attention_mask` of shape"),
    "mask of four axes": ({"attention_mask": FOUR_AXES}, "got an `attention_mask` of shape"),
    "asked for a cache": ({"use_cache": True}, "without a cache.*got `use_cache=True`"),
    "given cache": ({"cache": fresh_cache}, "without a cache.*got `cache`"),
    "fewer images": (
        {"pixel_values": PACKED["pixel_values"][:, :4]},
        r"one image marker \(token 3\).*\[4\] images a row, got \[5\] markers",
    ),
    "fewer markers": (
        {"input_ids": PACKED["input_ids"].masked_fill(torch.arange(15) == 1, 5)},
        r"\[5\] images a row, got \[4\] markers",
    ),
    "embeddings": (
        {"input_ids": None, "labels": None, "inputs_embeds": torch.zeros(1, 15, 32).double()},
        "no `input_ids`.*`cross_attention_mask`",
    ),
    "positions of three axes": (
        {"position_ids": PACKED["position_ids"].repeat(3, 1, 1)},
        r"got `position_ids` of shape \(3, 1, 15\)",
    ),
    "other bounds": (
        {"cu_seq_lens_q": torch.tensor([0, 5, 15])},
        r"end at \[5, 15\].*end at \[5, 8, 9, 15\]",
    ),
    "bounds alone": (
        {"position_ids": None, "cu_seq_lens_q": torch.tensor([0, 5, 15])},
        "got `cu_seq_lens_q` of 2 samples and no `position_ids`",
    ),
    "bounds and positions of one sample": (
        {"position_ids": torch.arange(15)[None], "cu_seq_lens_q": torch.tensor([0, 5, 15])},
        r"end at \[5, 15\].*end at \[15\]",
    ),
}


@pytest.mark.parametrize("rule", ["all", "previous"])
@pytest.mark.parametrize("name", REFUSED)
def test_packed_rows_that_would_be_joined_are_refused(name, rule):
    """Calls in which transformers joins the samples, or in which nobody knows whose image it is."""
    given, words = REFUSED[name]
    given = {key: value() if callable(value) else value for key, value in given.items()}
    with pytest.raises(ValueError, match=words):
        packing_model(rule=rule)(**{**PACKED, **given})


def test_no_markers_and_no_rule():
    """Images of a model without markers, which belong to no sample."""
    with pytest.raises(ValueError, match="no `image_token_id`.*`cross_attention_mask`"):
        make_model().double()(**PACKED)


def test_a_position_bias_refuses_packed_rows():
    """A bias that counts the tokens of the images of other samples, in compiled code, too."""
    model = make_model(image_token_id=MARKER, cross_attention_config={"position_bias": True}).double()
    with pytest.raises(ValueError, match="`position_bias`"):
        model(**PACKED)
    torch._dynamo.reset()
    compiled, inputs = torch.compile(model, backend="eager"), {**PACKED, "use_cache": False}
    for positions in (PACKED["position_ids"], torch.arange(15)[None] + 9 * (torch.arange(15) > 7)):
        with pytest.raises(RuntimeError, match="Packed rows"):
            compiled(**{**inputs, "position_ids": positions})
    torch._dynamo.reset()


def placing_model(**config):
    """A model whose resampler reads the place of each image."""
    sizes = {
        "num_latents": 3,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "num_image_positions": 3,
    }
    config = {"image_token_id": MARKER, "image_visibility": "previous", **config}
    config |= {"connector_type": "perceiver", "perceiver_config": sizes, "cross_attention_config": {"context_size": 24}}
    return without_dropout(make_model(**config).double())


@pytest.mark.parametrize("rows", ROWS)
def test_places_of_images(rows):
    """An image that gets its place in the row, or a row that is refused because it has more images than a sample may
    have.
    """
    assert_unpacked(placing_model(), ROWS[rows])


def test_places_of_features():
    """Features of the vision tower, which get the place in the row."""
    model = placing_model(image_visibility="all")
    packed, unpacked, real = samples_of(ONE_ROW)
    expected = model(**unpacked, use_cache=False).logits[real]
    tower = model.model.vision_tower
    packed["vision_features"] = tower(packed.pop("pixel_values")[0]).last_hidden_state[None]
    tower.requires_grad_(False)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for called in (model, compiled):
        assert torch.allclose(called(**packed).logits.flatten(0, 1), expected, atol=EXACT)
    many = samples_of([[(3, [1]), (5, [0, 1, 2, 3])]])[0]
    many["vision_features"] = tower(many.pop("pixel_values")[0]).last_hidden_state[None]
    with pytest.raises(RuntimeError, match="more images than positions"):
        compiled(**many)
    torch._dynamo.reset()


def test_places_of_shared_images():
    """Text rows that share images and have them at other places of their samples."""
    model, images = placing_model(image_visibility="all"), pixels(1, 2).double()
    text, rows = samples_of([[(4, [0, 3]), (4, [])], [(6, [1, 2]), (2, [])]])[0], torch.zeros(2, dtype=torch.long)
    expected = outputs_and_gradients(model, **{**text, "pixel_values": images.expand(2, -1, -1, -1, -1)})
    assert_same_outputs(outputs_and_gradients(model, **{**text, "pixel_values": images, "image_rows": rows}), expected)
    text = samples_of([[(4, [0, 3]), (4, [])], [(4, [1]), (4, [1])]])[0]
    with pytest.raises(ValueError, match="`image_rows`.*same place"):
        model(**{**text, "pixel_values": images, "image_rows": rows})


def test_places_that_nobody_knows():
    """Images whose place in their sample is unknown, or has no position."""
    model, everything = placing_model(), torch.ones(1, 15, 15, dtype=torch.bool)
    with pytest.raises(ValueError, match="one image marker"):
        model(**{**PACKED, "input_ids": torch.full((1, 15), 7)}, cross_attention_mask=everything)
    with pytest.raises(ValueError, match="got an `attention_mask` of shape"):
        model(**PACKED, attention_mask=FOUR_AXES, cross_attention_mask=everything)
    with pytest.raises(ValueError, match="at most 3 images in a sample.*`pixel_values` with image 4 of a sample"):
        model(**samples_of([[(3, [1]), (5, [0, 1, 2, 3])]])[0])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["plain", "positions", "position_bias"])
def test_generate_refuses_packed_prompts(kind):
    """A prompt of packed samples, whose images `generate` has encoded for a whole row."""
    bias = {"cross_attention_config": {"position_bias": True}} if kind == "position_bias" else {}
    model = placing_model() if kind == "positions" else make_model(image_token_id=MARKER, **bias).double()
    packed = samples_of([[(4, [1, 3]), (4, [0])]])[0]
    del packed["labels"]
    options = {"use_cache": False, "max_new_tokens": 2, "do_sample": False}
    with pytest.raises(ValueError, match="got `generate`"):
        model.generate(**packed, **options)
    packed["position_ids"] = torch.arange(8)[None]
    assert model.generate(**packed, **options).shape == (1, 10)


def test_flash_attention_in_several_rows():
    """FlashAttention, which finds the samples of a batch of one row alone."""
    model = make_model(vision=False)
    model.config.get_text_config(decoder=True)._attn_implementation_internal = "flash_attention_2"
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]])
    text = {"input_ids": positions, "position_ids": positions}
    with pytest.raises(ValueError, match="batch of one row.*`cu_seq_lens_q`"):
        samples_found(model, text)
    one = {name: values[:1] for name, values in text.items()}
    assert samples_found(model, one).tolist() == [[True, False, False, True, False]]
    bounds = torch.tensor([0, 3, 5, 7, 10], dtype=torch.int32)
    told = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 3, "max_length_k": 3}
    assert samples_found(model, text | told) is not None
    later = {"input_ids": positions[:1], "position_ids": torch.tensor([[0, 1, 2, 1, 2]])}
    with pytest.raises(ValueError, match="start at the same position"):
        samples_found(model, later)


@torch.no_grad()
def test_what_is_not_packed():
    """Left padding, positions with a gap, a cached text: taken for packed rows."""
    model = make_model()
    ids, images = torch.arange(4, 16).view(2, 6), pixels(2)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    for padding in (0, 1):
        positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, padding)
        model(ids, attention_mask=mask, position_ids=positions, pixel_values=images)
    gap = torch.tensor([[0, 1, 2, 5, 6, 7]])
    assert model(ids, position_ids=gap, pixel_values=images).get(CACHE) is not None
    cache = model(ids, pixel_values=images, use_cache=True)[CACHE]
    model(ids[:, :2], position_ids=torch.tensor([[6, 7]]), cache=cache)
    options = {"max_new_tokens": 3, "do_sample": False, "pixel_values": images, "attention_mask": mask}
    for kind in ("dynamic", "static"):
        assert model.generate(ids, cache_implementation=kind, **options).shape == (2, 9)
    assert model.generate(ids, use_cache=False, **options).shape == (2, 9)


@pytest.mark.skipif(is_before(ARCHITECTURES["bloom"].static_since), reason="Bloom has no static cache here")
@torch.no_grad()
def test_a_mask_as_long_as_a_static_cache():
    """Left padding that is taken for packed rows, because Bloom's mask goes on behind the text; in a
    second turn, too.
    """
    model, ids = retrofitted(make_tiny("bloom")), torch.arange(4, 20).view(2, 8)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :3] = 0
    states = torch.randn(2, 2, 3, 16)
    found = []
    for kind in ("dynamic", "static"):
        own = DynamicCache() if kind == "dynamic" else StaticCache(config=model.config.text_config, max_cache_len=32)
        options = {"cache": EncoderDecoderCache(own, DynamicCache()), "do_sample": False, "max_new_tokens": 3}
        first = model.generate(ids, attention_mask=mask[:, :8], cross_attention_states=states[:, :1], **options)
        more = torch.cat([first, ids[:, :1]], dim=1)
        found.append(model.generate(more, attention_mask=mask, cross_attention_states=states[:, 1:], **options))
    assert torch.equal(*found)


@pytest.mark.slow
def test_compiled_training_refuses_packed_rows():
    """A compiled step, which cannot look at positions, and joins the samples; one graph."""
    model = without_dropout(make_model(vision=False, image_token_id=MARKER))
    packed, _, _ = samples_of(ONE_ROW)
    packed["cross_attention_states"] = torch.randn(1, 5, 2, 32)
    del packed["pixel_values"]
    plain = {**packed, "position_ids": torch.arange(15)[None]}
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for inputs in (packed, plain):
        expected = model(**inputs, use_cache=False)
        assert torch.allclose(compiled(**inputs).logits, expected.logits, atol=1e-5)
    with pytest.raises(RuntimeError, match="Packed rows"):
        compiled(**packed, attention_mask=ALL_TRUE)
    with pytest.raises(RuntimeError, match="one image marker for each image"):
        compiled(**{**packed, "cross_attention_states": torch.randn(1, 6, 2, 32)})
    torch._dynamo.reset()


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("marker", [None, MARKER])
def test_compiled_generate_without_a_cache(marker):
    """A prompt that is taken for packed samples, and refused because the model has no markers."""
    model, compiled = (make_model(image_token_id=marker) for _ in range(2))
    compiled.forward = torch.compile(compiled.forward, backend="eager")
    ids = torch.tensor([[7, MARKER, 8, 9], [8, 9, MARKER, 7]])
    options = {"pixel_values": pixels(2, 2), "use_cache": False, "max_new_tokens": 3, "do_sample": False}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    found, expected = (torch.stack(each.generate(ids, **options).logits) for each in (compiled, model))
    assert torch.allclose(found, expected, atol=1e-5)
    torch._dynamo.reset()


def test_images_of_samples():
    """By hand: a sample without markers, one that starts with a marker, and a row of one sample without any."""
    starts = torch.tensor([[1, 0, 0, 1, 0, 1], [1, 0, 0, 0, 0, 0]]).bool()
    counted = torch.tensor([[0, 1, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0]]).bool()
    belongs = PackedText(starts).images_of_samples(torch.tensor([[1, 2, 3]]), counted, counted.cumsum(-1))
    first, nothing, last = [True, True, False], [False] * 3, [False, False, True]
    assert belongs[0].tolist() == [first] * 3 + [nothing] * 2 + [last]
    assert belongs[1].all()
