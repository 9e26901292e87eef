"""Two processes over gloo."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from helpers.models.tiny_decoders import CONTEXT_SIZE, make_tiny, retrofitted
from helpers.models.tiny_models import randomize
from helpers.processes.two_processes import WORLD_SIZE, leave
from helpers.processes.warm_processes import spawn
from helpers.references.gradient_checks import without_dropout


def _batch(rank):
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(4, 90, (2, 6 + rank), generator=generator)
    return ids, torch.randn(2, 5, CONTEXT_SIZE, generator=generator)


def _model(model_type):
    return without_dropout(randomize(retrofitted(make_tiny(model_type))))


def _gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def _work(rank, model_type, checkpointing, images_on, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=WORLD_SIZE)
    model = _model(model_type)
    if checkpointing:
        model.gradient_checkpointing_enable()
    wrapped = DistributedDataParallel(model)
    ids, states = _batch(rank)
    wrapped(input_ids=ids, cross_attention_states=states if rank in images_on else None, labels=ids).loss.backward()
    torch.save(_gradients(model), f"{folder}/gradients-{rank}.pt")
    leave(rank, folder)


@pytest.mark.parametrize(
    "model_type, checkpointing, images_on",
    [
        ("llama", True, (0,)),
        ("bloom", False, (0,)),
        pytest.param("llama", False, (0, 1), marks=pytest.mark.slow),
        pytest.param("bloom", True, (0, 1), marks=pytest.mark.slow),
    ],
)
def test_data_parallel(model_type, checkpointing, images_on, tmp_path):
    """Images lost in DDP's wrapper, or a process without images that waits for ever for the gradients of its blocks."""
    spawn(_work, model_type, checkpointing, images_on, str(tmp_path), count=WORLD_SIZE)
    first, second = (torch.load(tmp_path / f"gradients-{rank}.pt") for rank in range(WORLD_SIZE))
    expected: dict[str, torch.Tensor] = {}
    for rank in range(WORLD_SIZE):
        model = _model(model_type)
        ids, states = _batch(rank)
        model(input_ids=ids, cross_attention_states=states if rank in images_on else None, labels=ids).loss.backward()
        for name, gradient in _gradients(model).items():
            expected[name] = expected.get(name, 0) + gradient / WORLD_SIZE
    assert first.keys() == second.keys() == expected.keys()
    assert any("cross_attention_block" in name and gradient.abs().max() > 0 for name, gradient in first.items())
    for name, gradient in expected.items():
        assert torch.equal(first[name], second[name])
        assert torch.allclose(first[name], gradient, atol=1e-6), name
