"""Checkpoints that several processes write together (`distributed_checkpoint=True`): read back, mixed with others, and
saved over others.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from helpers.models.saved_models import same_model
from helpers.models.tiny_models import make_model
from helpers.processes.warm_processes import run_ranks
from hf_xattn.utils.transformers_api import has


def rank_file(number):
    return f"shard-{number:05}-model-00001-of-00001.safetensors"


def split(folder, ranks):
    """Divides the rows of the weights in a folder into the files that so many ranks write."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for rank in range(ranks):
        parts, offsets = {}, {}
        for name, weight in weights.items():
            rows = weight.shape[0] // ranks if weight.shape[0] % ranks == 0 else weight.shape[0]
            if rank * rows < weight.shape[0]:
                parts[name] = weight[rank * rows : (rank + 1) * rows].clone()
                offsets[name] = {"saved_offsets": [rank * rows] + [0] * (weight.dim() - 1)}
        metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
        save_file(parts, folder / rank_file(rank + 1), metadata)


def test_parts_that_ranks_wrote_load_as_one_model(tmp_path):
    """A checkpoint that is refused because each rank holds a part of every tensor; parts of two checkpoints, or of
    half a one.
    """
    load = AutoModelForImageTextToText.from_pretrained
    model, folder = make_model(), tmp_path / "model"
    model.save_pretrained(folder)
    shutil.copytree(folder, tmp_path / "four")
    split(folder, 2)
    split(tmp_path / "four", 4)
    if not has("parts of ranks"):
        with pytest.raises(ValueError, match="several ranks wrote together.* needs transformers 5.20.0 or newer"):
            load(folder)
        return
    same_model(model, load(folder))
    shutil.copy(tmp_path / "four" / rank_file(4), folder)
    with pytest.raises(ValueError, match="is not one checkpoint: the files of its ranks hold .* an older save"):
        load(folder)
    (folder / rank_file(4)).unlink()
    (folder / rank_file(1)).rename(tmp_path / "first")
    with pytest.raises(ValueError, match="is not one checkpoint: .*A file is missing"):
        load(folder)
    (tmp_path / "first").rename(folder / rank_file(1))
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="holds weights twice, in shard-00001-.* and in model.safetensors"):
        load(folder)


def test_a_save_over_parts_of_ranks(tmp_path):
    """Weights of an earlier run, which transformers reads beside the new ones."""
    for name in ("ranks", "new"):
        make_model().save_pretrained(tmp_path / name)
    split(tmp_path / "ranks", 2)
    (tmp_path / "ranks" / "shard-of-mine.safetensors").write_text("mine")
    newer = make_model()
    newer.blocks[0].attn.q_proj.weight.data.add_(1)
    newer.save_pretrained(tmp_path / "ranks")
    assert {path.name for path in (tmp_path / "ranks").glob("*.safetensors")} == {
        "model.safetensors",
        "shard-of-mine.safetensors",
    }
    same_model(newer, AutoModelForImageTextToText.from_pretrained(tmp_path / "ranks"))


RANK = """
import os, sys
import torch
from transformers import AutoModelForImageTextToText
from transformers.distributed import DistributedConfig
import hf_xattn
torch.set_num_threads(1)
folder, over = sys.argv[1:]
size = {"distributed_config": DistributedConfig(tp_size=int(os.environ["WORLD_SIZE"]))}
model = AutoModelForImageTextToText.from_pretrained(folder, **size)
model.save_pretrained(over, distributed_checkpoint=True)
AutoModelForImageTextToText.from_pretrained(over, **size)
"""


@pytest.mark.slow
def test_two_ranks_save_over_other_weights(tmp_path):
    """A checkpoint of two ranks that cannot be loaded, or holds weights of the model that the folder held before."""
    model, other, folder = make_model(), make_model(), tmp_path / "over"
    model.save_pretrained(tmp_path / "model")
    other.save_pretrained(folder)
    split(folder, 4)
    (folder / "model.safetensors").write_bytes((tmp_path / "model" / "model.safetensors").read_bytes())
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    run_ranks(2, [script, tmp_path / "model", folder])
    assert {path.name for path in folder.glob("*.safetensors")} == {rank_file(1), rank_file(2)}
    same_model(model, AutoModelForImageTextToText.from_pretrained(folder))
