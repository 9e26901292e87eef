"""The rows that the collator takes: every form of a row, and what is wrong with others."""

import io
import pickle

import numpy as np
import pytest
import torch

from helpers.inputs.collator_rows import ANSWER, QUESTION, SHORT, row, said
from helpers.models.template_models import CHATML, make_processor, picture
from hf_xattn import XAttnDataCollator


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


def test_one_image_column():
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


def test_known_roles():
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
    "no role": ({"messages": [{"content": "a"}]}, "needs a `role`"),
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
    "tokens with images": ({"input_ids": [1, 2], "imges": ["a.png"]}, "must be named `images`, not `imges`"),
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
