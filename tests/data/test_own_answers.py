"""`examples/data/own_answers.py`: the text model's own answers, to distil."""

import importlib
import json
import re
import sys

import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer

from helpers.checkout import EXAMPLES
from helpers.models.word_models import make_text_checkpoint, make_vision_checkpoint
from hf_xattn import XAttnProcessor, load_rows, retrofit
from hf_xattn.utils.transformers_api import AutoImageProcessor


@pytest.fixture(scope="module")
def own_answers():
    sys.path.insert(0, str(EXAMPLES / "data"))
    try:
        yield importlib.import_module("own_answers")
    finally:
        sys.path.remove(str(EXAMPLES / "data"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    make_text_checkpoint(folder / "text", ["green", "black", "and", "of", "square"])
    make_vision_checkpoint(folder / "vision")
    tokenizer = AutoTokenizer.from_pretrained(folder / "text")
    model = retrofit(folder / "text", folder / "vision", layers=[2, 3], cross_attention={"zero_init": False})
    model.save_pretrained(folder / "model")
    XAttnProcessor(AutoImageProcessor.from_pretrained(folder / "vision"), tokenizer).save_pretrained(folder / "model")
    Image.new("RGB", (32, 32), "red").save(folder / "red.png")
    rows = [
        {"question": "which colour ?", "answer": "red"},
        {"question": "which colour ?", "answer": "blue"},
        {"image": str(folder / "red.png"), "question": "which shape ?", "answer": "circle"},
        {"question": "which shape ?", "answer": "square"},
    ]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


@torch.no_grad()
def test_each_question_once_in_the_words_of_the_text_model(own_answers, folder):
    """Rows about pictures, questions that are asked again, answers of the rows, answers of the sighted model."""
    target = folder / "own.jsonl"
    own_answers.main([str(folder / "model"), "--data", str(folder / "rows.jsonl"), "--output", str(target)])
    rows = load_rows(target)
    found = [[(each["role"], each["content"]) for each in row["messages"]] for row in rows]
    assert [chat[0] for chat in found] == [("user", "which colour ?"), ("user", "which shape ?")]
    base = AutoModelForCausalLM.from_pretrained(folder / "text").eval()
    processor = AutoProcessor.from_pretrained(folder / "model")
    for chat in found:
        asked = [{"role": "user", "content": chat[0][1]}]
        prompt = processor.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        inputs = processor.tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
        said = base.generate(**inputs, max_new_tokens=32, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert chat[1:] == [("assistant", processor.tokenizer.decode(said, skip_special_tokens=True))]


@pytest.mark.parametrize(
    ("rows", "output", "said"),
    [
        ("rows.jsonl", "own.txt", "a new file whose name ends with .jsonl, got .*own.txt"),
        ("rows.jsonl", "rows.jsonl", "a new file .* got .*rows.jsonl"),
        ("pictures.jsonl", "new.jsonl", "expected rows without a picture in .*pictures.jsonl'., got none"),
    ],
)
def test_rows_and_outputs_that_do_not_fit_are_refused(own_answers, folder, capsys, rows, output, said):
    picture = {"image": str(folder / "red.png"), "question": "which shape ?", "answer": "circle"}
    (folder / "pictures.jsonl").write_text(json.dumps(picture))
    with pytest.raises(SystemExit):
        own_answers.main(["model", "--data", str(folder / rows), "--output", str(folder / output)])
    assert re.search(said, " ".join(capsys.readouterr().err.split()))
