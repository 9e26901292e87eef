"""Tensor parallelism: blocks split over real ranks, each a process of `torchrun`."""

import json

import pytest
import torch
from transformers import AutoModel, AutoModelForImageTextToText
from transformers.cache_utils import DynamicCache

from helpers.checkout import HELPERS
from helpers.models.own_parts import TURNING  # registers the parts
from helpers.models.tiny_models import make_text, needs_part, pixels, randomize, vision_config
from helpers.processes.warm_processes import run_ranks
from helpers.references.gradient_checks import without_dropout
from hf_xattn import CrossAttentionConfig, retrofit
from hf_xattn.learning.sharding import block_plan


pytestmark = needs_part("_resolve_parallel_plans")
RANKS = HELPERS / "processes" / "tensor_parallel_ranks.py"
CASES = {
    "split": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "qk_norm": True,
        "attention_bias": True,
        "context_norm": True,
    },
    "auto": {"num_attention_heads": 4, "num_key_value_heads": 4, "quiet_softmax": True},
    "shared": {"num_attention_heads": 4, "num_key_value_heads": 1, "qk_norm": True, "context_norm": True},
    "no MLP": {"num_attention_heads": 4, "num_key_value_heads": 2, "mlp_type": "none"},
    "whole": {"num_attention_heads": 3, "num_key_value_heads": 1, "mlp_type": "plain"},
    "gpt2": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "biased": {"num_attention_heads": 4, "num_key_value_heads": 2, "position_bias": True},
    "several blocks": {"num_attention_heads": 4, "num_key_value_heads": 2, "qk_norm": True},
    "own parts": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "gate": "offset_sigmoid",
        "position": TURNING,
        "qk_norm": True,
    },
}
OTHERS = {
    "several blocks": {"cross_attention_layers": [1, 1, 4, 4]},  # by default every second layer
    "own parts": {"connector_type": "pooling", "connector_options": {"pool": 1}},
}


def make(folder, cross_attention, name="llama"):
    bases = folder.parents[1] / name
    if not bases.exists():
        make_text(name).save_pretrained(bases / "text")
        AutoModel.from_config(vision_config()).save_pretrained(bases / "vision")
    others = OTHERS.get(folder.name, {})
    model = randomize(retrofit(bases / "text", bases / "vision", every=2, cross_attention=cross_attention, **others))
    model.save_pretrained(folder)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 90, (2, 7), generator=generator)
    text, images = {"input_ids": ids, "labels": ids}, {"pixel_values": pixels()[:2]}
    mask = torch.rand(2, 7, 16, generator=generator) > 0.4
    mask[0, 2] = False  # a text token that sees nothing
    key = torch.randn(2, 1, model.config.cross_attention_config.context_size, generator=generator)
    expected = {"text": text, **images, "mask": mask, "key": key}
    with torch.no_grad():
        expected["logits"] = model(**text, **images).logits
        expected["masked"] = model(input_ids=ids, **images, cross_attention_mask=mask).logits
        expected["one key"] = model(input_ids=ids, cross_attention_states=key).logits
        small = model.encode_images(**images, cache_dtype="int8").fork(DynamicCache(config=model.config.text_config))
        expected["int8"] = model(input_ids=ids, cache=small).logits
    expected["tokens"] = model.generate(
        ids, attention_mask=torch.ones_like(ids), **images, max_new_tokens=6, do_sample=False
    )
    without_dropout(model)
    model(**text, **images).loss.backward()
    expected["gradients"] = {n: weight.grad for n, weight in model.named_parameters() if weight.grad is not None}
    torch.save(expected, folder / "expected.pt")


def run_cases(folder, ranks):
    run_ranks(ranks, [RANKS, folder])
    return {
        case.name: [json.loads((case / f"found-{rank}.json").read_text()) for rank in range(ranks)]
        for case in folder.iterdir()
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What two ranks found, for each case."""
    folder = tmp_path_factory.mktemp("split") / "cases"
    for name, cross_attention in CASES.items():
        make(folder / name, cross_attention, "gpt2" if name == "gpt2" else "llama")
    return folder, run_cases(folder, 2)


@pytest.mark.parametrize("case", CASES)
def test_ranks_compute_what_one_process_computes(case, found):
    """Heads beside the wrong keys, a sum over ranks that is missing or made twice, masks of other heads."""
    folder, of_rank = found
    for rank in of_rank[case]:
        assert max(rank["logits"], rank["masked"], rank["one key"], rank["added"], rank["int8"]) < 1e-5
        assert rank["generated"] and rank["from a cache"]
        assert rank["without gradient"] == [] and rank["gradients"] < 1e-3
    whole = AutoModelForImageTextToText.from_pretrained(folder / case)
    for saved in ("saved", "adapter"):
        again = AutoModelForImageTextToText.from_pretrained(folder / case / saved).state_dict()
        assert all(torch.equal(weight, again[name]) for name, weight in whole.state_dict().items())


@pytest.mark.parametrize(
    "case, heads, rows",
    [("split", 1, 16), ("auto", 2, 16), ("shared", 1, 16), ("whole", 1, None), ("several blocks", 1, 16)],
)
def test_a_rank_holds_its_heads(case, heads, rows, found):
    """A model that every rank holds whole."""
    for rank in found[1][case]:
        assert rank["cached heads"] == heads and rank["int8 heads"] == [heads] * 4
        if rows is not None:
            assert rank["rows of q_proj"] == rows


def test_what_a_rank_cannot_do(found):
    """A file with the heads of one rank, that another model loads as if they were all; maps of half the heads."""
    for rank in found[1]["split"]:
        assert "Expected `model` to hold its whole weights, got one that is split over ranks" in rank["saving images"]
        assert "that is split over 2 ranks" in rank["maps"]
    assert all(rank["loaded images"] for rank in found[1]["shared"])


def test_a_plan_splits_only_heads_that_no_two_ranks_share():
    """A head that two ranks share; a rule for a module that is not there."""

    def plan(ranks, **fields):
        return block_plan(CrossAttentionConfig(hidden_size=32, head_dim=8, **fields), ranks)

    assert plan(2, num_attention_heads=4, num_key_value_heads=2)["attn.k_proj"] == "colwise"
    shared = plan(4, num_attention_heads=8, num_key_value_heads=2)
    assert shared["attn.q_proj"] == "colwise" and "attn.k_proj" not in shared
    assert not any("attn" in name for name in plan(4, num_attention_heads=12, num_key_value_heads=6))
    assert not any("attn" in name for name in plan(3, num_attention_heads=4, num_key_value_heads=4))
    assert "attn.q_norm" not in shared and "mlp.gate_proj" in shared
    assert "mlp.gate_proj" not in plan(2, num_attention_heads=4, num_key_value_heads=4, mlp_type="plain")
    assert not any("mlp" in name for name in plan(2, num_attention_heads=4, num_key_value_heads=4, mlp_type="none"))


@pytest.mark.slow
def test_more_ranks_than_heads(tmp_path):
    """Four ranks and two K/V heads: the second rank's queries read the first head, the third rank's the second."""
    # GPT-2 has no plan: Llama's own cannot split two K/V heads over four ranks.
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
    make(tmp_path / "cases" / "shared", heads, "gpt2")
    for rank in run_cases(tmp_path / "cases", 4)["shared"]:
        assert max(rank["logits"], rank["masked"], rank["one key"]) < 1e-5 and rank["gradients"] < 1e-3
        assert rank["generated"] and rank["from a cache"] and rank["cached heads"] == 1
        assert "Expected `model` to hold its whole weights, got one that is split over ranks" in rank["saving images"]
