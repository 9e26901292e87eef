"""`--distill-text`: rows without a picture, trained to be answered beside one as without it."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor

from helpers.inputs.training_examples import CAPTIONS, draw, write_examples
from helpers.models.template_models import CHATML, make_chat_model, make_processor
from helpers.processes.command_runs import interrupted, run, run_training
from helpers.processes.training_runs import short_arguments
from helpers.processes.warm_processes import run_ranks
from hf_xattn import XAttnDataCollator, freeze, load_rows
from hf_xattn.data.loading import Shuffled
from hf_xattn.data.pictures import picture_parts
from hf_xattn.training import kept_text, run_data
from hf_xattn.training.bad_rows import BadRowError, BadRowsFile, Place
from hf_xattn.training.kept_text import DistillingCollator, DistillingReader
from hf_xattn.training.run_folder import CHECKPOINTS
from hf_xattn.training.trainer import RunTrainer, kl_of_answers


TEXTS = [
    {"question": "what is two and two ?", "answer": "four."},
    {"question": "user ?", "answer": "a longer answer, of system and assistant."},
    {
        "messages": [
            {"role": "system", "content": "a red circle."},
            {"role": "user", "content": "what ?"},
            {"role": "assistant", "content": "in the picture."},
            {"role": "user", "content": "is ?"},
            {"role": "assistant", "content": "a blue square."},
        ]
    },
]
MIXED = [CAPTIONS[0], TEXTS[0], CAPTIONS[1], TEXTS[1], TEXTS[2], CAPTIONS[2], CAPTIONS[3]]
FAST = "--batch-size 2 --learning-rate 0.01 --log-steps 2".split()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distillation") / "model"
    processor = make_processor(CHATML)
    seeing = make_chat_model(processor)
    with torch.no_grad():  # small enough to become nothing in a few steps
        for block in seeing.blocks:
            block.attn.o_proj.weight *= 0.03
            block.mlp.down_proj.weight *= 0.03
    seeing.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def parts(folder, dtype=torch.float64):
    """The model to train, its processor, and the bare base: another object, without blocks."""
    seeing = freeze(AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)).train()
    base = AutoModelForCausalLM.from_config(seeing.config.text_config, dtype=dtype).eval()
    kept = {name: weight for name, weight in seeing.model.text_model.state_dict().items() if "cross_att" not in name}
    base.load_state_dict(kept)
    return seeing, AutoProcessor.from_pretrained(folder), base


def answers_of(processor, messages):
    """Ids of a chat, and the places of the tokens of its answers, each with the token that ends the turn."""

    def ids(stop, **given):
        return processor.apply_chat_template(messages[:stop], tokenize=True, return_tensors="pt", **given)

    whole, places = ids(None), []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            start, end = ids(index, add_generation_prompt=True).shape[1], ids(index + 1).shape[1]
            places += range(start, end - 1)  # without the new line after the end of the turn
    return whole, places


def with_image(messages, image):
    first = next(index for index, message in enumerate(messages) if message["role"] == "user")
    content = [{"type": "image", "image": image}, {"type": "text", "text": messages[first]["content"]}]
    return [*messages[:first], {"role": "user", "content": content}, *messages[first + 1 :]]


def reference(seeing, processor, base, pictures, texts, weight):
    """The loss, one row at a time, without padding, and each divergence summed term by term."""
    entropy, divergence, count = 0.0, 0.0, 0
    for messages, image in pictures:
        ids, places = answers_of(processor, messages)
        logits = seeing(
            ids, pixel_values=processor.image_processor(image, return_tensors="pt")["pixel_values"].double()
        )
        for place in places:
            entropy = entropy - torch.log(torch.softmax(logits.logits[0, place - 1], 0)[ids[0, place]])
        count += len(places)
    kls = []
    for messages, image in texts:
        (ids, places), (bare, others) = (
            answers_of(processor, each) for each in (with_image(messages, image), messages)
        )
        assert ids[0, places].tolist() == bare[0, others].tolist()
        pixels = processor.image_processor(image, return_tensors="pt")["pixel_values"].double()
        said, expected = seeing(ids, pixel_values=pixels).logits[0], base(bare).logits[0].detach()
        for place, other in zip(places, others):
            p, q = torch.softmax(expected[other - 1], 0), torch.softmax(said[place - 1], 0)
            kls.append((p * (p / q).log()).sum())
        count += len(places)
    divergence = torch.stack(kls).sum()
    return (entropy + weight * divergence) / count, divergence / len(kls), count


def messages_of(line):
    return line.get("messages") or [
        {"role": "user", "content": line["question"]},
        {"role": "assistant", "content": line["answer"]},
    ]


def trainer_of(seeing, folder, weight=0.7):
    return RunTrainer(distill_text=weight, model=seeing, args=short_arguments(folder))


def rows_of(folder, lines):
    return load_rows(write_examples(folder, lines))


def test_loss_and_gradient(model, tmp_path):
    """A divergence of other tokens, in the other direction, with another weight or divisor, or against a model that is
    not the base.
    """
    seeing, processor, base = parts(model)
    rows = rows_of(tmp_path / "data", [CAPTIONS[0], *TEXTS, CAPTIONS[1]])
    colours = (None, "green", "blue", "black", None)
    collate = DistillingCollator(XAttnDataCollator(processor, padding_side="right"))
    pictures = [None if each is None else str(tmp_path / "data" / f"{each}.png") for each in colours]
    batch = collate([rows[index] for index in range(5)], pictures)
    assert batch["distilled"].tolist() == [False, True, True, True, False]
    batch["pixel_values"] = batch["pixel_values"].double()
    trainer = trainer_of(seeing, tmp_path / "run")

    texts = [(messages_of(line), draw(colour)) for line, colour in zip(TEXTS, colours[1:])]
    captions = [
        (
            [with_image([{"role": "user", "content": rows.prompt}], draw(colour))[0], rows[place]["messages"][1]],
            draw(colour),
        )
        for place, colour in ((0, "red"), (4, "blue"))
    ]
    expected, mean, count = reference(seeing, processor, base, captions, texts, 0.7)
    assert count == int((batch["labels"] != -100).sum()) and mean > 1e-3
    loss = trainer.compute_loss(seeing, dict(batch), num_items_in_batch=torch.tensor(count))
    # transformers computes the cross-entropy in float32.
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    trained = [weight for weight in seeing.parameters() if weight.requires_grad]
    for own, other in zip(*(torch.autograd.grad(each, trained, retain_graph=True) for each in (loss, expected))):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-8)
    logs = {"loss": 0.0}
    trainer.log(logs)
    assert logs["text_kl"] == pytest.approx(mean.item(), rel=1e-3)
    again = {"loss": 0.0}
    trainer.log(again)
    assert "text_kl" not in again  # since the last log there was no text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_teacher_is_the_base(dtype, model, tmp_path):
    """A teacher that drifts with the blocks."""
    seeing, processor, base = parts(model, dtype)
    rows = rows_of(tmp_path / "data", TEXTS)
    collate = DistillingCollator(XAttnDataCollator(processor, padding_side="right"))
    batch = collate([rows[index] for index in range(3)], [str(tmp_path / "data" / "red.png")] * 3)
    teacher = {name.removeprefix("teacher_"): each for name, each in batch.items() if name.startswith("teacher_")}
    logits = trainer_of(seeing, tmp_path / "run")._teacher_logits(seeing, batch, teacher)
    expected = base(teacher["input_ids"], attention_mask=teacher["attention_mask"]).logits
    assert torch.equal(logits, expected) and not logits.requires_grad
    alone = seeing(
        batch["input_ids"], attention_mask=batch["attention_mask"], pixel_values=batch["pixel_values"].to(dtype)
    )
    assert not torch.equal(alone.logits[:, : expected.shape[1]], expected)


def test_only_texts_and_infinite_logits(model, tmp_path):
    """A batch without any label of cross-entropy, whose loss is NaN; a token that no model says, with a gradient of
    NaN.
    """
    seeing, processor, _ = parts(model, torch.float32)
    rows = rows_of(tmp_path / "data", TEXTS)
    collate = DistillingCollator(XAttnDataCollator(processor, padding_side="right"))
    batch = collate([rows[0]], [str(tmp_path / "data" / "red.png")])
    trainer = trainer_of(seeing, tmp_path / "run")
    loss = trainer.compute_loss(seeing, batch, num_items_in_batch=torch.tensor(5))
    assert loss > 0 and torch.isfinite(loss)
    own = torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(0))
    own[..., 2] = -torch.inf
    labels, own = torch.tensor([[-100, 1, 3, -100]]), own.requires_grad_()
    kl, tokens = kl_of_answers(own, labels, own.detach().flip(1), labels)
    (gradient,) = torch.autograd.grad(kl, own)
    assert tokens == 2 and torch.isfinite(kl) and torch.isfinite(gradient).all() and gradient.abs().sum() > 0


def test_a_cut_text_is_compared_at_the_same_tokens(model, tmp_path):
    """A text that is cut beside a picture, so that its tokens are compared with those of other places."""
    _, processor, _ = parts(model)
    rows = rows_of(tmp_path / "data", TEXTS)
    picture = str(tmp_path / "data" / "red.png")
    whole = DistillingCollator(XAttnDataCollator(processor, padding_side="right"))([rows[1]], [picture])
    length = whole["input_ids"].shape[1] - 8
    cut = DistillingCollator(XAttnDataCollator(processor, padding_side="right", max_length=length))(
        [rows[1]], [picture]
    )
    student, teacher = (each[each != -100].tolist() for each in (cut["labels"], cut["teacher_labels"]))
    every = whole["labels"][whole["labels"] != -100].tolist()
    assert student == teacher == every[: len(student)] and len(student) < len(every)
    left = DistillingCollator(XAttnDataCollator(processor, padding_side="left", max_length=length))(
        [rows[1]], [picture]
    )
    assert left["teacher_labels"][left["teacher_labels"] != -100].tolist() == student
    assert torch.equal(cut["teacher_input_ids"][0], whole["teacher_input_ids"][0, : cut["teacher_input_ids"].shape[1]])


def test_a_template_that_answers_otherwise_beside_a_picture(tmp_path):
    """Tokens of two different answers that are compared with one another."""
    template = CHATML.replace(
        "{%- for m in messages -%}", "{%- for m in messages -%}{%- if '<image>' in text(m.content) -%}a{%- endif -%}"
    )
    rows = rows_of(tmp_path / "data", TEXTS)
    collate = XAttnDataCollator(make_processor(template), padding_side="right", train_on="all")
    with pytest.raises(ValueError, match="Row 1 of the batch: Expected the same answer tokens"):
        DistillingCollator(collate)([rows[0], rows[1]], [None, str(tmp_path / "data" / "red.png")])


def reader_of(processor, folder=None):
    collate = XAttnDataCollator(processor, padding_side="right")
    return DistillingReader(collate, None if folder is None else BadRowsFile(folder, 1.0).add)


def test_pictures_are_of_the_next_row_that_has_one(model, tmp_path):
    """A picture that depends on what a process has read before; a row to evaluate on that is trained on."""
    processor = AutoProcessor.from_pretrained(model)
    rows = rows_of(tmp_path / "data", MIXED)
    order = Shuffled(rows, 14, seed=1)
    pictures = [picture_parts(rows[order.index(place)]) for place in range(40)]
    reader = reader_of(processor)
    for place in range(14):
        batch, alone = (each([Place(order, place)]) for each in (reader, reader_of(processor)))
        assert batch.keys() == alone.keys() and all(torch.equal(batch[name], alone[name]) for name in batch)
        assert ("distilled" in batch) == (not pictures[place])
        shown = next(pictures[each][0]["path"] for each in range(place, 40) if pictures[each])
        pixels = processor.image_processor(draw(os.path.basename(shown)[:-4]), return_tensors="pt")["pixel_values"]
        assert torch.equal(batch["pixel_values"].flatten(), pixels.flatten())
    batch = reader([Place(rows, 1)])
    assert "distilled" not in batch and "pixel_values" not in batch


def test_a_picture_that_cannot_be_read(model, tmp_path, monkeypatch):
    """A good text that is left out, or blamed, for the picture of another row."""
    processor = AutoProcessor.from_pretrained(model)
    folder = tmp_path / "data"
    rows = rows_of(folder, [*TEXTS, *CAPTIONS[:2]])
    order = Shuffled(rows, 5, seed=0)
    places = [bool(picture_parts(rows[order.index(place)])) for place in range(30)]
    start = next(place for place in range(20) if not places[place] and places[place + 1])
    bad = order.index(start + 1)
    (folder / rows[bad]["messages"][0]["content"][0]["path"]).write_bytes(b"no picture")
    with pytest.raises(BadRowError, match=rf"{rows.place_of(bad)[1]}: the image .* cannot be read"):
        reader_of(processor)([Place(order, start)])
    reader = reader_of(processor, tmp_path)
    batch = reader([Place(order, start)])
    other = next(place for place in range(start + 2, 30) if places[place] and order.index(place) != bad)
    shown = rows[order.index(other)]["messages"][0]["content"][0]["path"]
    pixels = processor.image_processor(draw(os.path.basename(shown)[:-4]), return_tensors="pt")["pixel_values"]
    assert torch.equal(batch["pixel_values"].flatten(), pixels.flatten())
    assert BadRowsFile(tmp_path, 1.0).count() == 0
    monkeypatch.setattr(kept_text, "SEARCHED", other - start - 1)
    with pytest.raises(BadRowError, match="Expected a row with an image in the .* rows that follow .*line"):
        reader_of(processor, tmp_path)([Place(order, start)])


def weights(folder):
    return load_file(folder / "model.safetensors")


def close(one, other, **how):
    return all(torch.allclose(weight, other[name], **how) for name, weight in one.items())


def history(output, step):
    state = json.loads((output / CHECKPOINTS / f"checkpoint-{step}" / "trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if "loss" in entry]


@pytest.mark.slow
def test_accumulated_processes_and_features(model, tmp_path, capsys):
    """A mean of means over micro-batches or processes with other numbers of texts; a process without a text that waits
    for ever; features that give another loss than pixels.
    """
    data = write_examples(tmp_path / "data", [*MIXED, CAPTIONS[1]])  # batches of any size have the same order
    options = [model, "--data", data, "--distill-text", "0.5", "--steps", "6", "--save-steps", "3"]
    options += ["--learning-rate", "0.01", "--log-steps", "1"]
    encoded = tmp_path / "encoded"
    assert run(capsys, "encode-features", model, "--data", data, "--output", encoded, "--device", "cpu")[0] == 0
    runs = {
        "whole": ["--batch-size", "4"],
        "accumulated": ["--batch-size", "1", "--gradient-accumulation", "4"],
        "features": ["--batch-size", "4", "--features", encoded, "--stream"],
    }
    for name, more in runs.items():
        status, _, error = run_training(capsys, *options, *more, "--output", tmp_path / name)
        assert status == 0, error
    words = [*options, "--batch-size", "1", "--gradient-accumulation", "2", "--output", tmp_path / "ranks"]
    run_ranks(2, ["-m", "hf_xattn", "train", *words, "--text-share", "0", "--device", "cpu"])
    whole, logged = weights(tmp_path / "whole"), history(tmp_path / "whole", 6)
    assert not close(whole, weights(model), atol=1e-3) and sum("text_kl" in entry for entry in logged) > 3
    for name in ("accumulated", "features", "ranks"):
        for own, other in zip(history(tmp_path / name, 6), logged, strict=True):
            assert own["loss"] == pytest.approx(other["loss"], rel=1e-3), name
            text = other.get("text_kl")  # None of a batch without a text
            assert own.get("text_kl") == (None if text is None else pytest.approx(text, rel=2e-2)), name
        # Adam's first steps turn roundings of tiny gradients into whole steps.
        assert close(weights(tmp_path / name), whole, atol=2e-2), name
    card = (tmp_path / "whole" / "README.md").read_text()
    assert "for texts beside an image | 0.5 |" in card


@pytest.mark.parametrize("stream", [pytest.param([], marks=pytest.mark.slow), ["--stream", "--workers", "2"]])
def test_a_resumed_run_has_the_weights_of_a_whole_one(stream, model, tmp_path, capsys, monkeypatch):
    """A run that goes on with other pictures beside its texts, or with another weight."""
    data = write_examples(tmp_path / "data", MIXED)
    options = [model, "--data", data, "--distill-text", "2", "--steps", "6", "--save-steps", "2", *stream, *FAST]
    assert run_training(capsys, *options, "--output", tmp_path / "whole")[0] == 0
    out = ["--output", tmp_path / "stopped"]
    interrupted(capsys, monkeypatch, 3, *options, *out)
    other = [*options[:3], "--distill-text", "1", *options[5:]]
    status, _, error = run_training(capsys, *other, *out, "--resume")
    assert status == 2 and "`--distill-text` to be 2.0" in error
    status, printed, error = run_training(capsys, *options, *out, "--resume")
    assert status == 0 and "checkpoint-2" in printed, error
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "stopped")
    assert all(torch.equal(resumed[name], weight) for name, weight in whole.items())


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_training_lowers_the_divergence_from_the_text_model(dtype, model, tmp_path, capsys):
    """Training that does not do what it is for.

    The weight is large because cross-entropy outweighs the KL of a nearly uniform random model: with 1 it did not fall.
    So this says that the gradient goes the right way, not which weight is useful.
    """
    data = write_examples(tmp_path / "data", MIXED)
    options = (
        f"--distill-text 1000 --steps 24 --batch-size 4 --log-steps 3 --learning-rate 0.003 --dtype {dtype}".split()
    )
    status, _, error = run_training(capsys, model, "--data", data, *options, "--output", tmp_path / "out")
    assert status == 0, error
    logged = [entry["text_kl"] for entry in history(tmp_path / "out", 24)]
    assert logged[-1] < logged[0] / 4, logged


def test_texts_at_equal_distances(model, tmp_path, capsys, monkeypatch):
    """Texts that a look at every fourth row of a stream does not meet, so that the run is refused."""
    monkeypatch.setattr(run_data, "STREAM_ROWS", 10)
    data = write_examples(tmp_path / "data", [*CAPTIONS[:3], TEXTS[0]] * 10)
    options = ["--data", data, "--distill-text", "1", "--stream", "--steps", "1", *FAST]
    status, _, error = run_training(capsys, model, *options, "--output", tmp_path / "out")
    assert status == 0, error


def test_options_that_cannot_act_are_refused_before_any_work(model, tmp_path, capsys):
    """Work that is done before the error, or an option that has no effect."""
    data = write_examples(tmp_path / "data", MIXED)
    pictures = write_examples(tmp_path / "pictures", CAPTIONS)
    texts = write_examples(tmp_path / "texts", TEXTS)
    start = [{"role": "system", "content": "what ?"}, {"role": "assistant", "content": "four."}]
    unasked = write_examples(tmp_path / "unasked", [CAPTIONS[0], {"messages": start}])
    for given, told in (
        (["--data", data, "--distill-text", "0"], "`--distill-text` must be above 0, got 0.0"),
        (["--data", data, "--distill-text", "nan"], "`--distill-text` must be above 0, got nan"),
        (["--data", data, "--distill-text", "inf"], "`--distill-text` must be above 0, got inf"),
        (["--data", data, "--distill-text", "1", "--train-text"], "`--distill-text` or `--train-text`, got both"),
        (["--data", pictures, "--distill-text", "1"], "Expected a row without an image in"),
        (["--data", pictures, "--distill-text", "1", "--stream"], "Expected a row without an image in"),
        (["--data", texts, "--distill-text", "1"], "Expected an image in"),
        (["--data", unasked, "--distill-text", "1"], "line 2: Expected a user message for the 1 image(s)"),
        (["--data", data, "--distill-text", "1", "--max-length", "28"], "shown with the image of another row"),
    ):
        status, _, error = run_training(capsys, model, *given, "--output", tmp_path / "out", "--steps", "1")
        assert status == 2 and told in error, (given, error)
    assert not (tmp_path / "out").exists()
