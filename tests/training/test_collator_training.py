"""What trains with the collator: a loader with workers, `Trainer`, TRL's `SFTTrainer`."""

import pickle

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import set_seed

from helpers.inputs.collator_rows import ANSWER, QUESTION, SHORT, row
from helpers.models.template_models import CHATML, GENERATION, make_chat_model, make_processor, picture
from helpers.processes.training_runs import sft_settings, short_arguments
from hf_xattn import XAttnDataCollator
from hf_xattn.utils.transformers_api import is_before


ROWS = [
    {**row(answer, question), "images": [picture(index)] * (index % 3)}
    for index, (question, answer) in enumerate(
        [(QUESTION, ANSWER), ("hi", "hello"), ("sure ?", "yes, yes, yes."), ("what ?", "no")]
    )
]


def test_the_collator_reaches_the_workers_of_a_loader():
    """A collator that does not reach the workers of a `DataLoader`."""
    processor = make_processor(CHATML)
    model = make_chat_model(processor)
    batches = list(DataLoader(ROWS, batch_size=2, collate_fn=XAttnDataCollator(processor), num_workers=2))
    here = [XAttnDataCollator(processor)(ROWS[start : start + 2]) for start in (0, 2)]
    for batch, expected in zip(batches, here, strict=True):
        assert all(torch.equal(batch[name], expected[name]) for name in expected)
        model(**batch).loss.backward()
    again = pickle.loads(pickle.dumps(XAttnDataCollator(processor)))(ROWS[:2])
    assert all(torch.equal(again[name], here[0][name]) for name in again)


def trained(folder, batch_size, accumulation):
    processor = make_processor(CHATML)
    model = make_chat_model(processor)
    settings = short_arguments(
        folder,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        max_steps=2,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        remove_unused_columns=False,
    )
    trainer = Trainer(
        model=model,
        args=settings,
        train_dataset=ROWS,
        data_collator=XAttnDataCollator(processor),
        processing_class=processor,
    )
    trainer.train()
    return model


def test_trainer_with_accumulation(tmp_path):
    """Answers that weigh more where their micro-batch has fewer of them."""
    whole, parts = trained(tmp_path, 4, 1).state_dict(), trained(tmp_path, 1, 4).state_dict()
    before = make_chat_model(make_processor(CHATML)).state_dict()
    assert any(not torch.equal(before[name], whole[name]) for name in whole)
    for name, values in whole.items():
        torch.testing.assert_close(parts[name], values, atol=2e-5, rtol=1e-4)


def test_trainer_that_removes_columns(tmp_path):
    """A default of `Trainer` that takes the messages away, and an error that does not say so."""
    processor = make_processor(CHATML)
    trainer = Trainer(
        model=make_chat_model(processor),
        args=short_arguments(tmp_path, max_steps=1),
        train_dataset=ROWS,
        data_collator=XAttnDataCollator(processor),
    )
    with pytest.raises(ValueError, match="remove_unused_columns=False"):
        trainer.train()


def sft(folder, dataset, **given):
    trl = pytest.importorskip("trl")
    processor = make_processor(given.pop("template", CHATML))
    model = make_chat_model(processor)
    collator = XAttnDataCollator(processor) if given.pop("ours", False) else None
    config = sft_settings(folder, max_steps=2, per_device_train_batch_size=2, learning_rate=1e-2, **given)
    set_seed(0)
    trainer = trl.SFTTrainer(
        model=model, args=config, train_dataset=dataset, processing_class=processor, data_collator=collator
    )
    before = {name: values.clone() for name, values in model.state_dict().items()}
    loss = trainer.train().training_loss
    assert loss == loss and any(not torch.equal(before[name], values) for name, values in model.state_dict().items())
    return trainer


def dataset():
    datasets = pytest.importorskip("datasets")
    rows = [{**given, "images": given["images"] or [picture()]} for given in ROWS]
    return datasets.Dataset.from_list(rows)


def test_sft_trainer_with_our_collator(tmp_path):
    """TRL's trainer, which hands other rows to a collator than `Trainer` does."""
    pytest.importorskip("trl")
    trainer = sft(tmp_path, dataset(), ours=True)
    batch = next(iter(trainer.get_train_dataloader()))
    assert "pixel_values" in batch and (batch["labels"] != -100).any()


def test_sft_trainer_on_text_alone(tmp_path):
    """TRL's trainer, which makes tokens of rows without images before a collator sees them, and an error that names no
    remedy.
    """
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("trl")
    text = datasets.Dataset.from_list([SHORT] * 4)
    with pytest.raises(ValueError, match="skip_prepare_dataset"):
        sft(tmp_path, text, ours=True)
    sft(tmp_path, text, ours=True, dataset_kwargs={"skip_prepare_dataset": True}, remove_unused_columns=False)


OF_ANSWERS = pytest.mark.skipif(is_before("5.18.0"), reason="TRL refuses `assistant_only_loss` before 5.18")


@pytest.mark.parametrize("only_answers", [False, pytest.param(True, marks=OF_ANSWERS)])
def test_sft_trainer_with_its_own_collator(tmp_path, only_answers):
    """A processor that TRL's collator of images and texts cannot call; and its labels of answers, which are ours."""
    pytest.importorskip("trl")
    template = GENERATION if only_answers else CHATML
    trainer = sft(tmp_path, dataset(), assistant_only_loss=only_answers, template=template, max_length=None)
    rows = [dict(given) for given in trainer.train_dataset]
    theirs = trainer.data_collator([dict(given) for given in rows])
    processor = trainer.processing_class
    ours = XAttnDataCollator(processor, train_on="answers" if only_answers else "all", padding_side="right")(rows)
    assert torch.equal(ours["input_ids"], theirs["input_ids"]) and torch.equal(
        ours["pixel_values"], theirs["pixel_values"]
    )
    masked = trainer.model.mask_labels(theirs["labels"])
    assert torch.equal(ours["labels"], masked)


def test_sft_trainer_with_prompts_and_completions(tmp_path):
    """TRL's prompts and completions, with its collator and with ours."""
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("trl")
    rows = [
        {"prompt": given["messages"][:1], "completion": given["messages"][1:], "images": given["images"] or [picture()]}
        for given in ROWS
    ]
    for ours in (True, False):
        sft(tmp_path, datasets.Dataset.from_list(rows), ours=ours)
