"""Training with transformers' own `Trainer`."""

import pytest
import torch
from transformers import AutoModel, ResNetConfig, Trainer, TrainingArguments

from helpers.inputs.collator_rows import LONG
from helpers.models.template_models import CHATML, make_chat_model, make_processor
from helpers.models.tiny_models import make_model, make_text, pixels, token_ids
from helpers.processes.training_runs import Pairs, arguments
from hf_xattn import XAttnDataCollator, XAttnForConditionalGeneration, freeze_base, retrofit
from hf_xattn.training.trainer import RunTrainer


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_trainer_moves_what_was_added_alone(tmp_path, gradient_checkpointing):
    """Columns that the Trainer drops, blocks that do not move, a base that does, a checkpoint that does not load."""
    model = freeze_base(make_model(random=False))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    trainer = Trainer(
        model,
        arguments(tmp_path, gradient_checkpointing=gradient_checkpointing),
        train_dataset=Pairs(),
        eval_dataset=Pairs(),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    for name, parameter in model.named_parameters():
        added = "cross_attention_block" in name or "connector" in name
        assert torch.equal(parameter, before[name]) != added, name
    assert trainer.evaluate()["eval_loss"] < losses[0]

    loaded = XAttnForConditionalGeneration.from_pretrained(tmp_path / "checkpoint-6").eval()
    batch = {"input_ids": token_ids(2, 6), "pixel_values": pixels(2)}
    with torch.no_grad():
        assert torch.allclose(loaded(**batch).logits, model.eval()(**batch).logits, atol=1e-5)


@pytest.mark.parametrize("name", ["mixtral", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_resumed_trainer_has_the_same_weights(name, tmp_path):
    """A run that goes on from a checkpoint with other weights or another optimizer state than it had, also where the
    experts of the trained text model have other names in a file than in memory.
    """
    prepare = freeze_base if name == "llama" else lambda model: model
    whole = prepare(make_model(name, random=False))
    Trainer(whole, arguments(tmp_path / "whole"), train_dataset=Pairs()).train()
    resumed = prepare(make_model(name, random=False))
    trainer = Trainer(resumed, arguments(tmp_path / "resumed"), train_dataset=Pairs())
    trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    for (name, one), other in zip(whole.named_parameters(), resumed.parameters()):
        assert torch.allclose(one, other, atol=1e-6), name


class MixedRows(Pairs):
    """Each second text comes without an image of its own, in a batch of its own."""

    def __getitem__(self, index):
        row = {"input_ids": self.ids[index], "labels": self.ids[index]}
        return row | ({"pixel_values": self.pixels[index]} if index % 2 else {})


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_mixed_rows_on_a_frozen_base(tmp_path, gradient_checkpointing):
    """A run that dies in the middle, at the first batch without images: its loss has no gradient."""
    model = freeze_base(make_model(random=False))
    before = [block.attn.o_proj.weight.clone() for block in model.blocks]
    options = {"per_device_train_batch_size": 1, "max_steps": 9, "save_steps": 9}
    trainer = Trainer(
        model,
        arguments(tmp_path, gradient_checkpointing=gradient_checkpointing, **options),
        train_dataset=MixedRows(),
    )
    assert trainer.train().global_step == 9
    assert all(not torch.equal(block.attn.o_proj.weight, weight) for block, weight in zip(model.blocks, before))


def test_a_frozen_tower_with_batch_norms(tmp_path):
    """Statistics of a frozen tower that follow the pictures of the run, and features that depend on the others of the
    batch.
    """
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    model = freeze_base(retrofit(make_text(), AutoModel.from_config(config)))
    before = {name: buffer.clone() for name, buffer in model.named_buffers() if "running" in name}
    Trainer(model, arguments(tmp_path, max_steps=3), train_dataset=Pairs()).train()
    assert before and all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers() if name in before)
    assert model.train().model.connector.training and not model.model.vision_tower.training
    freeze_base(model, vision=False).train()
    assert all(module.training for module in model.model.vision_tower.modules())


def trainer_arguments(folder, **options):
    fixed = {"report_to": "none", "use_cpu": True, "remove_unused_columns": False, "save_strategy": "no"}
    return TrainingArguments(str(folder), **{**fixed, **options})


def test_gates_do_not_decay(tmp_path):
    """Blocks that weight decay closes."""
    processor = make_processor(CHATML)
    model = make_chat_model(processor)
    freeze_base(model)
    trainer = RunTrainer(model=model, args=trainer_arguments(tmp_path, weight_decay=1.0), train_dataset=[LONG])
    names = {id(weight): name for name, weight in model.named_parameters()}
    groups = trainer.create_optimizer().param_groups
    decays = {names[id(weight)]: group["weight_decay"] for group in groups for weight in group["params"]}
    gates = {name for name in decays if name.endswith("_gate")}
    assert len(gates) == 2 * len(model.blocks) and not any(decays[name] for name in gates)
    assert all(decay for name, decay in decays.items() if name.endswith("_proj.weight"))


def test_noise_on_a_frozen_embedding(tmp_path):
    """NEFTune that does nothing, because the frozen embedding is in evaluation mode."""
    processor = make_processor(CHATML)
    model, losses = make_chat_model(processor), []
    freeze_base(model)
    for alpha in (None, 500.0):
        options = {"max_steps": 1, "learning_rate": 0.0, "logging_steps": 1, "neftune_noise_alpha": alpha}
        given = trainer_arguments(tmp_path, **options)
        trainer = Trainer(model, given, data_collator=XAttnDataCollator(processor), train_dataset=[LONG] * 4)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[0] != losses[1]
