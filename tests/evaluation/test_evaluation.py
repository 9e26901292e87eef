"""Questions of a data set, asked in several ways."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from helpers.models.chat_models import data_url
from helpers.models.template_models import make_chat_model, make_processor, picture
from helpers.models.tiny_mllama import make_mllama, make_mllama_processor
from hf_xattn import load_rows
from hf_xattn.commands.main import main
from hf_xattn.evaluation.answers import normalised
from hf_xattn.evaluation.evaluation import (
    ANOTHER,
    AS_BASE,
    BASE,
    BLIND,
    CONTAINED,
    FREQUENT,
    MODEL,
    TEXT,
    Asker,
    evaluate,
)
from hf_xattn.evaluation.questions import Question, other_pictures, questions_of
from hf_xattn.importers import import_checkpoint


NEW_TOKENS = 6
TEXTS = ["what is in the picture ?", "user system", "a red circle.", "is it blue ?"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder, processor = tmp_path_factory.mktemp("model"), make_processor()
    torch.manual_seed(0)
    model = make_chat_model(processor).eval()
    with torch.no_grad():  # answers that depend on the picture
        for block in model.blocks:
            block.attn_gate.fill_(3.0)
            block.mlp_gate.fill_(3.0)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder, model, processor


def said(model, processor, messages, new_tokens=NEW_TOKENS):
    """The answer to one question, alone."""
    inputs = processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    tokens = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    return processor.tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def asked(text, *pictures):
    parts = [{"type": "image", "image": each} for each in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def rows(model, processor, pictures):
    """A row for each text, the first half of them with what the model says as the expected answer."""
    made = []
    for index, (text, shown) in enumerate(zip(TEXTS, pictures)):
        messages = asked(text, *shown)
        answer = said(model, processor, messages) if index < len(TEXTS) // 2 else "nothing of the kind"
        made.append({"messages": [*messages, {"role": "assistant", "content": answer}]})
    return made


def test_shares_are_those_of_single_calls(saved):
    """Counts that are not those of single calls: batches, padding, and each way to ask."""
    _, model, processor = saved
    pictures = [[picture(1)], [picture(2), picture(3)], [picture(4)], [picture(5), picture(6)]]
    questions = questions_of(rows(model, processor, pictures))
    found = evaluate(model, processor, questions, batch_size=3, max_new_tokens=NEW_TOKENS)
    assert found.ways[MODEL].exact.count == 2 and found.ways[MODEL].exact.of == 4
    for way, changed in ((BLIND, [[]] * 4), (ANOTHER, [pictures[each] for each in (2, 3, 0, 1)])):
        alone = [said(model, processor, asked(text, *shown)) for text, shown in zip(TEXTS, changed)]
        right = sum(one.strip() == each.answer.strip() for one, each in zip(alone, questions))
        assert found.ways[way].exact.count == right < 2
    assert found.ways[FREQUENT].exact.count == 2
    assert found.text is None and found.as_base is None


def test_answers_are_greedy(saved):
    """Beams of the model's own settings, where the guide says greedy."""
    _, model, processor = saved
    rows_at_once = []
    hook = model.lm_head.register_forward_hook(lambda _, inputs, __: rows_at_once.append(inputs[0].shape[0]) and None)
    before, model.generation_config.num_beams = model.generation_config.num_beams, 3
    try:
        Asker(model, processor, 2, NEW_TOKENS).tokens("", questions_of(rows(model, processor, [[]] * 4))[2:])
    finally:
        hook.remove()
        model.generation_config.num_beams = before
    assert rows_at_once[-1] == 2


@pytest.mark.parametrize("kind", ["image_url", "url"])
def test_another_picture_by_its_address(kind, saved):
    """Pictures behind addresses that count as one, so that none is another."""
    _, model, processor = saved
    questions = questions_of(rows(model, processor, [[picture(1)], [picture(2)], [picture(3)], [picture(4)]]))
    for number, each in enumerate(questions):
        url = data_url(picture(number))
        part = (
            {"type": "image_url", "image_url": {"url": url}} if kind == "image_url" else {"type": "image", "url": url}
        )
        each.messages[0]["content"][0] = part
    found = evaluate(model, processor, questions, max_new_tokens=NEW_TOKENS)
    assert found.ways[ANOTHER].exact.of == 4


def test_copies_of_a_picture_are_one(saved):
    """The same picture, shown as another one."""
    _, model, processor = saved
    questions = questions_of(rows(model, processor, [[picture(1)], [picture(1)], [picture(1)], [picture(1)]]))
    assert ANOTHER not in evaluate(model, processor, questions, max_new_tokens=NEW_TOKENS).ways


def test_shares_of_a_group_are_those_of_its_questions_alone(saved):
    """Shares of a group that are not those of its questions asked alone, or that leave the others out of the whole."""
    _, model, processor = saved
    pictures = [[picture(1)], [picture(2)], [picture(3)], [picture(4)]]
    questions = questions_of(rows(model, processor, pictures) + rows(model, processor, [[]] * 4)[:2])
    groups = ["what", "is it", "what", "is it", "what", None]
    questions = [each._replace(group=group) for each, group in zip(questions, groups)]
    found = evaluate(model, processor, questions, max_new_tokens=NEW_TOKENS)
    assert set(found.groups) == {"what", "is it"} and set(found.text_groups) == {"what"}
    for group in ("what", "is it"):
        chosen = [each for each in questions if each.group == group]
        assert found.groups[group] == evaluate(model, processor, chosen, max_new_tokens=NEW_TOKENS).ways
        assert found.groups[group][MODEL].exact.count == 1 and found.groups[group][ANOTHER].exact.of == 2
    whole = evaluate(model, processor, [each._replace(group=None) for each in questions], max_new_tokens=NEW_TOKENS)
    assert found.ways[MODEL] == whole.ways[MODEL] and found.text == whole.text and not whole.groups
    assert found.text_groups["what"].exact.of == 1 and found.text.exact.of == 2


def test_text_questions_are_compared_with_the_base(saved):
    """Questions without a picture, in a model that has its blocks again afterwards."""
    _, model, processor = saved
    questions = questions_of(rows(model, processor, [[], [], [], []]))
    blocks = model.blocks
    found = evaluate(model, processor, questions, max_new_tokens=NEW_TOKENS)
    assert found.ways == {} and found.text.exact.count == 2
    assert found.as_base.count == 4 and list(map(id, model.blocks)) == list(map(id, blocks))


def test_text_beside_a_picture(saved):
    """Text answers that a picture has changed, counted as the base's; a picture in another place than those of rows."""
    _, model, processor = saved
    pictures = [[picture(1), picture(2)], [picture(3)]]
    about = questions_of(rows(model, processor, pictures))
    alone = questions_of(rows(model, processor, [[]] * 4))
    system = [{"role": "system", "content": "a red circle."}, {"role": "user", "content": "is it ?"}]
    chat = [*system, {"role": "assistant", "content": "a"}, {"role": "user", "content": "user ?"}]
    alone.append(Question(chat, "b"))
    shown = [each[0] for each in (pictures[0], pictures[1]) * 2] + [pictures[0][0]]
    expected = [said(model, processor, asked(text, each)) for text, each in zip(TEXTS, shown)]
    behind = [system[0], *asked("is it ?", shown[4]), *chat[2:]]
    expected.append(said(model, processor, behind))
    assert alone[4].beside({"type": "image", "image": shown[4]}).messages == behind
    assert alone[0].beside({"type": "image", "image": shown[0]}).messages == asked(TEXTS[0], shown[0])
    base = [said(model, processor, each.messages) for each in alone]  # without a picture the blocks change nothing
    same = sum(one == other for one, other in zip(expected, base))
    assert same < len(alone)
    found = evaluate(model, processor, [alone[0], *about, *alone[1:]], batch_size=2, max_new_tokens=NEW_TOKENS)
    assert (found.beside.as_base.count, found.beside.as_base.of) == (same, 5) and found.beside_missing is None
    assert found.beside.base == found.text and found.beside.base.exact.count == 2
    right = sum(one.strip() == each.answer.strip() for one, each in zip(expected, alone))
    assert found.beside.model.exact.count == right and found.beside.left_out == 0
    assert found.as_dict()["text_beside_picture"]["as_base"] == found.beside.as_base.as_dict()
    as_expected = [each._replace(answer=answer) for each, answer in zip(alone, expected)]
    found = evaluate(model, processor, [*about, *as_expected], max_new_tokens=NEW_TOKENS)
    assert found.beside.model.exact.count == 5 and found.beside.base.exact.count == same


def test_text_beside_a_picture_that_cannot_be_measured(saved):
    """A figure that is missing without a word, or questions that are left out of it."""
    _, model, processor = saved
    alone, about = Question(asked("a"), "b"), Question(asked("a", picture(1)), "b")
    start = Question([{"role": "system", "content": "a"}], "b")
    for questions, reason in (
        ([alone], "the data has no image"),
        ([about], "no question without an image"),
        ([about, start], "user message"),
    ):
        found = evaluate(model, processor, questions, max_new_tokens=1)
        assert found.beside is None and reason in found.beside_missing
        assert found.as_dict()["text_beside_picture"] is None
        assert found.as_dict()["text_beside_picture_missing"] == found.beside_missing
    found = evaluate(model, processor, [start, about, alone], max_new_tokens=1)
    assert found.beside.as_base.of == 1 and found.beside.left_out == 1 and found.text.exact.of == 2


def test_cut_answers_are_counted(saved):
    """An answer that would have been right, and is reported as wrong without a word."""
    _, model, processor = saved
    question = Question(asked(TEXTS[0], picture(1)), "w")
    ends = copy.deepcopy(model.generation_config)
    ends.eos_token_id = processor.tokenizer.eos_token_id
    model.generation_config, before = ends, model.generation_config
    try:
        assert evaluate(model, processor, [question], max_new_tokens=2).cut == 1
        first = evaluate(model, processor, [question], max_new_tokens=1)
        model.generation_config.eos_token_id = list(range(len(processor.tokenizer)))
        assert first.cut == 1 and evaluate(model, processor, [question], max_new_tokens=2).cut == 0
    finally:
        model.generation_config = before


def test_answers_have_their_tokens_without_padding(saved):
    """An answer that lacks its end, or has the padding of a longer one behind it."""
    _, model, processor = saved
    questions = [Question(asked(text, picture(index)), "") for index, text in enumerate(TEXTS)]
    asker = Asker(model, processor, batch_size=4, max_new_tokens=NEW_TOKENS)
    rows, before = asker.tokens("before", questions), model.generation_config
    ends = [row[index] for index, row in enumerate(rows[:3])]  # of three rows, after another number of tokens
    model.generation_config = copy.deepcopy(before)
    try:
        model.generation_config.eos_token_id = ends
        ended = asker.tokens("ended", questions)
    finally:
        model.generation_config = before
    for row, whole in zip(ended, rows):
        place = min((whole.index(end) for end in ends if end in whole), default=len(whole) - 1)
        assert row == whole[: place + 1]
    assert len({len(row) for row in ended}) > 1
    assert asker.cut["ended"] == sum(row[-1] not in ends for row in ended)


def test_every_answer_is_a_question():
    """A chat of which only the last answer is asked for."""
    chat = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    questions = questions_of([{"messages": [*chat, {"role": "assistant", "content": "d"}]}])
    assert [(len(each.messages), each.answer) for each in questions] == [(1, "b"), (3, "d")]
    with pytest.raises(ValueError, match="row 1 .* answer"):
        questions_of([{"messages": chat}, {"messages": chat[:1]}])
    grouped = questions_of(
        [{"messages": chat, "kind": 2}, {"messages": chat, "kind": None}, {"messages": chat}], "kind"
    )
    assert [each.group for each in grouped] == ["2", None, None]
    frames = {"role": "user", "content": [{"type": "video", "video": [picture(), picture()]}]}
    with pytest.raises(ValueError, match="row 1 to have no video"):
        questions_of([{"messages": chat[:2]}, {"messages": [frames, chat[1]]}])


def test_another_image_is_never_the_same_one():
    """Another picture that is the same one, or a number of pictures that the question does not have."""
    parts = [{"type": "image", "path": each} for each in "abcde"]
    lists = [parts[:1], parts[1:3], parts[1:2], parts[3:5], []]
    questions = [Question([{"role": "user", "content": each}], "") for each in lists]
    same = {"a": 1, "b": 1, "c": 2, "d": 3, "e": 4}
    found = other_pictures(questions[:4], lambda part: same[part["path"]])
    assert found == [None, lists[3], None, lists[1]]
    kinds = [Question([{"role": "user", "content": [part]}], "", kind) for part, kind in zip(parts, "xyxyz")]
    found = other_pictures(kinds, lambda part: part["path"])  # the last one is alone of its kind
    assert [each[0]["path"] for each in found] == ["c", "d", "a", "b", "a"]


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "held_out"
    folder.mkdir()
    lines = []
    for index, text in enumerate(TEXTS):
        picture(index).save(folder / f"{index}.png")
        lines.append({"file_name": f"{index}.png", "question": text, "answer": "yes"})
    lines.append({"question": "user ?", "answer": "no"})
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def test_the_table_and_the_json_have_the_same_figures(saved, data, capsys):
    """The table, and the same figures as JSON."""
    folder = str(saved[0])
    assert main(["eval", folder, "--data", str(data), "--max-new-tokens", "4"]) == 0
    table = capsys.readouterr().out
    assert f"| {FREQUENT} | 4 | 100.0% [51.0%, 100.0%] |" in table
    assert main(["eval", folder, "--data", str(data), "--max-new-tokens", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["questions"] == 5 and found["pictures"][FREQUENT]["exact"]["share"] == 1.0
    assert found["pictures"][ANOTHER]["exact"]["of"] == 4 and found["as_base"]["share"] == 1.0
    assert f"| {MODEL} | 4 | {found['pictures'][MODEL]['exact']['share']:.1%}" in table
    beside = found["text_beside_picture"]
    assert beside["as_base"]["of"] == beside["model"]["exact"]["of"] == beside["base"]["exact"]["of"] == 1
    assert found["text_beside_picture_missing"] is None
    line = next(line for line in table.splitlines() if "as its base without the image" in line)
    assert f"| 1 | {beside['as_base']['share']:.1%} [" in line
    assert main(["eval", folder, "--data", str(data), "--max-new-tokens", "4", "--limit", "4"]) == 0
    assert "were not measured: the data has no question without an image" in capsys.readouterr().out


def test_the_command_prints_shares_of_each_kind(saved, data, capsys):
    """A field that is refused, or lost on the way; shares of a kind that the table shows under another one."""
    lines = [json.loads(line) for line in (data / "metadata.jsonl").read_text().splitlines()]
    chat = [{"role": "user", "content": "user ?"}, {"role": "assistant", "content": "yes"}]
    lines = [*lines[:3], {"images": ["3.png"], "messages": chat}, lines[4]]
    lines = [{**line, "kind": kind} for line, kind in zip(lines, ("a", "b", "b", "b", "c"))]
    (data / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = ["eval", str(saved[0]), "--data", str(data), "--max-new-tokens", "4", "--by", "kind"]
    assert main(command) == 0
    table = capsys.readouterr().out
    for line in (f"| a: {FREQUENT} | 1 | 100.0%", f"| b: {FREQUENT} | 3 | 100.0%", "| c | 1 | "):
        assert line in table
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["groups"]["b"][MODEL]["exact"]["of"] == 3 and found["text_groups"]["c"]["exact"]["of"] == 1
    assert main([*command[:-1], "kinds"]) == 2
    assert "to have the field 'kinds' of `--by`" in capsys.readouterr().err
    (data / "metadata.jsonl").write_text(json.dumps({"file_name": "0.png", "question": "a ?", "answer": "b"}))
    assert main(command) == 2
    assert "--by" in capsys.readouterr().err


def test_answers_are_written(saved, data, tmp_path, capsys):
    """An answer that stands beside another question than its own, or one that nobody finds."""
    file = tmp_path / "answers.jsonl"
    command = ["eval", str(saved[0]), "--data", str(data), "--max-new-tokens", "4", "--answers", str(file)]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [each["question"] for each in lines] == [*TEXTS, "user ?"]
    assert [each["expected"] for each in lines] == ["yes"] * 4 + ["no"]
    assert [Path(name).name for each in lines for name in each["pictures"]] == [f"{index}.png" for index in range(4)]
    model, processor = saved[1:3]
    questions = questions_of(load_rows(data))
    said = Asker(model, processor, 1, 4)("asking", questions)
    assert [each["said"].get(MODEL, each["said"].get(TEXT)) for each in lines] == said
    for way in (MODEL, ANOTHER, BLIND):
        right = sum(normalised(each["said"][way]) == normalised(each["expected"]) for each in lines[:4])
        assert right == found["pictures"][way]["normalised"]["count"]
    for given in (file, tmp_path / "nowhere" / "answers.jsonl"):  # found before the questions are asked
        assert main([*command[:-1], str(given)]) == 2
        assert f"new file in a folder that exists, got {given}" in capsys.readouterr().err


def test_results_in_the_card_replace_those_of_the_same_data(saved, data, tmp_path, capsys):
    """Results that the Hub does not find, that stand there twice, or that push out those of other data."""
    _, model, processor = saved
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    command = ["eval", str(tmp_path / "model"), "--data", str(data), "--max-new-tokens", "4", "--card"]
    assert main(command) == 0
    once = ModelCard.load(tmp_path / "model" / "README.md").data.eval_results
    assert [(each.dataset_name, each.metric_value) for each in once if "frequent" in each.metric_name] == [
        (f"{tmp_path.name}/held_out", 1.0)
    ]
    (tmp_path / "more").mkdir()
    shutil.copytree(data, tmp_path / "more" / data.name)
    assert main([*command[:3], str(tmp_path / "more" / data.name), *command[4:]]) == 0
    named = [each.dataset_name for each in ModelCard.load(tmp_path / "model" / "README.md").data.eval_results]
    assert named == [f"{tmp_path.name}/held_out"] * 6 + ["more/held_out"] * 6
    data.rename(tmp_path / "others")
    assert main([*command[:3], str(tmp_path / "others"), *command[4:]]) == 0
    assert main([*command[:3], str(tmp_path / "others"), *command[4:]]) == 0
    results = ModelCard.load(tmp_path / "model" / "README.md").data.eval_results
    assert [each.dataset_name for each in results] == [*named, *[f"{tmp_path.name}/others"] * 6]
    capsys.readouterr()
    lines = str(tmp_path / "others" / "metadata.jsonl")
    assert main([*command[:3], lines, *command[4:], "--limit", "2"]) == 0
    results = ModelCard.load(tmp_path / "model" / "README.md").data.eval_results
    first = "others/metadata.jsonl, first 2 questions"
    assert {each.dataset_name for each in results} == {*named, f"{tmp_path.name}/others", first}
    capsys.readouterr()
    assert main([*command[:3], str(tmp_path / "others"), *command[4:-1], "--json"]) == 0
    beside = json.loads(capsys.readouterr().out)["text_beside_picture"]
    told = {each.metric_name: each.metric_value for each in results if each.task_type == "text-generation"}
    shares = (beside["as_base"], beside["model"]["contained"], beside["base"]["contained"])
    assert [told[name] for name in (AS_BASE, CONTAINED, BASE)] == [round(each["share"], 4) for each in shares]


def test_wrong_usage_is_refused_before_any_question(saved, data, tmp_path, capsys):
    """Wrong usage that is found after the questions were asked."""
    folder = str(saved[0])
    (tmp_path / "bare").mkdir()
    for given, told in (
        (["--prompt", "what ?"], "--prompt"),
        (["--card"], "model card"),
    ):
        model = str(tmp_path / "bare") if given == ["--card"] else folder
        assert main(["eval", model, "--data", str(data), *given]) == 2
        assert told in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["eval", folder, "--data", str(data), "--limit", "0"])
    assert "--limit" in capsys.readouterr().err
    assert main(["eval", folder, "--data", f"{data}:0.5"]) == 2
    assert "without a weight for `--data`" in capsys.readouterr().err
    saved[1].save_pretrained(tmp_path / "without")
    saved[2].tokenizer.save_pretrained(tmp_path / "without")
    assert main(["eval", str(tmp_path / "without"), "--data", str(data)]) == 2
    assert "processor" in capsys.readouterr().err
    (tmp_path / "without" / "README.md").write_text("---\ntags: [a\n---\n")
    assert main(["eval", str(tmp_path / "without"), "--data", str(data), "--card"]) == 2
    assert "metadata" in capsys.readouterr().err
    (data / "1.png").write_bytes((data / "1.png").read_bytes()[:-30])
    assert main(["eval", folder, "--data", str(data)]) == 2
    assert "line 2: the image '1.png' cannot be read" in capsys.readouterr().err
    (data / "1.png").unlink()
    assert main(["eval", folder, "--data", str(data)]) == 2
    assert "1.png" in capsys.readouterr().err


def test_nothing_drops_out(saved):
    """Answers of a model that still trains, and that dropout changes."""
    _, model, processor = saved
    model = copy.deepcopy(model)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    row = [{"role": "user", "content": [{"type": "image", "image": picture(0)}, {"type": "text", "text": TEXTS[0]}]}]
    asked = [Question(row, "red")] * 4
    expected = Asker(model.eval(), processor, 4, NEW_TOKENS)("", asked)
    model.train()
    assert Asker(model, processor, 4, NEW_TOKENS)("", asked) == expected and model.training


def test_a_tokenizer_that_pads_on_the_right():
    """Answers behind padding, which are those of other questions: the processor of an imported Llama 3.2 Vision."""
    model, processor = import_checkpoint(make_mllama()), make_mllama_processor()
    processor.tokenizer.padding_side = "right"
    processor.chat_template = (
        "{% for message in messages %}{% for part in message.content %}"
        "{{ '<|image|> ' if part.type == 'image' else part.text + ' ' }}{% endfor %}{% endfor %}w9"
    )
    texts = ["w1 w2 w3 w4 w5 w6 w7 w8", "w1", "w4 w5", "w7 w2 w3"]
    questions = [Question(asked(text, picture(index)), "") for index, text in enumerate(texts)]
    for shown in (questions, [Question(asked(text), "") for text in texts]):
        expected = Asker(model, processor, 1, NEW_TOKENS).tokens("alone", shown)
        assert Asker(model, processor, 4, NEW_TOKENS).tokens("together", shown) == expected
