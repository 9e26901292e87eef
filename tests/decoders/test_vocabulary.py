"""Tokens beyond the decoder's vocabulary."""

import copy
import json
import pickle

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoModelForCausalLM,
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from helpers.models.tiny_decoders import SERVED, make_tiny
from helpers.models.tiny_models import VOCAB_SIZE, make_model, make_text, pixels, token_ids
from hf_xattn import XAttnConfig, retrofit


EXTRA = 3


def make(name="llama", **options):
    torch.manual_seed(5)
    return make_model(name, additional_vocab_size=EXTRA, **options)


def ids_with_extra():
    ids = token_ids()
    ids[:, 2], ids[:, 4] = VOCAB_SIZE, VOCAB_SIZE + EXTRA - 1
    return ids


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "llama_tied", "gemma3", "gpt2"])
def test_added_tokens_have_embeddings_of_their_own(name):
    """Added ids that read another token's row, known ids that read something new, names that moved."""
    base, model = make_text(name), make(name)
    known = token_ids()
    assert torch.equal(model(known).logits, base(known).logits)
    names = {key for key in model.model.text_model.state_dict() if "cross_attention_block" not in key}
    assert {key for key in names if "additional" not in key} == set(base.state_dict())
    embedding = model.get_input_embeddings()
    embedded = embedding(ids_with_extra())
    scale = getattr(embedding, "embed_scale", 1.0)
    assert torch.equal(embedded[:, 2], embedding.additional.weight[:1].expand(2, -1) * scale)
    assert torch.equal(embedded[:, 4], embedding.additional.weight[-1:].expand(2, -1) * scale)
    assert torch.equal(embedded[:, :2], base.get_input_embeddings()(ids_with_extra()[:, :2]))
    assert model(ids_with_extra()).logits.shape[-1] == VOCAB_SIZE


@torch.no_grad()
@pytest.mark.parametrize("method", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
@pytest.mark.parametrize(
    ("option", "value", "processor"),
    [
        ("encoder_repetition_penalty", 0.02, lambda ids: EncoderRepetitionPenaltyLogitsProcessor(0.02, ids)),
        ("encoder_no_repeat_ngram_size", 1, lambda ids: EncoderNoRepeatNGramLogitsProcessor(1, ids)),
        ("repetition_penalty", 50.0, lambda ids: RepetitionPenaltyLogitsProcessor(50.0)),
        ("no_repeat_ngram_size", 1, lambda ids: NoRepeatNGramLogitsProcessor(1)),
    ],
)
def test_options_that_look_up_tokens_of_the_prompt(option, value, processor, method):
    """torch's index error for an added token, such as an image marker, which has no logit."""
    model, ids, images = make(), ids_with_extra(), pixels(2, 1)
    options = {"pixel_values": images, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None, **method}
    # Without the option, the answer repeats tokens of this prompt.
    ids = model.generate(ids, **options)

    def known(ids):
        return ids.where(ids < VOCAB_SIZE, ids[:, :1].expand_as(ids))

    reference = processor(known(ids))
    said = model.generate(ids, **options, **{option: value})
    assert torch.equal(said, model.generate(ids, **options, logits_processor=[lambda i, s: reference(known(i), s)]))
    assert not torch.equal(said, model.generate(ids, **options))


# Its input for each layer has a vocabulary of its own, in which it does not find an added token.
ANOTHER_VOCABULARY = ("gemma4_text",)


@torch.no_grad()
@pytest.mark.parametrize("model_type", SERVED)
def test_added_rows_are_read_as_the_others(model_type):
    """A decoder that scales or norms its embeddings (Gemma, BioGPT, XGLM, Inkling), but not the added ones."""
    model = retrofit(make_tiny(model_type), every=2, additional_vocab_size=EXTRA).eval()
    embedding, ids = model.get_input_embeddings(), token_ids()
    ids[:, 2] = 7
    added = ids.masked_fill(ids == 7, embedding.num_embeddings + 1)
    embedding.additional.weight[1] = embedding.weight[7]
    assert torch.equal(embedding(added), embedding(ids))
    if model_type in ANOTHER_VOCABULARY:
        with pytest.raises(IndexError):
            model(added)
    else:
        assert torch.equal(model(added).logits, model(ids).logits)


@torch.no_grad()
def test_rows_of_an_old_folder(tmp_path):
    """Rows that were trained without a scale, which a later version scales; a second save that forgets it."""
    model = make("gemma3", additional_vocab_scaled=False)
    embedding = model.get_input_embeddings()
    assert torch.equal(embedding(ids_with_extra())[:, 2], embedding.additional.weight[:1].expand(2, -1))
    expected = model(ids_with_extra(), pixel_values=pixels()).logits
    model.save_pretrained(tmp_path / "old")
    file = tmp_path / "old" / "config.json"
    fields = json.loads(file.read_text())
    assert fields.pop("additional_vocab_scaled") is False
    file.write_text(json.dumps(fields))
    for source, target in (("old", "again"), ("again", "more")):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / source).eval()
        assert torch.equal(loaded(ids_with_extra(), pixel_values=pixels()).logits, expected)
        loaded.save_pretrained(tmp_path / target)
    assert not torch.equal(make("gemma3")(ids_with_extra(), pixel_values=pixels()).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("in_head", [False, True])
@pytest.mark.parametrize("name", ["llama", "llama_tied", "gemma3"])
def test_copies_and_files(name, in_head, tmp_path):
    """Classes made at run time that a copy loses, rows that a file loses or a fresh initialisation overwrites."""
    model = make(name, additional_vocab_in_head=in_head)
    batch = {"input_ids": ids_with_extra(), "pixel_values": pixels()}
    expected = model(**batch).logits
    assert expected.shape[-1] == VOCAB_SIZE + EXTRA * in_head
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert torch.allclose(other(**batch).logits, expected, atol=1e-5)
        state = other.state_dict()
        assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())
        if in_head:
            tables = [other.get_input_embeddings().additional, other.get_output_embeddings().additional]
            assert (tables[0].weight is tables[1].weight) == (name != "llama")


def test_added_rows_have_the_dtype_of_the_model():
    """Added rows in another dtype than the rest."""
    model = make(dtype=torch.bfloat16, additional_vocab_in_head=True, vision=False)
    assert model.get_input_embeddings().additional.weight.dtype == torch.bfloat16
    assert model(ids_with_extra()).logits.dtype == torch.bfloat16


def test_the_loss_leaves_out_tokens_that_the_head_cannot_write():
    """A loss that crashes on, or learns, tokens that the head cannot write."""
    labels = ids_with_extra()
    readable = labels.masked_fill(labels >= VOCAB_SIZE, -100)
    model = make()
    assert torch.equal(model(ids_with_extra(), labels=labels).loss, model(ids_with_extra(), labels=readable).loss)
    model = make(additional_vocab_in_head=True)
    outputs = model(ids_with_extra(), labels=labels)
    expected = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert torch.allclose(outputs.loss, expected)
    outputs.loss.backward()
    assert model.get_output_embeddings().additional.weight.grad.abs().max() > 0
    assert model.get_input_embeddings().additional.weight.grad.abs().max() > 0


@torch.no_grad()
def test_generates_added_tokens():
    """Added tokens that can be written but not read again."""
    model = make(additional_vocab_in_head=True)
    model.get_output_embeddings().additional.weight.fill_(0)
    model.get_output_embeddings().additional.weight[1] = 50 * model.get_output_embeddings().weight[7]
    options = {"max_new_tokens": 8, "do_sample": False, "pixel_values": pixels()}
    cached, uncached = (model.generate(ids_with_extra(), use_cache=use_cache, **options) for use_cache in (True, False))
    assert torch.equal(cached, uncached)
    assert (cached[:, 7:] == VOCAB_SIZE + 1).any()


def test_wrong_sizes_are_refused():
    """Negative sizes, a marker that no table holds, a resize that would move the added ids."""
    text = make_text().config
    for fields, message in (
        ({"additional_vocab_size": -1}, "additional_vocab_size"),
        ({"additional_vocab_size": True}, "additional_vocab_size"),
        ({"additional_vocab_size": 2, "image_token_id": VOCAB_SIZE + 2}, f"{VOCAB_SIZE + 2} entries"),
    ):
        with pytest.raises((ValueError, StrictDataclassError), match=message):
            XAttnConfig(text_config=text, **fields)
    assert XAttnConfig(text_config=text, additional_vocab_size=2, image_token_id=VOCAB_SIZE + 1)
    with pytest.raises(ValueError, match="cannot be resized"):
        make().resize_token_embeddings(200)
