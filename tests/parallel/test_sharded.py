"""FSDP2 and DDP on two real ranks: losses, weights and tokens are those of one process. The ranks may bring different
images.
"""

import functools

import pytest
import torch

from helpers.checkout import HELPERS
from helpers.processes.sharded_ranks import CASES, STEPS, batch, build, evaluate, kinds_of
from helpers.processes.warm_processes import run_ranks


RANKS = HELPERS / "processes" / "sharded_ranks.py"


# More of what another case shows.
SLOW = {
    "several blocks at a place",
    "bfloat16, several blocks",
    "bfloat16, own parts",
    "bfloat16, one token",
    "ddp, tower outputs",
    "wrapper",
    "channel checkpointing",
    "accelerate",
    "accelerate wrapper",
    "fsdp, no images, frozen tower",
    "fsdp, features, frozen tower",
    "fsdp, encoded, trainable tower",
    "ddp, no images, frozen tower",
    "ddp, features, frozen tower",
    "ddp, features, trainable tower",
    "ddp, encoded, trainable tower",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What two ranks found for a case; they are asked about all quick ones at once, and about all slow ones."""

    @functools.cache
    def launch(slow):
        folder = tmp_path_factory.mktemp("sharded")
        run_ranks(2, [RANKS, folder, *(case for case in CASES if (case in SLOW) == slow)], timeout=900)
        return folder

    return lambda case: [torch.load(launch(case in SLOW) / f"{case} {rank}.pt") for rank in range(2)]


def reference(case):
    """One process that goes through the batches of both ranks."""
    decoder, frozen, _, images, options = CASES[case]
    kinds, accumulation = kinds_of(decoder, images), options.get("accumulation", 1)
    model = build(decoder, frozen, **options)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    losses = [[], []]
    for step in range(STEPS):
        for rank in range(2):
            for part in range(accumulation):
                loss = model(**batch(model, kinds, rank, step * accumulation + part)).loss / accumulation
                (loss / 2).backward()
                losses[rank].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    return losses, weights, [evaluate(model, model, kinds, rank) for rank in range(2)]


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in CASES])
def test_ranks_learn_what_one_process_learns(case, found):
    """A rank that waits for ever for a collective, a gradient that is lost or averaged wrongly, images that a wrapper
    drops.
    """
    losses, weights, evaluated = reference(case)
    results = found(case)
    half = "bfloat16" in case
    close = {"rtol": 2e-2, "atol": 2e-2} if half else {"rtol": 1e-4, "atol": 1e-5}
    for rank in range(2):
        result = results[rank]
        assert result["losses"] == pytest.approx(losses[rank], rel=1e-2 if half else 1e-5)
        assert result["evaluated"] == pytest.approx(evaluated[rank][0], rel=1e-2 if half else 1e-5)
        if not half:
            assert all(map(torch.equal, result["tokens"], evaluated[rank][1]))
        if result["weights"]:  # the whole weights are in the first process alone
            assert result["weights"].keys() == weights.keys()
            for name, weight in weights.items():
                torch.testing.assert_close(result["weights"][name], weight, **close, msg=name)
    assert results[0]["weights"]
