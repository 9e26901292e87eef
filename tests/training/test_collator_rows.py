"""The rows that the collator takes: every form of a row, and what is wrong with others."""

import io
import pickle

import numpy as np
import pytest
import torch
from transformers import GPT2Config

from helpers.inputs.collator_rows import ANSWER, LONG, QUESTION, SHORT, row, said
from helpers.inputs.training_examples import write_examples
from helpers.models.template_models import CHATML, INST, make_chat_model, make_processor, picture
from hf_xattn import XAttnDataCollator, load_rows
from hf_xattn.data.rows import TRAINED, read_row
from hf_xattn.evaluation.questions import questions_of


USER = {"role": "user", "content": "how many ?"}


FORMS = {
    "column, bare parts": {
        "messages": [
            {"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": QUESTION}]},
            {"role": "assistant", "content": ANSWER},
        ],
        "images": [picture(0), picture(1)],
    },
    "column, strings": {**row(ANSWER), "images": [picture(0), picture(1)]},
    "column, text parts": {
        **row([{"type": "text", "text": ANSWER}], [{"type": "text", "text": QUESTION}]),
        "images": [picture(0), picture(1)],
    },
    "column filled up with None, as datasets do": {
        "messages": [
            {
                "role": "user",
                "tool_calls": None,
                "content": [
                    {"type": "image", "text": None},
                    {"type": "image", "text": None},
                    {"type": "text", "text": QUESTION, "image": None},
                ],
            },
            {"role": "assistant", "content": [{"type": "text", "text": ANSWER}]},
        ],
        "images": [picture(0), picture(1)],
        "prompt": None,
        "id": 3,
    },
    "prompt and completion": {
        "prompt": row(ANSWER)["messages"][:1],
        "completion": row(ANSWER)["messages"][1:],
        "images": [picture(0), picture(1)],
    },
}


def _bytes(image):
    file = io.BytesIO()
    image.save(file, "png")
    return {"bytes": file.getvalue(), "path": None}


@pytest.mark.parametrize("form", [*FORMS, "bytes"])
def test_forms_of_a_row(form):
    """A form of a data set that gives another prompt, other images, or other labels."""
    images = [{"type": "image", "image": picture(index)} for index in range(2)]
    plain = row(ANSWER, [*images, {"type": "text", "text": QUESTION}])
    given = FORMS[form] if form in FORMS else {**row(ANSWER), "images": [_bytes(picture(0)), _bytes(picture(1))]}
    collator = XAttnDataCollator(make_processor(CHATML))
    expected, batch = collator([plain]), collator([given])
    assert batch.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(batch[name], values), name
    assert said(collator.processor, batch["labels"][0]) == [ANSWER + "<|im_end|>"]


def test_rows_are_not_changed():
    """A data set that is another one after the first epoch."""
    given = FORMS["column, bare parts"]
    before = pickle.dumps(given["messages"])
    collator = XAttnDataCollator(make_processor(CHATML))
    first, second = collator([given]), collator([given])
    assert pickle.dumps(given["messages"]) == before
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_column_image_is_read():
    """A column `image` that is not read: the model trains blind."""
    collator = XAttnDataCollator(make_processor(CHATML))
    one, many = collator([{**row(ANSWER), "image": picture(3)}]), collator([{**row(ANSWER), "images": [picture(3)]}])
    assert torch.equal(one["pixel_values"], many["pixel_values"])


MISNAMED = {
    "name": ("imges", ["a.png"]),
    "capital": ("Images", ["a.png"]),
    "short name": ("img", "a.png"),
    "other word": ("pictures", ["a.png"]),
    "picture": ("scene", picture()),
    "pictures": ("scenes", [None, picture()]),
    "array": ("scene", np.zeros((4, 4, 3), dtype=np.uint8)),
    "tensors": ("scenes", [torch.zeros(3, 4, 4)]),
    "bytes of datasets": ("scene", _bytes(picture())),
    "path of datasets": ("scenes", [{"bytes": None, "path": "a.jpg"}]),
    "pixels": ("pixel_values", torch.zeros(1, 3, 4, 4)),
}


@pytest.mark.parametrize("case", MISNAMED)
def test_images_in_a_column_of_another_name(case):
    """A column of images that is not read: the model trains blind."""
    name, value = MISNAMED[case]
    with pytest.raises(ValueError, match=f"Row 0.*`images`, got the column `{name}`.*ename"):
        XAttnDataCollator(make_processor(CHATML))([{**row(ANSWER), name: value}])


def test_other_columns_are_ignored():
    """A column without images that is taken for one."""
    others = {
        "id": 3,
        "image_id": "a7",
        "image_ids": ["a7"],
        "images_count": 2,
        "source": "a.png",
        "pages": ["a"],
        "score": np.zeros(3),
        "boxes": np.zeros((2, 4)),
        "imges": None,
        "audio": {"bytes": b"RIFF", "path": "a.wav"},
        "sound": {"bytes": None, "path": "a.wav"},
        "usage": {"path": 1},
        "img": 3,
    }
    given = {**row(ANSWER), "images": [picture()]}
    collator = XAttnDataCollator(make_processor(CHATML))
    plain, more = collator([given]), collator([{**given, **others}])
    assert plain.keys() == more.keys() and all(torch.equal(plain[name], more[name]) for name in plain)


def test_roles_of_published_templates_are_taken():
    """A role of a published template that is refused."""
    for role in ("system", "developer", "tool", "function", "ipython"):
        chat = [*SHORT["messages"], {"role": role, "content": "a"}, *SHORT["messages"]]
        assert len(said(*_labels(chat))) == 2


def _labels(chat):
    processor = make_processor(CHATML)
    return processor, XAttnDataCollator(processor)([{"messages": chat}])["labels"][0]


def test_completions_alone_are_trained_on():
    """An assistant's turn of the prompt that is trained on."""
    processor = make_processor(CHATML)
    first, second = row("one", "count")["messages"], row("two", "on")["messages"]
    batch = XAttnDataCollator(processor)([{"prompt": [*first, second[0]], "completion": second[1:]}])
    assert said(processor, batch["labels"][0]) == ["two<|im_end|>"]


WRONG = {
    "no assistant": ({"messages": row("")["messages"][:1]}, "no assistant message"),
    "empty answer": (row(" \n"), "Message 1, an assistant message, is empty"),
    "answer None": (row(None), "Message 1, an assistant message, is empty"),
    "nothing": ({}, "remove_unused_columns=False"),
    "images alone": ({"images": []}, "remove_unused_columns=False"),
    "tokens": ({"input_ids": [1, 2]}, "skip_prepare_dataset"),
    "other columns": ({"text": "a dog"}, r"got the columns \['text'\]"),
    "text": ({"messages": "what is it ?"}, "list of chat messages, got str"),
    "no role": ({"messages": [{"content": "a"}]}, "without `role`"),
    "both": ({**SHORT, "prompt": [], "completion": []}, "got both"),
    "image missing": (row(ANSWER, [{"type": "image"}]), "no `images` column"),
    "image too many": ({**FORMS["column, bare parts"], "images": [picture()] * 3}, "2 image part.*got 3 image"),
    "image too few": ({**FORMS["column, bare parts"], "images": [picture()]}, "2 image part.*got 1 image"),
    "no user": (
        {"messages": [{"role": "assistant", "content": "a"}], "images": [picture()]},
        "Expected a user message",
    ),
    "tools": ({**SHORT, "tools": [{"name": "f"}]}, "`tools`"),
    "tool calls": (row("a", tool_calls=[{"function": {"name": "f"}}]), "has `tool_calls`"),
    "continued": ({"prompt": SHORT["messages"], "completion": SHORT["messages"][1:]}, "ends with an assistant message"),
    "role with a typo": ({"messages": [{**SHORT["messages"][0], "role": "usr"}]}, "got 'usr'. Did you mean `user`?"),
    "answers of a typo": (
        {"messages": [*SHORT["messages"], {"role": "assitant", "content": "a"}]},
        r"`messages\[2\]`.* got 'assitant'. Did you mean `assistant`\?",
    ),
    "role with a capital": (
        {"prompt": SHORT["messages"][:1], "completion": [{"role": "Assistant", "content": "a"}]},
        r"got 'Assistant'. Did you mean `assistant`\?",
    ),
    "role of elsewhere": (
        {"messages": [*SHORT["messages"], {"role": "model", "content": "a"}]},
        r"Did you mean `assistant`\?",
    ),
    "images beside the content": (
        {"messages": [{**SHORT["messages"][0], "images": ["a.png"]}, SHORT["messages"][1]]},
        r"images of `messages\[0\]` in its `content`, got `images` beside it",
    ),
    "tokens with images": ({"input_ids": [1, 2], "imges": ["a.png"]}, "must be named `images`"),
    "marker in the text": (row(ANSWER, "<image> what ?"), "Row 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rows_are_named(name):
    """A row that trains on nothing, or an error that leaves a reader to search a data set."""
    wrong, words = WRONG[name]
    with pytest.raises((ValueError, TypeError), match=words) as caught:
        XAttnDataCollator(make_processor(CHATML))([SHORT, wrong])
    assert str(caught.value).startswith("Row 1 of the batch")


def test_unreadable_picture_is_named(tmp_path):
    """A broken file in a batch of many, and nobody knows which."""
    (tmp_path / "broken.png").write_bytes(b"no picture")
    rows = [{**SHORT, "images": [picture()]}, {**row(ANSWER, "broken one"), "images": [str(tmp_path / "broken.png")]}]
    with pytest.raises(ValueError, match=r"Row 1 of the batch \('broken one'\)"):
        XAttnDataCollator(make_processor(CHATML))(rows)


# One leaves out every answer, one some answers; one writes them in other words.
DROPS = "{%- for m in messages if m.role == 'user' -%}{{ m.content }}{%- endfor -%}"
CENSORS = "{%- for m in messages if 'red' not in m.content -%}{{ m.content }}{%- endfor -%}"
REWRITES = "{%- for m in messages -%}{{ m.content | replace('red', 'blue') }}<|im_end|>{%- endfor -%}"
WITHOUT = [
    (DROPS, "omits the answer of|does not show"),
    (CENSORS, "changes the answer"),
    (REWRITES, "changes the answer"),
]


@pytest.mark.parametrize(("template", "words"), WITHOUT, ids=["drops", "censors", "rewrites"])
def test_templates_without_the_answer(template, words):
    """A template that does not write the answer, and labels of something else."""
    with pytest.raises(ValueError, match=f"Row 0.*({words})"):
        XAttnDataCollator(make_processor(template))([row(ANSWER)])


def test_offsets_that_are_wrong():
    """A tokenizer that places its tokens elsewhere, and labels that are not the answer."""

    class Shifted(XAttnDataCollator):
        def _processed(self, conversations):
            made = super()._processed(conversations)
            return {**made, "offset_mapping": made["offset_mapping"] + 2}

    with pytest.raises(ValueError, match="do not decode to its answer"):
        Shifted(make_processor(CHATML))([row(ANSWER)])


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
    for answer in ("3", "a red circle."):
        row = {"messages": [USER, {"role": "assistant", "content": answer}], "images": [picture()]}
        assert labels_of(processor, row).startswith(f" {answer}")
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
        with pytest.raises(ValueError, match="a text holds '<image>'.*no image for it"):
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
