"""Properties of whole models, for random decoders, rules of visibility, blocks and batches. Text that is read in pieces
and in turns is that of random conversations (`test_cache_fuzz.py`).
"""

import copy
import random
import tempfile
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from transformers import AutoModelForImageTextToText
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from helpers.conversations.bank import MARKER
from helpers.inputs.properties import BatchCase, batch_cases, run, slow_seed, tensor
from helpers.models.tiny_models import TEXT_CONFIGS, randomize, vision_config
from hf_xattn import XAttnConfig, XAttnForConditionalGeneration


TOLERANCE = 2e-4


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() <= TOLERANCE * max(1.0, expected.abs().max().item()))


def rows_are_alone(case: BatchCase) -> None:
    """Rules out padding, other rows' images or other rows' markers that a row of a batch sees."""
    model = case.model
    logits = model(**case.text, **case.given, use_cache=False).logits
    bare = model(**case.text, use_cache=False).logits
    for row in range(len(case.lengths)):
        ids = case.row_ids(row)[None]
        expected = model(ids, **case.alone(row), use_cache=False).logits[0]
        assert close(logits[row, case.real(row)], expected), row
        if not case.images[row] and case.decoder != "mixtral":  # experts multiply all rows together
            assert torch.equal(logits[row], bare[row])


def padded(case: BatchCase) -> dict[str, torch.Tensor]:
    """The images of a case with one or two padding images among them, of random content."""
    draw = random.Random(case.seed)
    assert case.pictures is not None
    rows, images = case.pictures.shape[:2]
    added = draw.randint(1, 2)
    places = sorted(draw.sample(range(images + added), images))
    pictures = tensor(case.seed + 9, rows, images + added, *case.pictures.shape[2:])
    pictures[:, places] = case.pictures
    mask = torch.zeros(rows, images + added, dtype=torch.bool)
    mask[:, places] = case.given["image_mask"]
    return {case.argument: pictures, "image_mask": mask}


def mask_equals_removal(case: BatchCase) -> None:
    """Rules out an image that is hidden by a mask and still counts: in the softmax, in the rule, or in the order of
    the others.
    """
    if case.pictures is None:
        return
    expected = case.model(**case.text, **case.given, use_cache=False).logits
    found = case.model(**case.text, **padded(case), use_cache=False).logits
    for row in range(len(case.lengths)):
        assert close(found[row, case.real(row)], expected[row, case.real(row)]), row


def masked_content_changes_no_bit(case: BatchCase) -> None:
    """Rules out padding images whose content is read, NaN included."""
    if case.pictures is None:
        return
    given = padded(case)
    other = {**given, case.argument: given[case.argument].clone()}
    other[case.argument][~given["image_mask"]] = random.Random(case.seed + 1).choice([float("nan"), float("inf"), 1e4])
    found, expected = (case.model(**case.text, **each, use_cache=False).logits for each in (other, given))
    assert torch.equal(found, expected)


DECODING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 2},
    "more beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "num_return_sequences": 2, "top_k": 20},
    "lookup": {"prompt_lookup_num_tokens": 2},
}
KINDS = ("dynamic", "static", "encoded", "callers")  # an offloaded cache needs a GPU


def generated_equals_uncached(case: tuple[BatchCase, str, str]) -> None:
    """Rules out a cache, a number of beams or a decoding mode with which another text is written."""
    batch, decoding, kind = case
    if decoding == "lookup":
        if len(batch.lengths) > 1 or kind == "static":  # transformers looks up for one row, in caches that crop
            return
    model = batch.model
    text = {name: value for name, value in batch.text.items() if name != "position_ids"}
    options = {"max_new_tokens": 4, "do_sample": False, **DECODING[decoding], "return_dict_in_generate": True}
    options["output_scores"] = True

    def write(**given: Any) -> Any:
        torch.manual_seed(batch.seed)
        return model.generate(**text, **options, **given)

    expected = write(**batch.given, use_cache=False) if decoding != "lookup" else None
    if expected is None:  # which needs a cache: greedy search writes the same
        expected = model.generate(
            **text, **{**options, "prompt_lookup_num_tokens": None}, **batch.given, use_cache=False
        )
    if kind == "encoded" and batch.given:
        found = write(cache=model.encode_images(**batch.given))
    elif kind in ("encoded", "callers"):
        config = model.config.get_text_config(decoder=True)
        found = write(**batch.given, cache=EncoderDecoderCache(DynamicCache(config=config), DynamicCache()))
    else:
        implementation = {} if kind == "dynamic" else {"cache_implementation": kind}
        found = write(**batch.given, **implementation)
    if not torch.equal(found.sequences, expected.sequences):
        # Two tokens with the same score to rounding.
        assert decoding != "lookup" and close(torch.stack(found.scores)[0], torch.stack(expected.scores)[0])
        first = (found.sequences != expected.sequences).any(dim=0).nonzero()[0].item() - batch.width
        top = expected.scores[first].topk(2, dim=-1).values
        assert first > 0 or (top[:, 0] - top[:, 1]).min() < 1e-3


def save_and_load_is_the_identity(seed: int) -> None:
    """Rules out a field or a weight that a folder loses, in any combination of options."""
    draw = random.Random(seed)
    kv_heads = draw.choice([1, 2, 3])
    connector = draw.choice(["linear", "mlp", "mlp_2d", "perceiver", "identity"])
    block = {
        "context_size": 24 if connector in ("perceiver", "identity") else draw.choice([8, 32]),
        "num_attention_heads": kv_heads * draw.choice([1, 2]),
        "num_key_value_heads": kv_heads,
        "head_dim": draw.choice([4, 6]),
        "intermediate_size": draw.choice([8, 20]),
        "hidden_act": draw.choice(["silu", "gelu", "relu"]),
        "norm_type": draw.choice(["rmsnorm", "layernorm"]),
        "mlp_type": draw.choice(["gated", "plain", "none"]),
        "gate": draw.choice(["tanh", "none"]),
        "gate_granularity": draw.choice(["scalar", "channel"]),
        "norm_eps": draw.choice([1e-6, 1e-5]),
        "qk_norm_eps": draw.choice([None, 1e-6, 1e-3]),
        **{
            name: draw.random() < 0.5
            for name in ("attention_bias", "mlp_bias", "qk_norm", "quiet_softmax", "position_bias")
        },
    }
    block["mlp_bias"] &= block["mlp_type"] != "none"
    perceiver = {
        "num_latents": draw.randint(1, 4),
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 4,
        "num_image_positions": draw.choice([0, 3]),
        "qk_norm": draw.random() < 0.5,
    }
    added = draw.choice([0, 2])
    text, dtype = (
        draw.choice(["llama", "llama_tied", "gpt2", "qwen3", "gemma3"]),
        draw.choice([torch.float32, torch.bfloat16]),
    )
    config = XAttnConfig(
        text_config=TEXT_CONFIGS[text](),
        vision_config=vision_config(),
        cross_attention_config=block,
        cross_attention_layers=sorted(draw.sample(range(5), draw.randint(1, 3))),
        connector_type=connector,
        perceiver_config=perceiver if connector == "perceiver" else None,
        connector_bias=draw.random() < 0.5,
        image_token_id=MARKER,
        image_visibility=draw.choice(["all", "previous", "latest", "latest_group"]),
        additional_vocab_size=added,
        additional_vocab_in_head=bool(added) and draw.random() < 0.5,
        vision_feature_select_strategy=draw.choice(["full", "default"] if connector != "mlp_2d" else ["full"]),
    )
    torch.manual_seed(seed)
    model = randomize(XAttnForConditionalGeneration._from_config(config, dtype=dtype).eval(), seed)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, max_shard_size=draw.choice(["5GB", "40KB"]))
        again = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto").eval()
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) and after[name].dtype == value.dtype for name, value in before.items())
    assert again.config.cross_attention_config.to_dict() == model.config.cross_attention_config.to_dict()
    ids = torch.tensor([[MARKER, 5, 6, 7]])
    given = {"pixel_values": tensor(seed, 1, 1, 3, 32, 32)}
    # Not bit for bit: kernels round by where the weights lie in memory.
    assert close(again(ids, **given).logits, model(ids, **given).logits)


def finite_in_finite_out(case: tuple[BatchCase, torch.dtype]) -> None:
    """Rules out NaN in half precision, from padding, from rows without images, and from a mask
    that hides everything.
    """
    batch, dtype = case
    model = HALF.setdefault((batch.decoder, batch.rule, batch.block, dtype), None)
    if model is None:
        model = HALF[batch.decoder, batch.rule, batch.block, dtype] = copy.deepcopy(batch.model).to(dtype)
    given = batch.given
    if given:
        scale = random.Random(batch.seed).choice([0.0, 1.0, 30.0])
        given[batch.argument] = (given[batch.argument] * scale).to(dtype)
        if batch.seed % 2 and batch.rule == "all":
            given["image_mask"] = torch.zeros_like(given["image_mask"])
    assert model(**batch.text, **given, use_cache=False).logits.isfinite().all()


HALF: dict[Any, Any] = {}
HALVES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
# Name: what is checked, the cases, how many in the default run.
PROPERTIES = {
    "each row alone": (rows_are_alone, batch_cases(), 30),
    "mask equals removal": (mask_equals_removal, batch_cases(), 25),
    "masked content changes no bit": (masked_content_changes_no_bit, batch_cases(), 25),
    "generated equals uncached": (
        generated_equals_uncached,
        st.tuples(batch_cases(side="left"), st.sampled_from(list(DECODING)), st.sampled_from(KINDS)),
        25,
    ),
    "save and load is the identity": (save_and_load_is_the_identity, st.integers(0, 2**16), 8),
    "finite in, finite out": (finite_in_finite_out, st.tuples(batch_cases(), HALVES), 25),
}


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_random_model_has_the_property(name):
    """Decoders, batches, masks and caches that no test was written for."""
    run(*PROPERTIES[name], shrinks=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROPERTIES)
def test_property_of_many(name):
    """The same for hundreds more cases of each, other ones at every run."""
    check, cases, quick = PROPERTIES[name]
    run(check, cases, 10 * quick, slow_seed(), shrinks=False)
