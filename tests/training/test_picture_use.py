"""A run says whether the model uses its pictures."""

import logging
import re

import pytest
import torch
from PIL import Image
from transformers import Trainer

from helpers.inputs.training_examples import COLOURS, write_examples
from helpers.models.template_models import make_chat_model, make_processor, picture, save_chat_model
from helpers.processes.command_runs import run_training
from helpers.processes.training_runs import short_arguments
from hf_xattn import PictureUseCallback, XAttnDataCollator
from hf_xattn.training.picture_use import picture_use


OPTIONS = ("--batch-size", "4", "--learning-rate", "0.01", "--align", "none")


def row(answer, *pictures):
    chat = [{"role": "user", "content": "what is it ?"}, {"role": "assistant", "content": answer}]
    return {"messages": chat, "images": list(pictures)}


def coloured():
    return [row(colour, Image.new("RGB", (32, 32), colour)) for colour in COLOURS]


def run(tmp_path, data, steps, **options):
    """A run of `Trainer` with the callback, of a model whose blocks are fresh."""
    processor = make_processor()
    model, collate = make_chat_model(processor, random=False), XAttnDataCollator(processor)
    callback = PictureUseCallback(data, collate, batch_size=4)
    options = {"learning_rate": 1e-2, "per_device_train_batch_size": 4, "remove_unused_columns": False, **options}
    arguments = short_arguments(tmp_path, max_steps=steps, **options)
    held_out = data if "eval_strategy" in options else None
    trainer = Trainer(
        model, arguments, data_collator=collate, train_dataset=data, eval_dataset=held_out, callbacks=[callback]
    )
    trainer.train()
    return trainer, callback.last


@pytest.fixture
def told(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    return lambda: [record.message for record in caplog.records if "its images" in record.message]


def test_a_run_that_learns_to_look(tmp_path, told):
    """A model that sees, and a warning that it does not; or losses that the log does not have."""
    trainer, last = run(tmp_path, coloured(), 60, eval_strategy="steps", eval_steps=30)
    assert last.uses and last.own < 0.1 < 1 < last.another and last.rows == 4
    logged = [entry for entry in trainer.state.log_history if "loss_with_another" in entry]
    assert [entry["step"] for entry in logged] == [30, 60]
    assert logged[-1]["loss_with_own_picture"] == last.own and logged[-1]["loss_with_another"] == last.another
    assert told() == [] and "uses its images: loss 0.0" in str(last)


def test_a_run_that_stays_blind(tmp_path, told):
    """A loss that falls, because answers are learned without a look at the picture, and nothing is said."""
    trainer, last = run(tmp_path, [row("red", picture(seed)) for seed in range(8)], 30)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses == [] or losses[-1] < 1
    assert not last.uses and last.rows == 8
    (warning,) = told()
    assert warning.startswith("The model does not use its images: loss 0.") and "learning rate" in warning


def test_chance_is_no_use(tmp_path):
    """A model that reads pictures in some way, and is praised for it: answers are no likelier beside their own."""
    processor = make_processor()
    model, collate = make_chat_model(processor), XAttnDataCollator(processor)
    found = picture_use(model, [row(COLOURS[seed % 4], picture(seed)) for seed in range(64)], collate)
    assert found.rows == 64 and found.own != found.another and not found.uses


@torch.no_grad()
def test_losses_compare_the_own_image_with_another(tmp_path):
    """Another mean than that of labels, a row without a picture that counts, or a picture of a row with others."""
    processor = make_processor()
    model, collate = make_chat_model(processor).train(), XAttnDataCollator(processor)
    one, two, three, four = (picture(seed) for seed in range(4))
    data = [
        row("a red circle.", one),
        row("yes."),
        row("a blue square.", two, three),
        row("no.", four),
        row("yes.", one),
    ]
    found = picture_use(model, data, collate, batch_size=5)
    assert model.training and found.rows == 3  # the one with two pictures finds no other
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    for index, other in ((0, four), (3, one), (4, four)):
        answer = data[index]["messages"][1]["content"]
        own, another = (collate([row(answer, shown)]) for shown in (data[index]["images"][0], other))
        labels = int((own["labels"] != -100).sum())
        sums += torch.tensor([model(**own).loss * labels, model(**another).loss * labels, labels], dtype=torch.float64)
    assert found.own == pytest.approx(float(sums[0] / sums[2]), rel=1e-4)
    assert found.another == pytest.approx(float(sums[1] / sums[2]), rel=1e-4)


def test_a_model_inside_the_wrapper_of_peft_is_measured_as_without_it():
    peft = pytest.importorskip("peft")
    processor = make_processor()
    model, collate = make_chat_model(processor), XAttnDataCollator(processor)
    bare = picture_use(model, coloured(), collate)
    lora = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=True)  # adds nothing before it is trained
    assert picture_use(peft.get_peft_model(model, lora), coloured(), collate) == bare


@pytest.mark.parametrize("data", [[], [row("yes.")] * 4, [row("yes.", picture(0))] * 4], ids=["none", "text", "same"])
def test_nothing_to_compare(data, tmp_path):
    """A verdict on rows that cannot give one."""
    processor = make_processor()
    assert picture_use(make_chat_model(processor), data, XAttnDataCollator(processor)) is None


def test_some_of_many_rows():
    """A run that reads all its rows again, or only the first ones."""
    processor = make_processor()
    data = [row(COLOURS[seed % 4], picture(seed)) for seed in range(20)]
    read = []

    class Counted(list):
        def __getitem__(self, index):
            read.append(index)
            return data[index]

    found = picture_use(make_chat_model(processor), Counted(data), XAttnDataCollator(processor), most_rows=5)
    assert read == [0, 4, 8, 12, 16] and found.rows == 5


def test_the_command_says_it(tmp_path, capsys):
    """A run of `hf-xattn train` that ends without a word about its pictures, or a card without it."""
    data = write_examples(tmp_path / "data", [{"file_name": f"{each}.png", "text": each} for each in COLOURS] * 2)
    save_chat_model(tmp_path / "model", random=False)
    model, out = tmp_path / "model", tmp_path / "out"
    status, said, error = run_training(capsys, model, "--data", data, "--output", out, "--steps", "60", *OPTIONS)
    assert status == 0, error
    (told,) = re.findall("The model uses its images: loss (.*) with them, (.*) with those of other rows", said)
    assert float(told[0]) < float(told[1]) - 0.1
    assert "with those of other rows (8 rows), which are trained on" in said, said
    card = (out / "README.md").read_text()
    own, another = (
        re.search(rf"loss of trained rows, with {of}[^0-9]*([0-9.]+)", card)[1] for of in ("their ", "the ")
    )
    assert f"{float(own):.2f}" == told[0] and f"{float(another):.2f}" == told[1]
