"""Rows whose answers were trained in part, in spite of a mark, or behind a picture's name, without a word."""

import pytest
import torch
import torch.distributed
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, Trainer, TrainingArguments

from helpers.inputs.collator_rows import LONG, SHORT
from helpers.inputs.training_examples import write_examples
from helpers.models.template_models import CHATML, INST, make_chat_model, make_processor, picture
from hf_xattn import XAttnDataCollator, XAttnForConditionalGeneration, load_rows, sharding_units
from hf_xattn.data.rows import TRAINED, read_row
from hf_xattn.evaluation.questions import questions_of


USER = {"role": "user", "content": "how many ?"}


def labels_of(processor, row, **options):
    """The tokens that are trained, as a text."""
    labels = XAttnDataCollator(processor, **options)([row])["labels"][0]
    return processor.tokenizer.decode(labels[labels != -100])


@pytest.mark.parametrize("template", [INST, None])
def test_a_space_in_front_of_an_answer(template):
    """A space that is a token of its own, which the model never learns to write: it ends where it should answer."""
    processor = make_processor(template)
    if template is None:
        processor.tokenizer.chat_template = processor.chat_template = None
    for said in ("3", "a red circle."):
        row = {"messages": [USER, {"role": "assistant", "content": said}], "images": [picture()]}
        assert labels_of(processor, row).startswith(f" {said}")
    twice = [USER, {"role": "assistant", "content": "3"}, USER, {"role": "assistant", "content": "4"}]
    trained = labels_of(processor, {"messages": twice})
    assert trained.startswith(" 3") and " 4" in trained and "many" not in trained


def test_the_padding_of_a_row_moves_nothing():
    """A loss that depends on the other rows of the batch: a tokenizer that pads at the left, for `generate`."""
    processor = make_processor(CHATML, padding_side="left")
    model = make_chat_model(processor, text_class=GPT2Config).eval()
    torch.manual_seed(0)
    for weight in model.model.text_model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, 0, 0.2)
    collate = XAttnDataCollator(processor)
    with torch.no_grad():
        alone = model(**collate([SHORT])).loss
        batch = collate([SHORT, LONG])
        batch["labels"][1] = -100
        torch.testing.assert_close(model(**batch).loss, alone)
    assert batch["attention_mask"][0, 0] == 1 and batch["attention_mask"][0, -1] == 0
    assert XAttnDataCollator(processor, padding_side="left")([SHORT, LONG])["attention_mask"][0, 0] == 0


@pytest.mark.parametrize("mark", TRAINED)
def test_answers_that_are_not_to_be_trained(mark, tmp_path):
    """A bad answer of a conversation, marked as such, that the model learns."""
    processor = make_processor(CHATML)
    good, bad = ({"role": "assistant", "content": text, mark: value} for text, value in (("good", 1), ("bad", 0)))
    assert labels_of(processor, {"messages": [USER, bad, USER, good]}) == "good<|im_end|>"
    assert labels_of(processor, {"prompt": [USER, bad, USER], "completion": [good]}) == "good<|im_end|>"
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "bad", mark: False}]
    turns += [{"from": "human", "value": "a"}, {"from": "gpt", "value": "good", mark: True}]
    rows = load_rows(write_examples(tmp_path / "data", [{"conversations": turns}]))
    assert labels_of(processor, rows[0]) == "good<|im_end|>"
    with pytest.raises(ValueError, match="no assistant message to train on"):
        labels_of(processor, {"messages": [USER, bad]})
    with pytest.raises(ValueError, match="`weight` of 0 for `train_on='all'`"):
        labels_of(processor, {"messages": [USER, bad, USER, good]}, train_on="all")
    for message in ({**good, mark: 0.5}, {**good, mark: "no"}):
        with pytest.raises(ValueError, match=f"`{mark}` of .*to be 0 or 1"):
            labels_of(processor, {"messages": [USER, message]})


@pytest.mark.parametrize("marker", ["<image>", None])
def test_the_place_of_a_picture_in_a_text(marker):
    """`<image>` trained as letters, where the command line takes it as the place of a picture."""
    processor = make_processor(CHATML, marker=marker)
    said = {"role": "assistant", "content": "It is red."}
    collate, parts = XAttnDataCollator(processor), [{"type": "image"}, {"type": "text", "text": "what is it?"}]
    row = {"messages": [{"role": "user", "content": "<image>\nwhat is it?"}, said], "images": [picture()]}
    expected = collate([{**row, "messages": [{"role": "user", "content": parts}, said]}])
    made = collate([row])
    assert all(torch.equal(made[name], expected[name]) for name in expected)
    with pytest.raises(ValueError, match="an image for each of 2 image part"):
        collate([{**row, "messages": [{"role": "user", "content": "<image> and <image>?"}, said]}])


def test_words_around_a_picture_stay_apart():
    """`Image 1: <image>\nImage 2: <image>`, of which a model without an image token read `Image 1:Image 2:`."""
    said = {"role": "assistant", "content": "It is red."}

    def parts_of(text, count):
        row = {"messages": [{"role": "user", "content": text}, said], "images": [picture()] * count}
        return [part.get("text") for part in read_row(row).messages[0]["content"]]

    assert parts_of("is <image> larger than <image> ?", 2) == ["is ", None, " larger than ", None, " ?"]
    assert parts_of("1: <image>\n2: <image>\nWhich?", 2) == ["1: ", None, "\n2: ", None, "\nWhich?"]
    assert parts_of("<image>\n<image>\n what?", 2) == [None, None, "what?"]
    assert parts_of(" what? \n<image> ", 1) == [" what?", None]
    listed = [{"type": "text", "text": "see <image> what?"}]
    assert parts_of(listed, 1) == ["see ", None, " what?"]
    row = {"messages": [{"role": "user", "content": "is <image> larger?"}, said], "images": [picture()]}
    for marker, expected in (("<image>", "is <image> larger?"), (None, "is  larger?")):
        processor = make_processor(CHATML, marker=marker)
        assert expected in processor.tokenizer.decode(XAttnDataCollator(processor)([row])["input_ids"][0])


@pytest.mark.parametrize("content", ["<image>\nwhat?", [{"type": "text", "text": "see <image> what?"}]])
def test_a_picture_that_is_not_there(content):
    """A marker trained as letters, in rows of Python whose picture was forgotten."""
    row = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "It is red."}]}
    for read in (XAttnDataCollator(make_processor(CHATML)), questions_of):
        with pytest.raises(ValueError, match="a text holds '<image>'.*no picture for it"):
            read([row])


def test_columns_that_the_model_would_not_see():
    """Functions, a video or a call, left out of the prompt or of the answer."""
    processor = make_processor(CHATML)
    said = {"role": "assistant", "content": "yes"}
    for name, value in (("functions", [{"name": "f"}]), ("videos", ["a.mp4"]), ("video", ["a.mp4"])):
        with pytest.raises(ValueError, match=f"without the column `{name}`"):
            labels_of(processor, {"messages": [USER, said], name: value})
        assert labels_of(processor, {"messages": [USER, said], name: []}) == "yes<|im_end|>"
    with pytest.raises(ValueError, match="`function_call`"):
        labels_of(processor, {"messages": [USER, {**said, "function_call": {"name": "f", "arguments": "{}"}}]})


@pytest.fixture
def mesh(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


class OfAUser(XAttnForConditionalGeneration):
    pass


@pytest.mark.parametrize("kind", ["sharded", "derived"])
def test_label_smoothing_of_a_class_of_another_name(kind, mesh, tmp_path):
    """Labels that are not shifted: each token learns to predict itself."""
    processor = make_processor(CHATML)
    model = make_chat_model(processor).eval()
    batch = XAttnDataCollator(processor)([SHORT])
    expected = model(**batch).loss
    options = {"label_smoothing_factor": 1e-9, "use_cpu": True, "report_to": "none", "remove_unused_columns": False}
    trainer = Trainer(model, TrainingArguments(str(tmp_path / "out"), **options), train_dataset=[0])
    if kind == "sharded":
        for unit in (*sharding_units(model), model):
            fully_shard(unit, mesh=mesh)
    else:
        model.__class__ = OfAUser
    assert type(model).__name__ not in ("XAttnForConditionalGeneration",)
    torch.testing.assert_close(trainer.compute_loss(model, dict(batch)), expected, rtol=1e-4, atol=1e-4)
