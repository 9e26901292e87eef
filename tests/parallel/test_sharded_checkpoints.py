"""Checkpoints of sharded models: saved by two ranks and loaded by one and by three, weights that one rank reads, and
`Trainer`.
"""

import pytest
import torch
from transformers import AutoModel, AutoModelForImageTextToText

from helpers.checkout import HELPERS
from helpers.models.tiny_models import make_text, vision_config
from helpers.processes.warm_processes import run_ranks


RANKS = HELPERS / "processes" / "checkpoint_ranks.py"


def run(ranks, folder, what):
    run_ranks(ranks, [RANKS, folder, what])


def test_saved_by_two_ranks_and_loaded_by_others(tmp_path):
    """A checkpoint that only the same number of ranks can read, or that loses the optimizer's moments."""
    run(2, tmp_path, "save")
    expected = torch.load(tmp_path / "expected.pt")
    for ranks in (1, 3):
        run(ranks, tmp_path, "load")
        found = torch.load(tmp_path / "found.pt")
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert found["weights"].keys() == expected["weights"].keys()
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_ranks_get_the_weights_of_the_first(tmp_path):
    """Ranks that go on with the connectors of their own random numbers, or a retrofit that waits for
    the other ranks.
    """
    make_text().save_pretrained(tmp_path / "text")
    torch.manual_seed(7)
    AutoModel.from_config(vision_config()).save_pretrained(tmp_path / "vision")
    run(2, tmp_path, "load once")
    first, second = (torch.load(tmp_path / f"found-{rank}.pt") for rank in range(2))
    connector = next(name for name in first["read"] if "connector" in name)
    assert not torch.equal(second["read"][connector], first["read"][connector])
    assert first["whole"].keys() == first["read"].keys()
    for name, weight in first["whole"].items():
        assert torch.equal(weight, first["read"][name]), name


@pytest.mark.slow
def test_trainer_under_fsdp2_has_the_weights_of_one_process(tmp_path):
    """`Trainer` under FSDP2: other weights than in one process, or a saved folder with half of them."""
    run(1, tmp_path, "train")
    run(2, tmp_path, "train")
    one, ranks = (AutoModelForImageTextToText.from_pretrained(tmp_path / name) for name in ("one", "ranks"))
    for (name, weight), other in zip(one.state_dict().items(), ranks.state_dict().values(), strict=True):
        torch.testing.assert_close(other, weight, rtol=1e-4, atol=1e-5, msg=name)
