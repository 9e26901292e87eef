"""The demo over a language model: its questions, its training, and the whole run with a tiny one."""

import contextlib
import copy
import io
import json
import re

import demo_choices
import numpy as np
import pytest
import sealed_digits
import torch
from command_runs import check_last_line
from own_sealed_list import seal_digits
from tiny_gguf import write_gguf
from tiny_models import needs_part, randomize
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor

from hf_xattn import demo
from hf_xattn.checkpoints.model_card import example_questions
from hf_xattn.commands.main import main
from hf_xattn.demo.canvases import WORDS, DigitPool, patch_labels, picture_of, to_pixel_values
from hf_xattn.demo.checkpoints import language_model, make_vision_checkpoint
from hf_xattn.demo.language_run import retrofitted
from hf_xattn.demo.language_scores import accuracy_by_kind, answers, own_answers, second_right
from hf_xattn.demo.language_training import (
    TEXT_EVERY,
    Batch,
    Recipe,
    Rows,
    distance_from_text,
    parts_by_length,
    ridge,
    start_connector,
    texts_of_step,
    train,
    training_dtype,
    word_states,
)
from hf_xattn.demo.questions import (
    KINDS,
    PHRASINGS,
    ask,
    kinds_of,
)
from hf_xattn.demo.report import decided_words
from hf_xattn.demo.text_prompts import TEST_PROMPTS, TRAINING_PROMPTS
from hf_xattn.demo.upper_layers import UpperLayers


pytestmark = needs_part("special tokens of a GGUF file")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("source") / "tiny.gguf")


@pytest.fixture(scope="module")
def finished(source, tmp_path_factory):
    folder, printed = tmp_path_factory.mktemp("demo") / "out", io.StringIO()
    with contextlib.redirect_stdout(printed):
        results = demo.run_language(source, folder, quick=True)
    return folder, results, printed.getvalue()


def test_the_last_line_answers(finished, capsys):
    """A newcomer's first question in another form than the training's."""
    folder, _, printed = finished
    check_last_line(printed, capsys, folder)
    for name in ("model", "adapter"):
        assert len(example_questions(str(folder / name))) == len(KINDS)


@pytest.fixture(scope="module")
def parts(source, tmp_path_factory):
    """A model with blocks that change the logits, its processor, and training rows."""
    folder = tmp_path_factory.mktemp("parts")
    pool = DigitPool(held_out=False)
    make_vision_checkpoint(folder / "vision", pool, steps=1, seed=0, where=True)
    model, processor = retrofitted(language_model(source, folder), folder / "vision")
    return randomize(model).eval(), processor, pool


def test_a_run_keeps_the_text_and_saves_what_loads(finished):
    """A text model that training changed; a folder that only the demo itself can read; figures that are not those of
    the table.
    """
    folder, results, _ = finished
    assert results["text-only logits bit-identical before training"] and results["text-only logits bit-identical"]
    assert results["answered token for token as the base"] == results["text-only questions"] == len(TEST_PROMPTS) == 200
    assert json.loads((folder / "results.json").read_text()) == results
    assert set(results["accuracy"]["new phrasings"]) == set(KINDS)
    assert (folder / "questions.png").exists() and len(list((folder / "examples").glob("*.png"))) == 2
    whole = AutoModelForImageTextToText.from_pretrained(folder / "model")
    added = AutoModelForImageTextToText.from_pretrained(folder / "adapter", dtype=torch.bfloat16)
    assert any((block.attn.o_proj.weight != 0).any() for block in whole.blocks)
    processor = AutoProcessor.from_pretrained(folder / "model")
    chat = [{"role": "user", "content": [{"type": "image", "path": str(next((folder / "examples").glob("*.png")))}]}]
    inputs = processor.apply_chat_template(chat, tokenize=True, return_dict=True, add_generation_prompt=True)
    assert (inputs["input_ids"] == processor.image_token_id).sum() == 1
    with torch.no_grad():
        assert torch.equal(whole(**inputs).logits, added(**inputs).logits)


def test_the_text_model_is_frozen_in_training(finished):
    """A saved whole model whose text weights are not the base's, in the dtype of the saved model."""
    folder, *_ = finished
    base = AutoModelForCausalLM.from_pretrained(folder / "text", dtype=torch.bfloat16).state_dict()
    model = AutoModelForImageTextToText.from_pretrained(folder / "model").model.text_model.state_dict()
    assert all(torch.equal(weight, model[name]) for name, weight in base.items())


def test_the_sealed_questions_are_asked_once(finished, capsys, tmp_path, monkeypatch):
    """A sealed test that is opened by accident or twice, or whose saved figures are not those of its saved answers."""
    folder, *_ = finished
    seal_digits(tmp_path, monkeypatch, count=3)
    with pytest.raises(SystemExit):
        sealed_digits.main([str(folder)])
    assert "Expected --open-sealed" in capsys.readouterr().err and not (folder / "sealed_results.json").exists()
    sealed_digits.main([str(folder), "--open-sealed"])
    printed, results = capsys.readouterr().out, json.loads((folder / "sealed_results.json").read_text())
    questions = sealed_digits.draw(sealed_digits.read_list(), 0)
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=training_dtype(torch.device("cpu")))
    said = answers(model, AutoProcessor.from_pretrained(folder / "model"), questions)
    assert [(each["question"], each["said"]) for each in results["answers"]] == [
        (question.text, answer) for question, answer in zip(questions, said)
    ]
    right = accuracy_by_kind(questions, said)
    shares = {kind: ways["the model"]["share"] for kind, ways in results["shares"].items()}
    assert shares.pop("all") == pytest.approx(sum(right.values()) / len(KINDS)) and shares == right
    easy = [each._replace(answer=f" {answer}") for each, answer in zip(questions[::2], said[::2])]
    table, _ = sealed_digits.score(model, AutoProcessor.from_pretrained(folder / "model"), easy)
    assert all(ways["the model"]["share"] == 1 for ways in table.values())
    assert results["shares"]["all"]["the model"]["of"] == 3 * len(KINDS) and "| where | 3 |" in printed
    with pytest.raises(SystemExit):
        sealed_digits.main([str(folder), "--open-sealed"])
    assert "not asked before" in capsys.readouterr().err


@pytest.mark.slow
def test_trials_of_choices(finished, tmp_path, monkeypatch):
    """A choice that changes nothing, or a trial of what the demo does not make."""
    folder, *_ = finished
    made = []
    start = demo_choices.start_connector
    monkeypatch.setattr(demo_choices, "start_connector", lambda *given: made.append(given) or start(*given))
    monkeypatch.setattr(
        demo_choices, "CHOICES", demo_choices.CHOICES | {"6 a step": {"batch_size": 6, "layers": (0.25,)}}
    )
    chosen = ["connector from random weights", "6 a step", "no MLP"]
    results = demo_choices.compare(folder, 1, [0], chosen, count=1)
    assert len(made) == 2 and made[0][0].config.cross_attention_layers == [1]
    assert made[1][0].config.cross_attention_config.mlp_type == "none"
    assert json.loads((folder / "choices.json").read_text())["results"] == results
    costs = {"minutes", "added", "first", "step"}
    assert all(set(KINDS) | costs == set(each["0"]) and each["0"]["step"] > 0 for each in results.values())
    assert results["no MLP"]["0"]["added"] < results["connector from random weights"]["0"]["added"]
    assert demo_choices.table(results).count("|\n") == 4

    both = demo_choices.compare(folder, 1, [0, 1], ["no MLP"], count=1)["no MLP"]
    assert len(made) == 3 and both["0"] == results["no MLP"]["0"] and set(both) == {"0", "1"}
    plain = {"0": {**both["0"], "read": both["0"]["read"] - 0.5}}
    told = demo_choices.table({demo_choices.AS_IT_IS: plain, "no MLP": both}).splitlines()
    assert f"| {0.5 / len(KINDS):+.1%} (" in told[-1] and "| 2 |" in told[-1]  # of the seed that both have
    with pytest.raises(ValueError, match="`--choice` must be of"):
        demo_choices.compare(folder, 1, [0], ["red"])
    with pytest.raises(ValueError, match="finished"):
        demo_choices.compare(tmp_path, 1, [0], [])
    with pytest.raises(ValueError, match=r"results of \{'steps': 2, 'questions': 1\}"):
        demo_choices.compare(folder, 2, [0], [], count=1)


def test_long_answers_are_heard_to_their_end(parts):
    """Answers cut off before the last digit that was asked for: they would count as wrong, however right they are."""
    model, processor, pool = parts
    rng = np.random.default_rng(0)
    asked = [ask("is there", pool, rng) for _ in range(40)]
    longest = max(len(re.findall(r"\w+|,", question.answer)) for question in asked)  # tokens, if each word is one
    limits = []

    class Listening(torch.nn.Module):
        device, generation_config = model.device, model.generation_config

        def generate(self, input_ids, max_new_tokens, **kwargs):
            limits.append(max_new_tokens)
            return input_ids

    answers(Listening(), processor, asked)
    assert longest == 8 and min(limits) > longest


@pytest.mark.parametrize(
    "kind, answer, expected",
    [
        ("read", "seven, two, six", ["seven,", "two,", "six"]),
        ("sum", "four plus five is nine", ["four", "five", "nine"]),
        ("is there", "two no, seven yes", ["two", "seven"]),
        ("where", "six top left", ["top"]),
        ("where", "two no, six top left", ["top"]),
        ("where", "six", ["six"]),
        ("read", "nothing", ["nothing"]),
        ("read", "", []),
    ],
)
def test_attention_is_drawn_where_the_image_decides(kind, answer, expected):
    """The digit's word that the answer repeats from the question, drawn as if the model had found it in the picture."""

    class Letters:
        def decode(self, ids, skip_special_tokens=False):
            return "".join(map(chr, ids))

    question = ask(kind, DigitPool(held_out=True), np.random.default_rng(0))
    words = decided_words(question, [ord(letter) for letter in answer], Letters())
    assert [word.text for word in words] == expected
    assert all(answer[word.tokens.start : word.tokens.stop].strip() == word.text for word in words)


def test_upper_layers_give_the_gradients_of_the_whole_model(parts):
    """Positions, masks or a beginning that are not those of the whole model; a label that is one token off."""
    model, processor, pool = parts
    rng = np.random.default_rng(1)
    questions = [ask(kind, pool, rng) for kind in ("read", "is there", "how many")]
    rows = Rows(processor, pool.canvas(rng))
    upper = UpperLayers(model, rows.beginning, torch.float32)
    examples = [rows.example(question.text, question.answer) for question in questions]
    examples.append(rows.example("Hello!", "Hello.", False))
    pixel_values = torch.stack([to_pixel_values(question.canvas) for question in [*questions, questions[0]]])
    image_mask = torch.tensor([[True]] * 3 + [[False]])
    ids = [torch.tensor([*rows.beginning, *example.ids]) for example in examples]
    labels = [torch.tensor([*[-100] * len(rows.beginning), *example.labels]) for example in examples]
    pad = torch.nn.utils.rnn.pad_sequence
    whole = model(
        input_ids=pad(ids, batch_first=True),
        attention_mask=pad([torch.ones_like(each) for each in ids], batch_first=True),
        labels=pad(labels, batch_first=True, padding_value=-100),
        pixel_values=pixel_values,
        image_mask=image_mask,
    ).loss
    whole.backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    logits, wanted, _ = upper.logits(examples, pixel_values, image_mask)
    loss = torch.nn.functional.cross_entropy(logits, wanted)
    loss.backward()
    torch.testing.assert_close(loss, whole)
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert found.keys() == expected.keys() and len(found) > 10
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5)
    assert processor.decode(wanted[:1]) in questions[0].answer


def test_layers_below_the_first_block_read_a_text_once(parts):
    """A lower part that runs again in every step."""
    model, processor, pool = parts
    rng = np.random.default_rng(2)
    question = ask("read", pool, rng)
    rows = Rows(processor, question.canvas)
    upper = UpperLayers(model, rows.beginning, torch.float32)
    example, other = rows.example(question.text, question.answer), rows.example("Hello!", "Hello.")
    pixel_values = to_pixel_values(question.canvas)[None]
    calls = []
    layers = upper.body.layers
    hooks = [
        layer.register_forward_hook(lambda *_, index=index: calls.append(index)) for index, layer in enumerate(layers)
    ]
    upper.logits([example] * 2, pixel_values.expand(2, -1, -1, -1, -1))
    upper.logits([example, other], pixel_values.expand(2, -1, -1, -1, -1))
    upper.logits([example], pixel_values)
    for hook in hooks:
        hook.remove()
    assert calls.count(0) == 2 and calls.count(upper.first) == 3
    assert upper.body.layers is layers


def test_ridge():
    """A penalty that is missing, or a bias that belongs to other outputs."""
    generator = torch.Generator().manual_seed(0)
    features, targets = torch.randn(40, 6, generator=generator), torch.randn(40, 3, generator=generator)
    weight, bias = ridge(features, targets)
    inputs = np.vstack([np.hstack([features.numpy(), np.ones((40, 1))]), np.eye(7)])
    expected = np.linalg.lstsq(inputs, np.vstack([targets.numpy(), np.zeros((7, 3))]), rcond=None)[0]
    np.testing.assert_allclose(torch.cat([weight, bias[:, None]], dim=1).T, expected, atol=1e-5)


def test_the_connector_starts_where_the_words_are(source, tmp_path):
    """Hidden states of another layer or another token; a patch that starts at another digit's word."""
    pool = DigitPool(held_out=False)
    make_vision_checkpoint(tmp_path / "vision", pool, steps=60, seed=0, where=True)
    model, processor = retrofitted(language_model(source, tmp_path), tmp_path / "vision")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "text").eval()
    first = min(model.config.cross_attention_layers)
    words = word_states(base, processor, first, WORDS)

    seen = []
    hook = base.model.layers[first].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0, -1].detach()))
    for word in WORDS:
        for phrasing in PHRASINGS["read"]:
            chat = [{"role": "user", "content": [{"type": "text", "text": phrasing}]}]
            base(
                input_ids=torch.tensor(
                    [
                        [
                            *processor.apply_chat_template(chat, tokenize=True, add_generation_prompt=True)[0],
                            *processor.tokenizer(word, add_special_tokens=False)["input_ids"],
                        ]
                    ]
                )
            )
    hook.remove()
    means = torch.stack(seen).view(len(WORDS), -1, words.shape[1]).mean(1)
    means = means - means.mean(0)
    cosines = torch.nn.functional.cosine_similarity(words, means, dim=-1)
    torch.testing.assert_close(cosines, torch.ones_like(cosines), atol=1e-3, rtol=0)

    start_connector(model, base, processor, pool, seed=0)
    canvases = [pool.canvas(np.random.default_rng(index)) for index in range(200)]
    with torch.no_grad():
        pixel_values = torch.stack([to_pixel_values(canvas) for canvas in canvases])
        features = model.get_image_features(pixel_values).pooler_output.view(len(canvases), -1, words.shape[1])[:, 1:]
    digits = torch.stack([patch_labels(canvas)[0] for canvas in canvases])
    there = digits < len(WORDS)
    right = ((features[there] @ words.T).argmax(-1) == digits[there]).float().mean()
    assert right > 0.25  # by chance 0.1; this tower was hardly trained


def test_a_second_question_is_a_turn_of_the_same_chat(parts):
    """An answer of an earlier turn that is not trained; a second picture; a question about another canvas."""
    _, processor, pool = parts
    rng = np.random.default_rng(4)
    canvas = pool.canvas(rng)
    assert {"sum"} == set(KINDS) - set(kinds_of(canvas)) or len(canvas.digits) == 2
    first, second = (ask(kind, pool, rng, canvas=canvas) for kind in ("read", "is there"))
    assert first.canvas is canvas and second.canvas is canvas
    rows = Rows(processor, canvas)
    example = rows.example(second.text, second.answer, before=((first.text, first.answer),))
    chat = [
        {
            "role": "user",
            "content": [{"type": "image", "image": picture_of(canvas)}, {"type": "text", "text": first.text}],
        },
        {"role": "assistant", "content": [{"type": "text", "text": first.answer}]},
        {"role": "user", "content": [{"type": "text", "text": second.text}]},
        {"role": "assistant", "content": [{"type": "text", "text": second.answer}]},
    ]
    ids = processor.apply_chat_template(chat, tokenize=True)[0].tolist()
    assert ids[: len(rows.beginning) + len(example.ids)] == [*rows.beginning, *example.ids]
    assert example.ids.count(processor.image_token_id) == 1
    trained = processor.decode([label for label in example.labels if label != -100], skip_special_tokens=True)
    said = first.answer + second.answer
    assert re.findall(r"[a-z]", trained) == re.findall(r"[a-z]", said)


def test_a_second_question_follows_the_models_own_answer(parts):
    """The right answer put into the model's mouth, or a second question that is asked alone."""
    model, processor, pool = parts
    rng = np.random.default_rng(5)
    asked = [ask("leftmost", pool, rng) for _ in range(2)]
    prompts = []

    class Listening(torch.nn.Module):
        device, generation_config = model.device, model.generation_config

        def generate(self, input_ids, attention_mask, **kwargs):
            prompts.append([row[mask.bool()] for row, mask in zip(input_ids, attention_mask)])
            return model.generate(input_ids=input_ids, attention_mask=attention_mask, **kwargs)

    answers(Listening(), processor, asked, earlier=[("Hello!", "Hello."), ("Count.", "one")])
    chat = [
        {
            "role": "user",
            "content": [{"type": "image", "image": picture_of(asked[0].canvas)}, {"type": "text", "text": "Hello!"}],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "Hello."}]},
        {"role": "user", "content": [{"type": "text", "text": asked[0].text}]},
    ]
    inputs = processor.apply_chat_template(chat, tokenize=True, return_dict=True, add_generation_prompt=True)
    assert torch.equal(prompts[0][0], inputs["input_ids"][0])
    prompts.clear()
    share = second_right(Listening(), processor, asked * 5, seed=0)
    first, second = prompts
    assert 0 <= share <= 1 and len(second) == 2
    for earlier, later in zip(first, second):  # the second prompt goes on from the first one
        assert torch.equal(later[: len(earlier)], earlier) and len(later) > len(earlier) + 16


def test_a_batch_in_parts_is_the_batch(parts):
    """A row that is lost, twice, or beside another row's picture."""
    _, processor, pool = parts
    rng = np.random.default_rng(3)
    rows = Rows(processor, pool.canvas(rng))
    asked = [ask(kind, pool, rng) for kind in ("leftmost", "how many", "leftmost", "how many", "how many", "leftmost")]
    earlier = (("What is this?", "A picture of digits."),) * 3
    examples = [
        rows.example(question.text, question.answer, before=earlier if row in (1, 3) else ())
        for row, question in enumerate(asked)
    ]
    pixel_values = torch.stack([to_pixel_values(question.canvas) for question in asked])
    split = parts_by_length(Batch(examples, pixel_values))
    assert len(split) == 2
    assert max(len(each.ids) for each in split[0].examples) < min(len(each.ids) for each in split[1].examples)
    found = [(example, picture) for part in split for example, picture in zip(*part)]
    assert len(found) == len(examples)
    for example, picture in found:
        row = next(row for row, each in enumerate(pixel_values) if torch.equal(each, picture))
        assert examples[row] == example
    alike = Batch(examples[:1] * 3, pixel_values[:3])
    assert parts_by_length(alike) == [alike]


def test_texts_are_trained_to_be_those_without_a_picture(parts):
    """A teacher that sees the picture, or other tokens than the student's; text that the canvas says."""
    model, processor, pool = parts
    rows = Rows(processor, pool.canvas(np.random.default_rng(3)))
    upper = UpperLayers(model, rows.beginning, torch.float32)
    said = {"Hello!": "Hello.", "What is this?": "A picture of digits.", "Hi!": "Hello, hello!"}
    texts = texts_of_step(4, rows, pool, said, 5, seed=0)
    again, other = texts_of_step(4, rows, pool, said, 5, seed=0), texts_of_step(9, rows, pool, said, 5, seed=0)
    assert torch.equal(texts[0].pixel_values, again[0].pixel_values) and texts[1] == again[1]
    assert not torch.equal(texts[0].pixel_values, other[0].pixel_values)
    (beside, canvases), alone = texts
    total, labels = 0.0, 0
    with torch.no_grad():
        for seen, unseen, canvas in zip(beside, alone, canvases):
            logits = []
            for example, given in ((seen, {"pixel_values": canvas[None]}), (unseen, {})):
                ids = torch.tensor([[*rows.beginning, *example.ids]])
                places = [
                    place + len(rows.beginning) - 1 for place, label in enumerate(example.labels) if label != -100
                ]
                logits.append(model(input_ids=ids, **given).logits[0, places].log_softmax(-1))
            student, teacher = logits
            total += (teacher.exp() * (teacher - student)).sum()
            labels += len(student)
    found = distance_from_text(upper, *texts)
    assert found.requires_grad and found > 1e-4
    with pytest.raises(ValueError, match="chat template to write an answer beside a picture as it does without one"):
        distance_from_text(upper, texts[0], [rows.example("Hi!", "Another answer.", False)] * 5)
    torch.testing.assert_close(found.detach(), total / labels, rtol=1e-3, atol=1e-6)


def test_a_language_model_without_an_answer(parts, source, tmp_path):
    """An empty answer, which has no token to train, that ends the training of the others."""
    model, processor, pool = parts
    base = AutoModelForCausalLM.from_pretrained(language_model(source, tmp_path)).eval()
    prompts = TRAINING_PROMPTS[:3]
    assert all(answer.strip() for answer in own_answers(base, processor, prompts).values())
    base.generation_config.sequence_bias = {(processor.tokenizer.eos_token_id,): 100.0}
    assert own_answers(base, processor, prompts) == {}
    learner = copy.deepcopy(model)
    train(learner, processor, pool, {}, Recipe(steps=TEXT_EVERY, batch_size=2), seed=0)
    assert not torch.equal(learner.blocks[0].attn.o_proj.weight, model.blocks[0].attn.o_proj.weight)


def test_the_command(source, tmp_path, capsys):
    """`--steps` that does nothing without a language model; a source that fails after the tower was trained, or
    leaves an empty folder behind.
    """
    assert main(["demo", "--steps", "3", "--output", str(tmp_path / "a")]) != 0
    assert "--language-model" in capsys.readouterr().err
    missing = str(tmp_path / "missing.gguf")
    assert main(["demo", "--language-model", missing, "--output", str(tmp_path / "b")]) != 0
    assert missing in capsys.readouterr().err and not (tmp_path / "b").exists()
    (tmp_path / "c").mkdir()  # a folder of the user's
    assert main(["demo", "--language-model", missing, "--output", str(tmp_path / "c")]) != 0
    assert (tmp_path / "c").is_dir() and not any((tmp_path / "c").iterdir())
