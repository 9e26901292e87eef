"""Model cards of runs with an optimizer, a schedule or a best checkpoint of their own."""

import torch
from transformers import Trainer, TrainingArguments

import hf_xattn
from helpers.inputs.collator_rows import LONG, QUESTION
from helpers.models.template_models import CHATML, make_chat_model, make_processor, picture
from helpers.references.card_reading import card_of, rows_of
from hf_xattn.checkpoints.model_card import write_model_card


def arguments(folder, **options):
    return TrainingArguments(str(folder), report_to="none", use_cpu=True, remove_unused_columns=False, **options)


def facts_of(model, folder, trainer):
    model.save_pretrained(folder)
    write_model_card(model, folder, trainer)
    return rows_of(card_of(folder)[1])


def test_an_optimizer_of_ones_own(tmp_path):
    """A card with the rate, the optimizer and the decay of the arguments, which nothing used."""
    processor = make_processor(CHATML)
    model = make_chat_model(processor)
    hf_xattn.freeze_base(model)
    groups = hf_xattn.parameter_groups(model, {"blocks": 1e-3, "connector": 1e-2}, weight_decay=0.1)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    options = {"max_steps": 2, "save_strategy": "no"}
    own = {"optimizers": (torch.optim.SGD(groups), None), "data_collator": hf_xattn.XAttnDataCollator(processor)}
    trainer = Trainer(model, arguments(tmp_path / "run", **options), train_dataset=[LONG] * 4, **own)
    trainer.train()
    model.requires_grad_(False)
    facts = facts_of(model, tmp_path / "out", trainer)
    assert facts["optimizer"] == "SGD" and facts["learning rate"] == "0.001, 0.01, linear"
    assert facts["weight decay"] == "0.1" and facts["parameters trained"].startswith(f"{trained:,} of")


def test_the_card_gives_the_loss_of_the_saved_checkpoint(tmp_path):
    """The loss of the last step beside the weights of an earlier one."""
    processor = make_processor(CHATML)
    model = make_chat_model(processor)
    hf_xattn.freeze(model, text=False)
    pictured = [{"type": "image", "image": picture()}, {"type": "text", "text": QUESTION}]
    train, held_out = (
        [{"messages": [{"role": "user", "content": pictured}, {"role": "assistant", "content": word}]}] * 4
        for word in ("red", "grey")
    )
    options = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "learning_rate": 0.05}
    run = arguments(tmp_path / "run", load_best_model_at_end=True, logging_steps=1, **options)
    collator = hf_xattn.XAttnDataCollator(processor)
    trainer = Trainer(model, run, data_collator=collator, train_dataset=train, eval_dataset=held_out)
    trainer.train()
    losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    best = min(losses, key=losses.get)
    assert best < 6, "the run must overfit"
    facts = facts_of(model, tmp_path / "out", trainer)
    assert facts["evaluation loss"] == f"{losses[best]:.4f} (step {best})"
    assert facts["optimizer steps"] == f"{best}, the best of 6"
