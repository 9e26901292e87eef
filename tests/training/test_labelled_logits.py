"""The trainer of `hf-xattn train` computes logits where a label needs them. Loss and gradients stay those of all."""

import pytest
import torch
from transformers import Trainer

from helpers.models.tiny_decoders import CONTEXT_SIZE, SERVED, make_tiny, retrofitted
from helpers.models.tiny_models import randomize
from helpers.processes.training_runs import short_arguments
from hf_xattn import freeze
from hf_xattn.training.trainer import RunTrainer


ITEMS = torch.tensor(7)  # labels in all batches of a step
PLACES = [2, 4, 5]  # positions that predict a label in one of the rows


def inputs():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 90, (2, 8), generator=generator)
    labels = torch.full_like(ids, -100)
    labels[0, [3, 6]], labels[1, [0, 5]] = ids[0, [3, 6]], ids[1, [0, 5]]  # nothing predicts the first token
    states = torch.randn(2, 5, CONTEXT_SIZE, generator=generator)
    return {"input_ids": ids, "cross_attention_states": states, "labels": labels}


def losses(model, folder, given=ITEMS, n_gpu=None):
    """Loss and gradients of a batch, of transformers' trainer and of ours, and the positions of our logits."""
    heads = []
    model.get_output_embeddings().register_forward_hook(lambda module, args, output: heads.append(output.shape[-2]))
    computed = []
    for kind in (Trainer, RunTrainer):
        arguments = short_arguments(folder)
        arguments._n_gpu = arguments.n_gpu if n_gpu is None else n_gpu
        trainer = kind(model=model, args=arguments)
        loss = trainer.compute_loss(model, inputs(), num_items_in_batch=given)
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        computed.append((loss, dict(zip(trained, torch.autograd.grad(loss, list(trained.values()))))))
    return *computed, heads


# Heads of every kind: plain, scaled, capped, with a bias, behind experts, states, and layers that fetch images.
FEW = {"llama", "gemma2", "cohere", "gptj", "gpt2", "bloom", "mixtral", "mamba2", "jamba", "granite", "opt", "codegen"}


@pytest.mark.parametrize(
    "model_type", [each if each in FEW else pytest.param(each, marks=pytest.mark.slow) for each in SERVED]
)
def test_loss_and_gradients(model_type, tmp_path):
    """A decoder that keeps other positions than it is asked for, or whose loss reads other labels."""
    model = freeze(randomize(retrofitted(make_tiny(model_type)))).train()
    (all_loss, all_grads), (loss, grads), heads = losses(model, tmp_path)
    torch.testing.assert_close(loss, all_loss, rtol=1e-5, atol=1e-6)
    for name, gradient in grads.items():
        torch.testing.assert_close(gradient, all_grads[name], rtol=1e-3, atol=1e-5)
    assert heads == [8, len(PLACES)] or not heads  # a head that is no module of its own


def test_mean_without_a_count(tmp_path):
    """The mean of a batch, which `Trainer` takes where it counts no labels."""
    model = freeze(randomize(retrofitted(make_tiny("llama")))).train()
    (all_loss, _), (loss, _), heads = losses(model, tmp_path, given=None)
    torch.testing.assert_close(loss, all_loss)
    assert heads == [8, len(PLACES)]


def test_several_gpus_of_a_process(tmp_path):
    """Positions that are divided among the GPUs of a process like rows."""
    model = freeze(randomize(retrofitted(make_tiny("llama")))).train()
    *_, heads = losses(model, tmp_path, n_gpu=2)
    assert heads == [8, 8]
