"""Batches of the collator with fewer images than rows (`share_images`), and without padding (`padding_free`)."""

import pytest
import torch
from transformers import Trainer
from transformers.utils import logging

from helpers.inputs.collator_rows import ANSWER, QUESTION, SHORT, row
from helpers.models.template_models import CHATML, make_chat_model, make_processor, picture
from helpers.processes.training_runs import sft_settings, short_arguments
from helpers.references.gradient_checks import outputs_and_gradients, without_dropout
from hf_xattn import XAttnDataCollator, freeze_base


def about(images, question=QUESTION, answer=ANSWER):
    return {**row(answer, question), "images": images}


FIRST, SECOND = picture(1), picture(2)
ROWS = [
    about([FIRST]),
    about([SECOND], "sure ?", "yes."),
    about([picture(1)], "what ?", "a blue square."),  # another object with the same picture
    SHORT,
    about([FIRST], "in the picture ?"),
    about([FIRST, SECOND]),
    about([SECOND, FIRST]),
]


@pytest.fixture(scope="module")
def processor():
    return make_processor(CHATML)


@pytest.fixture(scope="module")
def model(processor):
    return without_dropout(make_chat_model(processor, image_visibility="previous").double())


def same_training(model, found, expected):
    """Loss and gradients are equal."""
    (other, of_found), (whole, gradients) = (
        outputs_and_gradients(model, **found),
        outputs_and_gradients(model, **expected, use_cache=False),
    )
    assert torch.allclose(other.loss, whole.loss, atol=1e-12)
    assert of_found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(of_found[name], gradient, atol=1e-9), name


def test_rows_that_share_images_keep_their_own(processor, model):
    """Pictures that are taken for one another, or in another order; rows that lose their picture."""
    plain, shared = XAttnDataCollator(processor)(ROWS), XAttnDataCollator(processor, share_images=True)(ROWS)
    assert shared["image_rows"].tolist() == [0, 1, 0, -1, 0, 2, 3]
    assert shared["pixel_values"].shape[:2] == shared["image_mask"].shape == (4, 2)
    for name in ("input_ids", "attention_mask", "labels"):
        assert torch.equal(plain[name], shared[name])
    same_training(model, shared, plain)


@pytest.mark.parametrize("rows", [[SHORT, SHORT], [about([FIRST]), about([SECOND])]], ids=["no images", "all differ"])
def test_nothing_to_share(processor, rows):
    """A batch that changes although its rows have nothing in common."""
    plain, shared = XAttnDataCollator(processor)(rows), XAttnDataCollator(processor, share_images=True)(rows)
    assert plain.keys() == shared.keys()
    assert all(torch.equal(plain[name], shared[name]) for name in plain)


@pytest.mark.parametrize("multiple", [None, 16])
def test_a_padding_free_batch_keeps_samples_apart(processor, model, multiple):
    """A row of samples with the pictures of others, or labels at the seams."""
    plain = XAttnDataCollator(processor)(ROWS)
    flat = XAttnDataCollator(processor, padding_free=True, pad_to_multiple_of=multiple)(ROWS)
    length = flat["input_ids"].shape[1]
    assert length % (multiple or 1) == 0 and 0 <= length - int(plain["attention_mask"].sum()) < (multiple or 1)
    assert flat.keys() == {"input_ids", "position_ids", "labels", "pixel_values"}
    assert flat["pixel_values"].shape[:2] == (1, 8)
    assert (flat["labels"][flat["position_ids"] == 0] == -100).all()
    same_training(model, flat, plain)


def test_padding_free_text(processor, model):
    """A batch without images that gets an empty one."""
    flat = XAttnDataCollator(processor, padding_free=True)([SHORT, SHORT])
    assert flat.keys() == {"input_ids", "position_ids", "labels"}
    same_training(model, flat, XAttnDataCollator(processor)([SHORT, SHORT]))


@pytest.mark.parametrize("option", ["share_images", "padding_free"])
def test_trainer_learns_the_same_from_each_kind_of_batch(tmp_path, processor, option):
    """Batches that `Trainer` cuts, moves or counts in another way; other weights after some steps."""
    states = []
    for given in ({}, {option: True}):
        model = without_dropout(make_chat_model(processor, image_visibility="previous"))
        settings = short_arguments(
            tmp_path,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=2,
            optim="sgd",
            learning_rate=0.1,
            lr_scheduler_type="constant",
            remove_unused_columns=False,
            train_sampling_strategy="sequential",
        )
        collator = XAttnDataCollator(processor, **given)
        trainer = Trainer(model=model, args=settings, train_dataset=ROWS, eval_dataset=ROWS, data_collator=collator)
        trainer.train()
        states.append((model.state_dict(), trainer.evaluate()["eval_loss"]))
    (whole, loss), (other, other_loss) = states
    before = make_chat_model(processor, image_visibility="previous").state_dict()
    assert any(not torch.equal(before[name], whole[name]) for name in whole)
    for name, values in whole.items():
        torch.testing.assert_close(other[name], values, atol=2e-5, rtol=1e-4)
    if option == "share_images":
        # `Trainer` weighs the losses of evaluation by rows, and all samples without padding are one row.
        assert abs(loss - other_loss) < 1e-4


def test_the_sft_trainer_takes_padding_free_batches(tmp_path, processor):
    """TRL's trainer, which counts the tokens of a batch by its mask or its positions."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    rows = [{**given, "images": given.get("images") or [picture()]} for given in ROWS]
    trainer = trl.SFTTrainer(
        model=make_chat_model(processor, image_visibility="previous"),
        args=sft_settings(tmp_path, max_steps=1, per_device_train_batch_size=4),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=processor,
        data_collator=XAttnDataCollator(processor, padding_free=True),
    )
    assert trainer.train().training_loss > 0


def test_options_that_exclude_one_another(processor):
    """Options without an effect."""
    for given in ({"share_images": True}, {"padding_side": "left"}):
        with pytest.raises(ValueError, match=f"`padding_free` without `{next(iter(given))}`"):
            XAttnDataCollator(processor, padding_free=True, **given)
    with pytest.raises(ValueError, match="`image_token`"):
        XAttnDataCollator(make_processor(CHATML, marker=None), padding_free=True)


def test_rows_without_pictures_are_told(caplog):
    """A run that trains nothing, because the column of images was lost."""
    logging.enable_propagation()
    processor = make_processor(CHATML)
    model = make_chat_model(processor).train()
    freeze_base(model)
    model(**XAttnDataCollator(processor)([SHORT])).loss.backward()
    assert "No row of this batch has an image, so it trains nothing" in caplog.text
