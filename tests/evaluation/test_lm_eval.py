"""Our models in lm-eval: its requests get the answers of `generate`."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch

from helpers.checkout import EXAMPLES
from helpers.models.template_models import CHATML, HEADERS, make_chat_model, make_processor, picture
from hf_xattn.evaluation.evaluation import Asker
from hf_xattn.evaluation.questions import Question


lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval: pip install '.[eval]'")
datasets = pytest.importorskip("datasets")
TaskManager = pytest.importorskip("lm_eval.tasks").TaskManager

GUIDE = (EXAMPLES / "evaluation" / "README.md").read_text()
NEW_TOKENS = 6
QUESTIONS = ["what is in it ?", "<image>a red circle.", "<image> and <image> user ?", "a <image> is blue <image>"]


def save(folder, template, marker):
    """A model whose answers depend on the pictures."""
    processor = make_processor(template, marker)
    model = make_chat_model(processor).eval()
    with torch.no_grad():
        for block in model.blocks:
            block.attn_gate.fill_(3.0)
            block.mlp_gate.fill_(3.0)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, processor


def pictures_of(doc):
    return [picture(doc["id"] + place) for place in range(doc["question"].count("<image>"))]


def parts_of(doc):
    """The question as the parts of a message."""
    pictures = iter(pictures_of(doc))
    pieces = [piece for piece in re.split("(<image>)", doc["question"]) if piece]
    return [
        {"type": "image", "image": next(pictures)} if piece == "<image>" else {"type": "text", "text": piece}
        for piece in pieces
    ]


@pytest.mark.parametrize(
    "template, marker",
    [(CHATML, None), *(pytest.param(each, "<image>", marks=pytest.mark.slow) for each in (CHATML, HEADERS))],
)
def test_lm_eval_gets_the_answers_of_generate(tmp_path, template, marker):
    """Pictures beside the question of another row, in another order, or not seen; a second beginning of the text."""
    model, processor = save(tmp_path, template, marker)
    docs = [{"id": 10 * index, "question": text, "answer": ""} for index, text in enumerate(QUESTIONS)]
    task = {
        "task": "pictures",
        "dataset_path": "pictures",
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(docs)},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "doc_to_image": pictures_of,
        "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": NEW_TOKENS},
        "metric_list": [{"metric": "exact_match"}],
    }
    found = lm_eval.simple_evaluate(
        model="hf-multimodal",
        model_args={"pretrained": str(tmp_path), **({} if marker else {"image_string": "<image>"})},
        tasks=[task],
        task_manager=TaskManager(include_defaults=False),
        device="cpu",
        batch_size=3,
        apply_chat_template=True,
    )
    said = [each["resps"][0][0] for each in found["samples"]["pictures"]]
    chats = [[{"role": "user", "content": parts_of(doc)}] for doc in docs]
    one_by_one = Asker(model, processor, batch_size=1, max_new_tokens=NEW_TOKENS)
    assert said == one_by_one("answers", [Question(chat, "") for chat in chats])
    blind = [[{"role": "user", "content": doc["question"].replace("<image>", "")}] for doc in docs]
    assert said[1:] != one_by_one("answers", [Question(chat, "") for chat in blind])[1:]


@pytest.mark.slow
def test_commands_of_the_guide(tmp_path):
    """Commands that a reader copies and that do not work; a saved folder that lm-eval does not know."""
    folder = tmp_path / "seeing"
    save(folder, CHATML, None)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    (tmp_path / "held_out").mkdir()
    picture().save(tmp_path / "held_out" / "a.png")
    line = {"file_name": "a.png", "question": "a red circle ?", "answer": "yes"}
    (tmp_path / "held_out" / "metadata.jsonl").write_text(json.dumps(line))
    line = {"question": "is it blue ?", "choices": ["yes", "no"], "answer": 1}
    (tmp_path / "questions.jsonl").write_text(json.dumps(line))
    commands = re.findall(r"^lm_eval (.*)$", GUIDE.replace("\\\n", ""), re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        words = [sys.executable, "-m", "lm_eval", *shlex.split(command), "--device", "cpu"]
        caches = {**os.environ, "HF_HOME": str(tmp_path / "cache")}
        output = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=caches)
        assert output.returncode == 0, output.stderr
        tasks = command.partition("--tasks ")[2].split()[0]
        assert all(f"|{task}" in output.stdout for task in tasks.split(",")), output.stdout
