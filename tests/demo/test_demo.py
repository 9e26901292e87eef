"""The demo, from data to picture, in a few steps."""

import contextlib
import dataclasses
import importlib
import io
import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor

from helpers.checkout import ROOT
from helpers.processes.command_runs import check_last_line
from helpers.references.card_reading import card_of, rows_of
from hf_xattn import demo
from hf_xattn.checkpoints.model_card import example_questions
from hf_xattn.demo.canvases import (
    DIGIT,
    HEIGHT,
    PATCH,
    WIDTH,
    DigitPool,
    patch_labels,
    picture_of,
    sentence,
    to_pixel_values,
)
from hf_xattn.demo.run import _accuracy
from hf_xattn.utils.transformers_api import AutoImageProcessor


RUN = importlib.import_module("hf_xattn.demo.run")  # `demo.run` is the function


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "out"
    threads, printed = torch.get_num_threads(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        results = demo.run(folder, quick=True)
    assert torch.get_num_threads() == threads
    return folder, results, printed.getvalue()


def test_the_last_line_answers(finished, capsys):
    """A newcomer's first question that comes back empty or wrong, because the command asks in another form than the
    training.
    """
    check_last_line(finished[2], capsys, finished[0])
    assert example_questions(str(finished[0] / "model")) == [demo.PROMPT]


def test_exactness_and_counts(finished):
    """A base that changed while blocks trained, or K/V projected at every step."""
    folder, results, _ = finished
    assert results["text-only logits bit-identical before training"]
    assert results["text-only logits bit-identical after training"]
    assert results["K/V projections in 8 steps"] == results["blocks"] == 3
    assert json.loads((folder / "results.json").read_text()) == results


def test_attention_is_on_the_digit(finished):
    """A share that is taken at the word's own position, of another patch, or of another row."""
    folder, results, _ = finished
    assert results["attention on the digit, if it were even"] == 1 / 13  # a class token and twelve patches
    assert all(0 < results[f"attention on the digit, layer {layer}"] < 1 for layer in (1, 2, 3))
    canvas = (
        DigitPool(held_out=True).canvas(np.random.default_rng(0))._replace(digits=[1, 2], corners=[(0, 11), (12, 40)])
    )
    weights = torch.zeros(1, 1, 8, 13)
    weights[..., 2, 1 + 1] = 0.25  # `first` is at 2 and chooses the word of the digit in patch (0, 1)
    weights[..., 4, 1 + 6 + 4] = 0.75
    model = AutoModelForImageTextToText.from_pretrained(folder / "model")
    processor = AutoProcessor.from_pretrained(folder / "model")
    pictures = [picture_of(canvas)]
    real = RUN._maps(model, processor, pictures)
    assert [processor.decode(real.tokens[0, position]) for position in (0, 1)] == demo.PROMPT.split()
    fake = dataclasses.replace(real, weights=[weights] * 3, tokens=real.tokens[:, :8])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RUN, "_maps", lambda *_: fake)
        shares = RUN.attention_on_digits(model, processor, [canvas], pictures)
    assert shares["attention on the digit, layer 2"] == 0.5
    assert (folder / "attention.png").exists()


def test_artifacts_load_with_the_auto_classes(finished):
    """A checkpoint that only the demo itself can read."""
    folder, *_ = finished
    assert AutoModelForCausalLM.from_pretrained(folder / "text").config.model_type == "llama"
    model = AutoModelForImageTextToText.from_pretrained(folder / "model")
    assert any((block.attn.o_proj.weight != 0).any() for block in model.blocks)
    processor = AutoProcessor.from_pretrained(folder / "model")
    files = demo.example_images(folder)
    assert len(files) == 8
    inputs = processor(text=demo.PROMPT, images=Image.open(files[0]))
    assert model.generate(**inputs, max_new_tokens=3).shape[1] > inputs["input_ids"].shape[1]
    demo.run(folder, quick=True)  # its own folder may be written over


def test_the_card_is_of_this_model(finished):
    """A published card with figures of a model that the demo no longer makes; a saved one that says nothing of the
    run.
    """
    folder, results, _ = finished
    said = rows_of((ROOT / "model_cards" / "hf-xattn-demo.md").read_text())
    front, card = card_of(folder / "model")
    made = rows_of(card)
    same = ("text decoder", "vision tower", "blocks in front of layers", "block", "tokens an image")
    for name in (*same, "parameters added (blocks)", "parameters added (connector)"):
        assert said[name] == made[name], name
    steps = f"K/V projections in 8 steps, with {results['blocks']} blocks"
    assert int(said[steps]) == results["K/V projections in 8 steps"]
    assert made["held-out canvases"] == "32" and made["optimizer steps"] == "10" and "as initialised" not in card
    assert "base_model" not in front and str(folder) not in card


def test_chat_is_the_prompt_of_training(finished):
    """A chat with the demo's model that asks in other words than those it learnt."""
    folder, *_ = finished
    processor = AutoProcessor.from_pretrained(folder / "model")
    files = demo.example_images(folder)[:2]
    question = {"type": "text", "text": demo.PROMPT}
    chat = [{"role": "user", "content": [{"type": "image", "path": files[0]}, question]}]
    inputs = processor.apply_chat_template(chat, tokenize=True, return_dict=True, add_generation_prompt=True)
    expected = processor(text=demo.PROMPT, images=files[0])
    assert inputs.keys() == expected.keys() and all(torch.equal(inputs[name], expected[name]) for name in inputs)
    chat.append({"role": "assistant", "content": "first seven second two"})
    said = processor.apply_chat_template(chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    trained = [*processor.tokenizer(sentence([7, 2]))["input_ids"], processor.tokenizer.eos_token_id]
    assert said["input_ids"][0].tolist() == trained
    prompt = len(processor.tokenizer(demo.PROMPT)["input_ids"])
    assert said["assistant_masks"][0].tolist() == [0] * prompt + [1] * (len(trained) - prompt)
    chat.append({"role": "user", "content": [{"type": "image", "path": files[1]}, question]})
    again = processor.apply_chat_template(chat, tokenize=True, return_dict=True, add_generation_prompt=True)
    assert again["input_ids"][0].tolist() == trained + trained[:prompt] and again["pixel_values"].shape[1] == 2
    partial = [chat[0], {"role": "assistant", "content": "first seven"}]
    ids = processor.apply_chat_template(partial, tokenize=True, continue_final_message=True)
    assert ids[0].tolist() == trained[: prompt + 2]


def test_canvases_hold_the_digits_that_their_labels_name():
    """Held-out digits that training saw; digits that overlap or stick out; labels that do not say what stands there."""
    train, test = DigitPool(held_out=False), DigitPool(held_out=True)
    assert not set(train.indices) & set(test.indices)
    assert len(train.indices) + len(test.indices) == 1797
    held_out = {test.images[index].tobytes() for index in test.indices}
    offsets = set()
    for seed in range(50):
        canvas = train.canvas(np.random.default_rng(seed))
        assert 1 <= len(canvas.digits) <= 3
        columns = [column for _, column in canvas.corners]
        assert all(later - earlier >= DIGIT for earlier, later in zip(columns, columns[1:]))
        digits, places = patch_labels(canvas)
        assert (digits < 10).sum() == len(canvas.digits)
        rest = canvas.pixels.copy()
        for place, (digit, (row, column)) in enumerate(zip(canvas.digits, canvas.corners)):
            assert 0 <= row <= HEIGHT - DIGIT and 0 <= column <= WIDTH - DIGIT
            assert digits[places == place].tolist() == [digit]
            spot = rest[row : row + DIGIT, column : column + DIGIT]
            assert spot.any() and spot.tobytes() not in held_out
            spot[:] = 0
            offsets.add((row % PATCH, column % PATCH))
        assert not rest.any()
    assert len(offsets) == (PATCH - DIGIT + 1) ** 2
    assert sentence([7, 2]) == "digits : first seven second two"


def test_training_pixels_are_the_processors(finished):
    """A model that is trained on other pixels than it is asked about."""
    folder, *_ = finished
    processor = AutoImageProcessor.from_pretrained(folder / "vision")
    canvas = DigitPool(held_out=True).canvas(np.random.default_rng(0))
    expected = processor([picture_of(canvas)], return_tensors="pt")["pixel_values"]
    assert torch.allclose(to_pixel_values(canvas), expected, atol=1e-6)


def test_accuracy_counts_places():
    """The right digits in the wrong order, counted as right."""
    canvas = DigitPool(held_out=True).canvas(np.random.default_rng(0))._replace(digits=[1, 2])
    assert _accuracy([["first", "one", "second", "two"]], [canvas]) == (1.0, 1.0)
    assert _accuracy([["first", "two", "second", "one"]], [canvas]) == (0.0, 0.0)
    assert _accuracy([["first", "one"]], [canvas]) == (0.5, 0.0)


def test_a_folder_with_other_files_is_not_written_over(tmp_path):
    """Somebody's folder written over."""
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file"):
        demo.run(tmp_path / "file")
    with pytest.raises(ValueError, match="other files"):
        demo.run(tmp_path)


def test_without_scikit_learn(tmp_path, monkeypatch):
    """A traceback about sklearn minutes later, or a folder left behind."""
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match="The demo needs scikit-learn: pip install"):
        demo.run(tmp_path / "out")
    assert not (tmp_path / "out").exists()
