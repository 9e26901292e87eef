"""`hf-xattn train` keeps the text ability by default: text prompts with the text model's answers, beside pictures."""

import json
import re
import string
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from text_questions import TEST_PROMPTS

from helpers.inputs.training_examples import CAPTIONS, write_examples
from helpers.models.template_models import make_chat_model, make_processor, save_chat_model
from helpers.processes.command_runs import FAST, interrupted, run, run_training
from helpers.processes.warm_processes import run_ranks
from hf_xattn.training import kept_text
from hf_xattn.training.bad_rows import RowReader, resolved
from hf_xattn.training.kept_text import KEPT_TEXT_FILE, PROMPTS, read_prompts
from hf_xattn.training.launch import on_device
from hf_xattn.training.run_folder import CHECKPOINTS, OPTIONS_FILE


ASKED = ["what is two and two ?", "a circle ?", "user ?", "what ?", "a blue square ?"]
TEXT = {"question": "what is two and two ?", "answer": "four."}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept") / "model"
    save_chat_model(folder)
    return folder


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """Eight captions twice, and a file of prompts with an empty line and one that comes twice."""
    folder = tmp_path_factory.mktemp("desk")
    write_examples(folder / "data", CAPTIONS * 2)
    (folder / "prompts.txt").write_text("\n".join([ASKED[0], "", *ASKED, f"  {ASKED[1]} "]) + "\n")
    return folder


def given(model, desk, *more):
    return [model, "--data", desk / "data", "--text-prompts", desk / "prompts.txt", *more, *FAST]


def kept(output):
    return [json.loads(line) for line in (output / KEPT_TEXT_FILE).read_text().splitlines()]


def history(output):
    last = max((output / CHECKPOINTS).iterdir(), key=lambda path: int(path.name.rpartition("-")[2]))
    logged = json.loads((last / "trainer_state.json").read_text())["log_history"]
    return [entry for entry in logged if "loss" in entry]


def close(entries, others, rel):
    for entry, other in zip(entries, others, strict=True):
        for name in ("loss", "text_kl"):
            assert entry.get(name, 0) == pytest.approx(other.get(name, 0), rel=rel), (entry, other)


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(one, other):
    one, other = weights(one), weights(other)
    return one.keys() == other.keys() and all(torch.equal(weight, other[name]) for name, weight in one.items())


def watch(monkeypatch):
    """The rows that a run reads, one list a call: the file of each."""
    seen, read = [], RowReader.__call__

    def call(self, places):
        seen.append([rows.place_of(index)[0] for rows, index in map(resolved, places)])
        return read(self, places)

    monkeypatch.setattr(RowReader, "__call__", call)
    return seen


def test_prompts_of_the_package():
    """A prompt of the test that is trained on, in whatever case and punctuation; one that comes twice."""
    prompts = read_prompts(PROMPTS)
    lines = PROMPTS.read_text().splitlines()
    assert prompts == lines and len(prompts) > 300

    def words(text):
        return " ".join(text.lower().translate(str.maketrans("", "", string.punctuation)).split())

    held_out = {words(question) for question, _ in TEST_PROMPTS}
    assert len(held_out) == len(TEST_PROMPTS) and held_out.isdisjoint(map(words, prompts))
    assert len(set(map(words, prompts))) == len(prompts)


def test_text_prompts_are_trained_by_default(model, desk, tmp_path, capsys, monkeypatch):
    """A run of a user who knows no option, whose model loses its text beside a picture."""
    seen = watch(monkeypatch)
    data = write_examples(tmp_path / "data", CAPTIONS * 6)
    options = [model, "--data", data, "--eval-share", "0.29", "--epochs", "2", *FAST]
    status, out, error = run_training(capsys, *options, "--output", tmp_path / "out", texts=True)
    assert status == 0, error
    assert "34 examples to train on, 14 to evaluate on" in out  # without the texts
    assert "6 text prompts are added to the 34 examples of an epoch (`--text-share 0.15`)" in out
    told = re.search(r"380 of 380 text prompts have an answer to train on: (.*)", out)
    assert told and told[1] == str(tmp_path / "out" / KEPT_TEXT_FILE)
    rows = kept(tmp_path / "out")
    assert [row["messages"][0]["content"] for row in rows] == read_prompts(PROMPTS)
    logged = history(tmp_path / "out")
    assert sum("text_kl" in entry for entry in logged) > 3 and logged[-1]["epoch"] == 2
    read = Counter(name for batch in seen for name in batch)
    assert read[str(tmp_path / "out" / KEPT_TEXT_FILE)] == 12  # neither an evaluation nor the comparison reads any
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| text prompts beside an image | 15 % of rows |" in card and "| examples | 34 of" in card
    assert "for texts beside an image | 1 |" in card
    assert json.loads((tmp_path / "out" / OPTIONS_FILE).read_text())["text_share"] == 0.15


def greedy(model, processor, prompt, ends, tokens):
    """The answer, token by token: without a cache, padding and `generate`."""
    chat = [{"role": "user", "content": prompt}]
    ids = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_tensors="pt")
    said = []
    while len(said) < tokens and not (said and said[-1] in ends):
        said.append(int(model(ids).logits[0, -1].argmax()))
        ids = torch.cat([ids, torch.tensor([said[-1:]])], 1)
    return said, processor.tokenizer.decode(said, skip_special_tokens=True).strip()


def test_answers_are_the_text_models_own(desk, tmp_path, capsys):
    """Answers that go on behind the end of a turn, as the user; padding that is read; one prompt asked twice."""
    processor = make_processor()
    seeing = make_chat_model(processor).eval()
    end, other = (processor.tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "</s>"))
    seeing.generation_config.eos_token_id = other  # a base whose configuration does not know the template
    with torch.no_grad():
        seeing.model.text_model.lm_head.weight[end] *= 2
    seeing.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    command = given(tmp_path / "model", desk, "--steps", "1", "--output", tmp_path / "out")
    status, out, error = run_training(capsys, *command)
    assert status == 0, error
    said = [greedy(seeing, processor, prompt, (end, other), 32) for prompt in ASKED]
    assert {tokens[-1] == end for tokens, _ in said} == {True, False}  # some end by themselves
    assert max(len(tokens) for tokens, _ in said) == 32
    expected = [(prompt, answer) for prompt, (_, answer) in zip(ASKED, said) if answer]
    found = [tuple(message["content"] for message in row["messages"]) for row in kept(tmp_path / "out")]
    assert found == expected and f"{len(expected)} of 5 text prompts have an answer" in out


def test_a_text_share_of_zero_trains_no_texts(model, desk, tmp_path, capsys, monkeypatch):
    """A run without texts that is not what it was before there were any."""
    seen = watch(monkeypatch)
    options = [model, "--data", desk / "data", "--steps", "12", *FAST]
    status, out, error = run_training(capsys, *options, "--text-share", "0", "--output", tmp_path / "out")
    assert status == 0 and "text prompts" not in out, error
    assert not (tmp_path / "out" / KEPT_TEXT_FILE).exists()
    assert {name for batch in seen for name in batch} == {str(desk / "data" / "metadata.jsonl")}
    assert not any("text_kl" in entry for entry in history(tmp_path / "out"))
    assert "beside an image" not in (tmp_path / "out" / "README.md").read_text()
    # The teacher would train, so there are none by default.
    assert run_training(capsys, *options, "--train-text", "--output", tmp_path / "own", texts=True)[0] == 0
    assert not (tmp_path / "own" / KEPT_TEXT_FILE).exists()
    assert json.loads((tmp_path / "own" / OPTIONS_FILE).read_text())["text_share"] == 0


def test_a_resumed_run_keeps_the_answers_that_it_began_with(model, desk, tmp_path, capsys, monkeypatch):
    """A run that goes on with other answers than it began with, or without any; one that cannot go on because it was
    killed while the text model answered.
    """
    options = given(model, desk, "--text-share", "0.3", "--steps", "6", "--save-steps", "2")
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert run_training(capsys, *options, "--output", whole)[0] == 0
    before = (whole / KEPT_TEXT_FILE).read_text()
    with monkeypatch.context() as patch:

        def stop(*_):
            raise KeyboardInterrupt

        patch.setattr(kept_text, "on_device", stop)
        with pytest.raises(SystemExit):
            run_training(capsys, *options, "--output", out)
    assert not (out / KEPT_TEXT_FILE).exists()
    interrupted(capsys, monkeypatch, 3, *options, "--output", out, "--resume")
    status, _, error = run_training(capsys, *options[:5], *options[7:], "--output", out, "--resume")
    assert status == 2 and "`--text-share` to be 0.3" in error and "got 0.15" in error
    (out / KEPT_TEXT_FILE).write_text(before.replace("two", "one"))
    status, _, error = run_training(capsys, *options, "--output", out, "--resume")
    assert status == 2 and "expected the text answers of the run" in error
    (out / KEPT_TEXT_FILE).unlink()
    interrupted(capsys, monkeypatch, 5, *options, "--output", out, "--resume")  # answers once more
    assert (out / KEPT_TEXT_FILE).read_text() == before
    with monkeypatch.context() as patch:
        patch.setattr(kept_text, "on_device", None)  # not a third time
        status, printed, error = run_training(capsys, *options, "--output", out, "--resume")
    assert status == 0 and "checkpoint-4" in printed and "5 of 5 text prompts have an answer" in printed, error
    assert same(out, whole) and not same(out, model)


def test_two_processes_train_on_the_same_answers(model, desk, tmp_path, capsys):
    """Answers of each process by itself, which may differ; texts that one of them does not read."""
    options = given(model, desk, "--text-share", "0.3", "--steps", "5")[:-6]
    options += "--learning-rate 0.01 --log-steps 1".split()
    words = [*options, "--batch-size", "1", "--output", tmp_path / "ranks", "--device", "cpu"]
    out = run_ranks(2, ["-m", "hf_xattn", "train", *words])
    assert out.count("have an answer to train on") == 1
    status, _, error = run_training(capsys, *options, "--batch-size", "2", "--output", tmp_path / "one")
    assert status == 0, error
    assert kept(tmp_path / "ranks") == kept(tmp_path / "one")
    one, ranks = history(tmp_path / "one"), history(tmp_path / "ranks")
    assert sum("text_kl" in entry for entry in one) >= 2
    close(ranks, one, rel=1e-3)


def test_own_texts_and_prompts(model, desk, tmp_path, capsys, monkeypatch):
    """Rows of one's own without a picture that still teach nothing; texts without a picture of an evaluation."""
    data = write_examples(tmp_path / "data", [*CAPTIONS, TEXT, TEXT])
    options = ["--data", data, "--text-prompts", desk / "prompts.txt", "--text-share", "0.2", "--epochs", "1", *FAST]
    seen = []
    collate = kept_text.DistillingCollator.__call__

    def call(self, rows, pictures):
        seen.extend(row["messages"][0]["content"] for row, picture in zip(rows, pictures) if picture is not None)
        return collate(self, rows, pictures)

    monkeypatch.setattr(kept_text, "_fitting", lambda rows, *_: rows)
    monkeypatch.setattr(kept_text.DistillingCollator, "__call__", call)
    status, out, error = run_training(capsys, model, *options, "--output", tmp_path / "out", "--stream")
    assert status == 0, error
    count = Counter(seen)
    assert count.pop(TEXT["question"]) >= 2 and sum(count.values()) >= 1 and count.keys() <= set(ASKED)
    status, out, error = run_training(capsys, model, *options, "--output", tmp_path / "checked")
    assert status == 0 and "2 of the examples have no image: they are shown with images of others" in out, error


def test_own_rows_that_cannot_stand_beside_a_picture(model, desk, tmp_path, capsys):
    """A run that ends in the middle at such a row; one that loses it without a word."""
    start = [{"role": "system", "content": "what ?"}, {"role": "assistant", "content": "four."}]
    data = write_examples(tmp_path / "data", [*CAPTIONS[:3], {"messages": start}])
    options = [model, "--data", data, "--text-prompts", desk / "prompts.txt", "--steps", "1", *FAST]
    status, _, error = run_training(capsys, *options, "--output", tmp_path / "out")
    assert status == 2 and "line 4: Expected a user message" in error and "`--text-share 0`" in error
    assert not (tmp_path / "out").exists()
    skip = ["--bad-rows", "skip", "--bad-rows-limit", "0.3", "--output", tmp_path / "skipped"]
    status, out, error = run_training(capsys, *options, *skip)
    assert status == 0 and "1 bad row(s) were left out" in out, error
    without = [*options[:3], *options[5:], "--text-share", "0", "--output", tmp_path / "without"]
    assert run_training(capsys, *without)[0] == 0


def test_features_and_several_pictures(model, desk, tmp_path, capsys):
    """A text beside a picture that has no features; one beside a row of two pictures that stands beside both."""
    lines = [{"images": ["red.png", "blue.png"], "question": "which colours ?", "answer": "red and blue."}, *CAPTIONS]
    data = write_examples(tmp_path / "data", lines)
    assert (
        run(capsys, "encode-features", model, "--data", data, "--output", tmp_path / "tower", "--device", "cpu")[0] == 0
    )
    options = ["--data", data, "--text-prompts", desk / "prompts.txt", "--text-share", "0.4", "--steps", "4"]
    options += ["--log-steps", "1", "--learning-rate", "0.01", "--batch-size", "4"]
    for name, more in (("pixels", []), ("features", ["--features", tmp_path / "tower"])):
        status, _, error = run_training(capsys, model, *options, *more, "--output", tmp_path / name)
        assert status == 0, error
    pixels, features = (history(tmp_path / name) for name in ("pixels", "features"))
    assert sum("text_kl" in entry for entry in pixels) >= 3
    close(features, pixels, rel=1e-2)


def test_prompts_that_do_not_fit(model, desk, tmp_path, capsys):
    """A run that is lost because no answer, or not each, can stand beside a picture."""
    (tmp_path / "long.txt").write_text("what ?\n" + "what is in the picture ? " * 40 + "\n")
    options = [model, "--data", desk / "data", "--steps", "1", "--text-prompts", tmp_path / "long.txt", *FAST]
    status, out, error = run_training(capsys, *options, "--max-length", "60", "--output", tmp_path / "out")
    assert status == 0 and "1 of 2 text prompts have an answer" in out, error
    assert "1 are left out: " in out and "`max_length=60` cuts all answers off" in out
    (tmp_path / "long.txt").write_text("what is in the picture ? " * 40)
    status, out, error = run_training(capsys, *options, "--max-length", "60", "--output", tmp_path / "none")
    assert status == 0 and "No text prompt is left" in out, error
    assert kept(tmp_path / "none") == []


def test_empty_answers_of_the_text_model_are_left_out(model, desk, tmp_path, capsys, monkeypatch):
    """An empty answer that is trained on, or told as an error of the user's; texts that the comparison of pictures
    reads, where no rows are held out.
    """
    seen = watch(monkeypatch)
    monkeypatch.setattr(kept_text, "on_device", lambda *_: ["", "a", "", "b", ""])
    status, out, error = run_training(capsys, *given(model, desk, "--steps", "1"), "--output", tmp_path / "out")
    assert status == 0 and "2 of 5 text prompts have an answer" in out and "left out" not in out, error
    assert [row["messages"][1]["content"] for row in kept(tmp_path / "out")] == ["a", "b"]
    assert sum(map(len, seen)) == 2 + len(CAPTIONS * 2)  # a step, and the comparison


def test_a_model_that_does_not_fit(capsys):
    """A model that trains in shards, and is lost because no GPU holds all of it."""
    calls, moves = [], []
    model = SimpleNamespace(device=torch.device("cpu"), parameters=list, to=lambda device: moves.append(device.type))

    def full():
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError
        return "answers"

    assert on_device(model, torch.device("cuda"), full) == "answers"
    assert moves == ["cuda", "cpu", "cpu"] and "does not fit into the memory of cuda" in capsys.readouterr().out


def test_options_that_cannot_act_are_refused_before_any_work(model, desk, tmp_path, capsys):
    """Work that is done before the error, or an option that has no effect."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n  \n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfea\n")
    for more, told in (
        (["--text-share", "1"], "`--text-share` must be at least 0 and below 1, got 1.0"),
        (["--text-share", "-0.1"], "`--text-share` must be at least 0 and below 1"),
        (["--text-share", "nan"], "`--text-share` must be at least 0 and below 1"),
        (["--text-share", "0.1", "--train-text"], "`--text-share` or `--train-text`, got both"),
        (["--text-prompts", prompts, "--train-text"], "`--text-prompts` or `--train-text`, got both"),
        (["--text-prompts", prompts, "--text-share", "0"], "`--text-share` above 0 with `--text-prompts`"),
        (["--text-prompts", prompts], f"a prompt in each line, got {prompts} without one"),
        (["--text-prompts", tmp_path / "no.txt"], "No such file or directory"),
        (["--text-prompts", tmp_path], "Is a directory"),
        (["--text-prompts", tmp_path / "bytes.txt"], "can't decode byte"),
    ):
        options = [model, "--data", desk / "data", "--output", tmp_path / "out", "--steps", "1", *more]
        status, _, error = run_training(capsys, *options)
        assert status == 2 and told in error, (more, error)
    assert not (tmp_path / "out").exists()
