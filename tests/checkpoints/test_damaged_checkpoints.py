"""Checkpoints of strangers and of bad disks: refused, or the model that was saved, and nothing else."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from helpers.checkout import TESTS
from helpers.inputs import damaged_checkpoints as damaged
from helpers.inputs.damaged_checkpoints import REFUSED, SAME, fresh, mark_of
from helpers.models.tiny_decoders import make_tiny
from helpers.models.tiny_models import make_model
from hf_xattn import XAttnForConditionalGeneration, retrofit


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One checkpoint in one file and in shards, its weights, and a file in another folder."""
    folder, model = tmp_path_factory.mktemp("damaged"), make_model()
    model.save_pretrained(folder / "whole")
    model.save_pretrained(folder / "shards", max_shard_size="100KB")
    outside = folder / "outside" / "model.safetensors"
    outside.parent.mkdir()
    outside.write_bytes((folder / "whole" / "model.safetensors").read_bytes())
    return folder, {name: tensor.clone() for name, tensor in model.state_dict().items()}, outside


def outcome(load, folder, weights):
    """What comes of a folder: `REFUSED`, `SAME`, or what is wrong."""
    try:
        model = load(folder)
    except Exception:
        return REFUSED
    state = model.state_dict()
    same = state.keys() == weights.keys() and all(
        torch.equal(state[name], weights[name]) for name in weights if not state[name].is_meta
    )
    return SAME if same else "another model"


def check(cases, source, work, weights, load=XAttnForConditionalGeneration.from_pretrained):
    wrong = {}
    for case in cases:
        folder = fresh(source, work / "copy")
        case.change(folder)
        got = outcome(load, folder, weights)
        if got not in case.expected.split(", or "):
            wrong[case.name] = f"{got} instead of {case.expected}"
        if mark_of(folder).exists():
            wrong[case.name] = "its code was run"
            mark_of(folder).rmdir()
    assert not wrong, "\n".join(f"{name}: {why}" for name, why in wrong.items())


GROUPS = {
    "truncated": lambda source, outside: damaged.truncated(source, damaged.WEIGHTS, 20, seed=1),
    "flipped": lambda source, outside: damaged.flipped(source, 60, seed=2),
    "headers": lambda source, outside: damaged.headers(source),
    "configs": lambda source, outside: damaged.configs(source),
    "pickles": lambda source, outside: damaged.pickles(source),
    "code": lambda source, outside: damaged.code(source),
    "indexes": damaged.indexes,
}


def cases_of(group, saved):
    folder, _, outside = saved
    source = folder / ("shards" if group == "indexes" else "whole")
    return source, list(GROUPS[group](source, outside))


def test_there_are_many_cases(saved):
    """A generator that yields next to nothing, and a test that then passes."""
    names = [(group, case.name) for group in GROUPS for case in cases_of(group, saved)[1]]
    assert len(names) == len(set(names)) and len(names) >= 300


@pytest.mark.parametrize("group", GROUPS)
def test_checkpoints_are_refused_or_the_same(saved, tmp_path, group, caplog):
    """A checkpoint that gives another model than the one that was saved, or runs code."""
    source, cases = cases_of(group, saved)
    check(cases, source, tmp_path, saved[1])


@pytest.mark.parametrize("group", ["code", "pickles"])
def test_auto_classes_run_no_code(saved, tmp_path, group):
    """Code that runs because an Auto class, which reads `auto_map`, was asked."""
    source, cases = cases_of(group, saved)
    check(cases, source, tmp_path, saved[1], AutoModelForCausalLM.from_pretrained)


def test_memory_and_time_stay_bounded():
    """Sizes that are asked for before they are checked: a terabyte, or a loop that never ends."""
    result = subprocess.run(
        [sys.executable, "-m", "helpers.inputs.bounded_memory"], cwd=TESTS, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-3000:]


def test_settings_of_the_caller_hide_no_missing_weight(saved, tmp_path):
    """A block with random weights, because the caller changed a setting. Only one argument allows that."""
    folder = tmp_path / "model"
    shutil.copytree(saved[0] / "whole", folder)
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.text_model.model.layers.1.cross_attention_block.attn.q_proj.weight")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for settings in ({}, {"image_token_id": 5}):
        with pytest.raises(ValueError, match="is not complete: 1 weights.*layers.1.cross_attention_block.attn.q_proj"):
            XAttnForConditionalGeneration.from_pretrained(folder, **settings)
    settings = {"cross_attention_layers": [0, 1, 3]}
    with pytest.raises(ValueError, match="layers.0.cross_attention_block.attn.*`allow_missing_weights=True`"):
        XAttnForConditionalGeneration.from_pretrained(saved[0] / "whole", **settings)
    more = XAttnForConditionalGeneration.from_pretrained(saved[0] / "whole", allow_missing_weights=True, **settings)
    assert len(more.blocks) == 3


# Keys that nobody reads, and values that mean "none" or "all".
HARMLESS = {
    "num_parameters": 7_000_000_000,
    "total_size": 2**40,
    "train_batch_size": 2**22,
    "n_params": 7 * 10**9,
    "model_max_length": 10**30,
    "seed": 2**64 - 1,
    "num_logits_to_keep": -1,
    "d_ff": -1,
    "n_inner": -1,
}


@pytest.mark.parametrize("model_type", ["llama", "jamba", "gpt2"])
def test_keys_of_other_peoples_configurations(model_type, tmp_path):
    """A checkpoint that is refused because of a number that allocates nothing."""
    text = make_tiny(model_type)
    text.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps({**fields, **{name: value for name, value in HARMLESS.items() if name not in fields}}))
    retrofit(tmp_path, every=2).save_pretrained(tmp_path / "model")
    XAttnForConditionalGeneration.from_pretrained(tmp_path / "model")
