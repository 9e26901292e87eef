"""Runs of `hf-xattn train` that said something else than what they did."""

import json

import pytest
import torch
from tokenizers import AddedToken, processors
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, SiglipImageProcessorPil
from transformers.testing_utils import CaptureLogger

from helpers.inputs.collator_rows import row
from helpers.inputs.training_examples import CAPTIONS, draw, write_examples
from helpers.models.template_models import (
    CHATML,
    TEXT,
    make_chat_model,
    make_processor,
    make_tokenizer,
    save_chat_model,
)
from helpers.processes.command_runs import run, run_training
from hf_xattn import XAttnDataCollator, XAttnProcessor, load_rows
from hf_xattn.training import collator
from hf_xattn.utils.transformers_api import is_before


FAST = "--device cpu --log-steps 1000 --save-steps 1000".split()


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fresh")
    save_chat_model(folder)
    return folder


@pytest.fixture
def data(tmp_path):
    return write_examples(tmp_path / "data", CAPTIONS)


def test_a_run_that_diverges(fresh, data, tmp_path, capsys):
    """A folder of NaN weights, and a loss of 0."""
    options = ["--steps", "12", "--batch-size", "2", "--learning-rate", "100", "--warmup", "0", *FAST]
    status, _, error = run_training(capsys, fresh, "--data", data, "--output", tmp_path / "out", *options)
    assert status != 0 and "has diverged" in error and "Lower `--learning-rate` (100)" in error
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_run_of_one_step(fresh, data, tmp_path, capsys):
    """A step whose learning rate is 0, because it is all warm-up."""
    options = ["--batch-size", str(len(CAPTIONS)), "--learning-rate", "0.1", *FAST]
    status, _, error = run_training(capsys, fresh, "--data", data, "--output", tmp_path / "out", *options)
    assert status == 0, error
    states = [AutoModelForImageTextToText.from_pretrained(each).state_dict() for each in (fresh, tmp_path / "out")]
    assert any(not torch.equal(weight, states[1][name]) for name, weight in states[0].items())


def test_evaluation_loss_is_a_mean_over_labels(fresh, tmp_path, capsys):
    """A loss that depends on the size of a batch, because each batch counts the same."""
    lines = []
    (tmp_path / "data").mkdir()
    for index, answer in enumerate(["red"] * 4 + ["a red circle and a blue square " * 4] * 2):
        draw("red").save(tmp_path / "data" / f"{index}.png")
        lines.append({"file_name": f"{index}.png", "question": "what ?", "answer": answer})
    (tmp_path / "data" / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    total, count = 0.0, 0
    model = AutoModelForImageTextToText.from_pretrained(fresh)
    collate = XAttnDataCollator(AutoProcessor.from_pretrained(fresh))
    for each in load_rows(str(tmp_path / "data")):
        batch = collate([each])
        labels = int((batch["labels"][:, 1:] != -100).sum())
        with torch.no_grad():
            total, count = total + model(**batch).loss.item() * labels, count + labels
    for size in (1, 4):
        given = [
            fresh,
            "--data",
            tmp_path / "data",
            "--eval-data",
            tmp_path / "data",
            "--output",
            tmp_path / f"out{size}",
        ]
        options = ["--steps", "1", "--batch-size", str(size), "--learning-rate", "1e-12", *FAST]
        status, said, error = run_training(capsys, *given, *options)
        assert status == 0, error
        found = float(said.partition("evaluation loss ")[2].split()[0])
        assert found == pytest.approx(total / count, abs=2e-4)


@pytest.mark.parametrize("eos", ["<|im_end|>", "</s>"])
def test_answers_end_where_the_template_ends_a_turn(eos, data, tmp_path, capsys):
    """A model that has learned where an answer ends, and is not stopped there."""
    processor = make_processor(CHATML, eos=eos)
    make_chat_model(processor).save_pretrained(tmp_path / "fresh")
    processor.save_pretrained(tmp_path / "fresh")
    options = ["--steps", "1", *FAST]
    status, said, error = run_training(
        capsys, tmp_path / "fresh", "--data", data, "--output", tmp_path / "out", *options
    )
    assert status == 0, error
    ends = AutoModelForImageTextToText.from_pretrained(tmp_path / "out").generation_config.eos_token_id
    turn, own = (processor.tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", eos))
    if is_before("5.18.0"):  # `Trainer` lists the tokenizer's token twice
        ends = list(dict.fromkeys(ends))
        ends = ends[0] if len(ends) == 1 else ends
    assert ends == (turn if own == turn else [own, turn])
    assert ("ends a turn with it" in said) == (own != turn)


@pytest.mark.parametrize("runs", [(), ("    ", "  ")], ids=["spaces", "runs of spaces"])
def test_spaces_with_trimmed_offsets_are_labels(runs, tmp_path):
    """A model that learns code without its indentation, because a space has no width for its tokenizer."""
    tokenizer = make_tokenizer(CHATML)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=True)
    tokenizer.add_tokens([AddedToken(each, normalized=True) for each in runs])
    tokenizer.save_pretrained(tmp_path)
    size = {"height": 32, "width": 32}
    processor = XAttnProcessor(SiglipImageProcessorPil(size=size), AutoTokenizer.from_pretrained(tmp_path))
    answer = "def f(x):\n    if x:\n        return 1"
    labels = XAttnDataCollator(processor)([row(answer)])["labels"][0]
    assert processor.tokenizer.decode(labels[labels != -100]).startswith(answer)


@pytest.mark.parametrize("space, told", [("", False), (" ", True)])
def test_a_prompt_that_ends_inside_a_token(space, told):
    """A model that is trained on one token for the end of the prompt and its answer, and asked with another."""
    template = TEXT + (
        f"{{%- for m in messages -%}}{{{{ m.role + ':{space}' + text(m.content) + '<|im_end|>' }}}}{{%- endfor -%}}"
        f"{{%- if add_generation_prompt -%}}{{{{ 'assistant:{space}' }}}}{{%- endif -%}}"
    )
    processor = make_processor(template)
    collator.logger.warning_once.cache_clear()
    with CaptureLogger(collator.logger) as said:
        XAttnDataCollator(processor)([row("red circle")])
    assert ("begins in the generation prompt" in said.out) == told, said.out


@pytest.mark.parametrize(
    "field",
    [
        {"media": [{"type": "image", "path": "red.png"}]},
        {"media": {"images": ["red.png"]}},
        {"meta": {"file_name": "red.png"}},
        {"address": "https://host/red.jpg?width=1"},
    ],
    ids=str,
)
def test_a_picture_inside_another_field(field, fresh, tmp_path, capsys):
    """A picture that nobody reads, in a row that becomes one of text."""
    draw("red").save(tmp_path / "red.png")
    rows = [{"file_name": "red.png", "question": "which ?", "answer": "red"}]
    rows.append({**field, "question": "which ?", "answer": "red"})
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    status, _, error = run(capsys, "train", fresh, "--data", tmp_path, "--output", tmp_path / "out", *FAST)
    assert status != 0 and f"got it in {next(iter(field))!r}, which is not read" in error
