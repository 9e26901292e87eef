"""What transformers' generation tests ask of every model that generates, on every kind of base, with a vision tower
and without.
"""

import pytest
import torch

from helpers.models.expectation_models import BASES, KINDS, base_of, build, images_for, inputs_for
from helpers.models.tiny_models import token_ids
from hf_xattn.utils.transformers_api import CACHE


NEW = 5
METHODS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20},
    "return_sequences": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"do_sample": False, "num_beams": 3},
    "beams_returned": {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
    "beams_sampled": {"do_sample": True, "num_beams": 3},
    "chunked": {"do_sample": False, "prefill_chunk_size": 4},
}
CACHES = {"dynamic": {}, "static": {"cache_implementation": "static"}}
on_every_kind = pytest.mark.parametrize(("base", "tower"), KINDS)


def generate(model, inputs, new=NEW, **options):
    torch.manual_seed(7)
    return model.generate(**inputs, max_new_tokens=new, pad_token_id=0, **options)


# tests/model/test_generation.py has dense and sliding bases with a tower.
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("base", "tower"),
    [kind for kind in KINDS if kind[0] in ("hybrid", "experts") or kind[1] == "none"],
)
def test_each_method_gives_the_same_tokens_with_a_cache(base, tower, method):
    """A decoding method that gives another answer with a cache than without one."""
    model, given = build(base, tower), inputs_for(tower)
    options = METHODS[method]
    expected = generate(
        model, given, use_cache=False, **{k: v for k, v in options.items() if k != "prefill_chunk_size"}
    )
    for name, cache in CACHES.items():
        assert torch.equal(generate(model, given, **options, **cache), expected), name
    if method == "greedy":
        ids = given["input_ids"]
        assert not torch.equal(generate(model, {"input_ids": ids}, do_sample=False), expected), "images matter"
        with torch.no_grad():
            for _ in range(NEW):
                last = model(**{**given, "input_ids": ids}, use_cache=False, logits_to_keep=1).logits[:, -1]
                ids = torch.cat([ids, last.argmax(-1, keepdim=True)], dim=1)
        assert torch.equal(ids, expected)


@on_every_kind
def test_rejected_candidates_change_no_token(base, tower):
    """Candidates of the prompt or of an assistant that change the answer; a decoder with a state that takes them back;
    a class that promises so for all decoders, which transformers' tests ask.
    """
    model = build(base, tower)
    assert type(model)._is_stateful and model._is_stateful == (base == "hybrid")
    given = {"input_ids": token_ids(1, 4).repeat(1, 3), **images_for(tower, 1)}
    assistant = base_of(base)
    assistant.generation_config.num_assistant_tokens = 3
    for options in ({"prompt_lookup_num_tokens": 2}, {"assistant_model": assistant}):
        if base == "hybrid":
            with pytest.raises(ValueError, match="stateful"):
                generate(model, given, do_sample=False, **options)
            continue
        expected = generate(model, given, do_sample=False)
        assert torch.equal(generate(model, given, do_sample=False, **options), expected)


@on_every_kind
@pytest.mark.parametrize("method", ["greedy", "beams"])
def test_outputs_of_the_steps_have_their_shapes(base, tower, method):
    """Scores, hidden states or attentions of the steps that are missing, or of other rows and lengths."""
    model, given = build(base, tower), inputs_for(tower)
    model.set_attn_implementation("eager")
    names = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")
    asked = dict.fromkeys(names, True)
    outputs = generate(model, given, return_dict_in_generate=True, **METHODS[method], **asked)
    beams = METHODS[method].get("num_beams", 1)
    assert outputs.sequences.shape == (2, 9 + NEW)
    assert [tuple(each.shape) for each in outputs.scores] == [(2 * beams, 96)] * NEW
    assert [tuple(each.shape) for each in outputs.logits] == [(2 * beams, 96)] * NEW
    tokens = 16 if tower != "none" else 5
    for step, (hidden, own, cross) in enumerate(
        zip(outputs.hidden_states, outputs.attentions, outputs.cross_attentions, strict=True)
    ):
        length = 9 if step == 0 else 1
        assert [tuple(each.shape) for each in hidden] == [(2 * beams, length, 32)] * 5
        assert len(own) == (1 if base == "hybrid" else 4)
        assert all(each.shape[:3] == (2 * beams, 4, length) for each in own)
        assert [tuple(each.shape) for each in cross] == [(2 * beams, 4, length, tokens)] * 2
    model.set_attn_implementation("sdpa")
    assert torch.equal(generate(model, given, **METHODS[method]), outputs.sequences)


@on_every_kind
def test_an_answer_goes_on_from_its_cache(base, tower):
    """An answer that another `generate` continues from its cache, with ids or with embeddings, and that forgets the
    images.
    """
    model, given = build(base, tower), inputs_for(tower)
    whole = generate(model, given, do_sample=False)
    first = generate(model, given, new=2, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(first.sequences, whole[:, :11]) and first[CACHE].get_seq_length() == 10
    rest = generate(model, {"input_ids": first.sequences}, new=3, do_sample=False, cache=first[CACHE])
    assert torch.equal(rest, whole)
    images = {name: value for name, value in given.items() if name != "input_ids"}
    embeds = model.get_input_embeddings()(whole[:, :11]).detach()
    assert torch.equal(generate(model, {"inputs_embeds": embeds, **images}, new=3, do_sample=False), whole[:, 11:])


@on_every_kind
@pytest.mark.parametrize("cache", CACHES)
def test_embeddings_of_a_prompt_give_the_tokens_of_its_ids(base, tower, cache):
    """A prompt of embeddings whose answer differs from that to its ids, or whose images are not expanded
    to the beams.
    """
    model, given = build(base, tower), inputs_for(tower)
    options = CACHES[cache]
    embeds = {**given, "inputs_embeds": model.get_input_embeddings()(given["input_ids"]).detach()}
    alone = {name: value for name, value in embeds.items() if name != "input_ids"}
    for method in ("greedy", "beams"):
        expected = generate(model, given, **METHODS[method], **options)
        assert torch.equal(generate(model, alone, **METHODS[method], **options), expected[:, 9:])
        assert torch.equal(generate(model, embeds, **METHODS[method], **options), expected)


@on_every_kind
def test_left_padding_and_positions(base, tower):
    """A row whose answer depends on the padding before it, or on positions that are given instead of counted."""
    model, given = build(base, tower), inputs_for(tower)
    expected = generate(model, given, do_sample=False)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), given["input_ids"]], dim=1)
    mask = (torch.arange(12) >= 3).long().expand(2, -1)
    inputs = {**given, "input_ids": padded, "attention_mask": mask}
    for options in CACHES.values():
        assert torch.equal(generate(model, inputs, do_sample=False, **options)[:, 3:], expected)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    assert torch.equal(generate(model, {**inputs, "position_ids": positions}, do_sample=False)[:, 3:], expected)


@torch.no_grad()
@pytest.mark.parametrize("base", BASES)
def test_kept_logits_are_those_of_the_positions_asked_for(base):
    """Logits of other positions than those that are asked for."""
    model, given = build(base, "siglip"), inputs_for("siglip")
    logits = model(**given).logits
    for kept, expected in (
        (0, logits),
        (1, logits[:, -1:]),
        (3, logits[:, -3:]),
        (torch.tensor([1, 4]), logits[:, [1, 4]]),
    ):
        assert torch.allclose(model(**given, logits_to_keep=kept).logits, expected, atol=1e-6)
