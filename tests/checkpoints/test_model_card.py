"""Model cards: what they say, what they must not say, and whose they are."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, Trainer, TrainingArguments
from transformers.utils import hub

from helpers.checkout import ROOT
from helpers.models.chat_models import make_chat_model
from helpers.models.template_models import CHATML, make_processor, make_tokenizer
from helpers.models.template_models import make_chat_model as make_templated
from helpers.models.tiny_models import make_model, make_text, pixels, randomize, token_ids, vision_config
from helpers.models.tiny_towers import ANY_SIZE
from helpers.references.card_reading import card_of, rows_of
from hf_xattn import demo, retrofit
from hf_xattn.checkpoints.model_card import example_questions, write_model_card
from hf_xattn.commands.main import main
from hf_xattn.demo.canvases import WORDS


@pytest.fixture
def bases(tmp_path, monkeypatch):
    """A text-only and a vision checkpoint in folders."""
    monkeypatch.chdir(tmp_path)
    make_text().save_pretrained(tmp_path / "out" / "base")
    AutoModel.from_config(vision_config()).save_pretrained(tmp_path / "tower")
    return tmp_path


def test_what_a_card_says(tmp_path):
    """A card that the Hub cannot read, or whose figures are another model's."""
    text, vision = make_text(), AutoModel.from_config(vision_config())
    text.config.name_or_path, vision.config.name_or_path = "somebody/base-1b", "somebody/tower"
    model = retrofit(text, vision, every=2)
    model.save_pretrained(tmp_path)
    front, card = card_of(tmp_path)
    assert front == {
        "base_model": ["somebody/base-1b", "somebody/tower"],
        "library_name": "transformers",
        "pipeline_tag": "image-text-to-text",
        "tags": ["hf_xattn", "gated-cross-attention"],
    }
    assert "# base-1b with cross-attention" in card and "They are as initialised" in card
    rows = rows_of(card)
    added = sum(parameter.numel() for block in model.blocks for parameter in block.parameters())
    assert rows["parameters added (blocks)"] == f"{added:,}"
    assert rows["blocks in front of layers"] == "1, 3" and rows["tokens an image"] == "16"
    assert "## Training" not in card and "## Results" not in card
    randomize(model).save_pretrained(tmp_path)
    assert "They are as initialised" not in card_of(tmp_path)[1]


def test_tokens_of_a_tower_that_takes_any_size(tmp_path):
    """A number of tokens that is of no picture that the model will see: the card says of which size it is."""
    torch.manual_seed(0)
    model = retrofit(make_text(), AutoModel.from_config(ANY_SIZE["resnet"]()), every=2)
    model.save_pretrained(tmp_path)
    rows = rows_of(card_of(tmp_path)[1])
    shape = model.get_image_features(torch.zeros(1, 1, 3, 224, 224)).pooler_output.shape
    assert rows["tokens an image of 224 x 224 pixels"] == str(shape[-2]) and "tokens an image" not in rows
    assert {"K/V bytes an image of 224 x 224 pixels", "K/V bytes an image token"} < set(rows)
    assert rows["compute added a text token"].endswith("FLOP with one image of 224 x 224 pixels")


def test_saving_draws_no_random_numbers(tmp_path):
    """A run that goes another way because a checkpoint was saved."""
    model = make_model()
    before = torch.get_rng_state()
    model.save_pretrained(tmp_path)
    assert torch.equal(before, torch.get_rng_state())


def test_features_in_place_of_images(tmp_path):
    """A card that promises images to a model that has no vision tower."""
    retrofit(make_text(), every=2).save_pretrained(tmp_path)
    front, card = card_of(tmp_path)
    assert front["pipeline_tag"] == "text-generation" and "cross_attention_states=features" in card


@pytest.mark.parametrize("template", [CHATML, None])
def test_code_for_features(template, tmp_path, capsys):
    """Lines of a card that leave the chat template out, or that fail where a tokenizer has none."""
    tokenizer = make_tokenizer(template)
    config = make_templated(make_processor()).config.text_config
    model = randomize(retrofit(AutoModelForCausalLM.from_config(config), every=1, cross_attention={"context_size": 8}))
    model.eval().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    features = torch.randn(1, 3, 8)
    (code,) = re.findall("```python\n(.*?)```", card_of(tmp_path)[1], re.DOTALL)
    code = code.replace('name = "..."', f"name = {str(tmp_path)!r}").replace('"...", ...', '"what is it ?", features')
    exec(compile(code, "README.md", "exec"), {"features": features})
    if template is None:
        ids = tokenizer("what is it ?", return_tensors="pt")["input_ids"]
    else:
        chat = [{"role": "user", "content": "what is it ?"}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    tokens = model.generate(ids, cross_attention_states=features, max_new_tokens=64)
    assert capsys.readouterr().out == tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True) + "\n"


def test_folders_are_no_repositories(bases):
    """A path of somebody's machine on the Hub; a folder `out/base` that the card takes for the Hub's, from elsewhere
    too.
    """
    for text in ("out/base", bases / "out" / "base", AutoModelForCausalLM.from_pretrained("out/base")):
        retrofit(text, "tower", every=2).save_pretrained(bases / "model")
        front, card = card_of(bases / "model")
        assert "base_model" not in front and "license" not in front
        assert "made of `base` and `tower`" in card and str(bases) not in card and "out/" not in card
    retrofit("out/base", every=2).save_pretrained(bases / "model")
    (bases / "out").rename(bases / "gone")
    AutoModelForImageTextToText.from_pretrained("model").save_pretrained(bases / "again")
    assert "base_model" not in card_of(bases / "again")[0]


def test_a_card_names_a_licence_only_if_both_bases_have_it(bases):
    """A licence that nobody gave."""

    def licence(text, vision):
        for folder, given in (("out/base", text), ("tower", vision)):
            (bases / folder / "README.md").write_text(f"---\n{given}\n---\n# Card\n" if given else "# Card\n")
        retrofit("out/base", "tower", every=2).save_pretrained(bases / "model")
        front = card_of(bases / "model")[0]
        return {name: value for name, value in front.items() if name.startswith("license")}

    assert licence("license: mit", "license: mit") == {"license": "mit"}
    assert licence("license: mit", "license: apache-2.0") == {}
    assert licence("license: mit", None) == {}
    assert licence("license: mit", "license: [") == {}
    named = "license: other\nlicense_name: llama"
    assert licence(named, "license: other\nlicense_name: own") == {}
    assert licence(named, named) == {"license": "other", "license_name": "llama"}
    model = AutoModelForImageTextToText.from_pretrained(bases / "model")
    model.save_pretrained(bases / "again")
    assert card_of(bases / "again")[0]["license_name"] == "llama"


@pytest.mark.parametrize("change", ["own", "line", "front"])
def test_cards_of_persons_are_kept(tmp_path, change):
    """An afternoon's writing, gone with the next save."""
    model = make_model()
    if change == "own":
        written = "# My model\n"
    else:
        model.save_pretrained(tmp_path)
        written = (tmp_path / "README.md").read_text()
        written = (
            written + "\nMind the gap.\n" if change == "line" else written.replace("---\n", "---\nlicense: mit\n", 1)
        )
    (tmp_path / "README.md").write_text(written)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == written
    assert not write_model_card(model, tmp_path, results={"accuracy": 1})
    assert (tmp_path / "README.md").read_text() == written


def test_results_and_training(tmp_path):
    """Figures that get lost, or break the table."""
    model = make_model()
    model.save_pretrained(tmp_path)
    assert write_model_card(model, tmp_path, training={"data": "a | b"}, results={"accuracy": "97 %"})
    _, card = card_of(tmp_path)
    assert "| data | a \\| b |" in card and rows_of(card)["accuracy"] == "97 %"


def test_example_questions_come_back_from_the_card(tmp_path):
    """Questions that get lost, or a card of a stranger whose widget breaks a page."""
    model = make_model()
    model.save_pretrained(tmp_path)
    assert example_questions(str(tmp_path)) == example_questions(None) == example_questions("nosuch") == []
    asked = ["what is it ?", 'a "quoted": one | two']
    assert write_model_card(model, tmp_path, questions=asked)
    assert card_of(tmp_path)[0]["widget"] == [{"text": text} for text in asked]
    assert example_questions(str(tmp_path)) == asked
    for widget, found in (
        ("a ?", []),
        ([{"text": 3}, "b ?", {"src": "a.png"}, {"text": ""}, {"text": "c ?"}, {"text": "d" * 501}], ["c ?"]),
        ([{"text": f"{index} ?"} for index in range(99)], [f"{index} ?" for index in range(16)]),
    ):
        (tmp_path / "README.md").write_text(f"---\n{yaml.safe_dump({'widget': widget})}---\n")
        assert example_questions(str(tmp_path)) == found


def test_a_card_of_trainer_is_completed_and_not_lost(tmp_path):
    """Two cards that overwrite each other, or a run that ends at its card."""
    example = {"input_ids": token_ids()[0], "labels": token_ids()[0], "pixel_values": pixels()[0]}
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=1,
        report_to="none",
        use_cpu=True,
        save_steps=1,
        logging_steps=1,
    )
    trainer = Trainer(make_model(), arguments, train_dataset=[example] * 2, eval_dataset=[example])
    trainer.train()
    assert "## What was added" in (tmp_path / "checkpoint-2" / "README.md").read_text()
    trainer.save_model()
    trainer.create_model_card()
    drafted = (tmp_path / "README.md").read_text()
    assert "generated automatically according to the information the Trainer had" in drafted
    trainer.save_model()
    assert (tmp_path / "README.md").read_text() == drafted
    loss = trainer.evaluate()["eval_loss"]
    assert write_model_card(trainer.model, tmp_path, trainer)
    front, card = card_of(tmp_path)
    rows = rows_of(card)
    assert (
        rows["optimizer steps"] == "2" and rows["examples a step"] == "1" and rows["learning rate"] == "5e-05, linear"
    )
    assert rows["evaluation loss"] == f"{loss:.4f} (step 2)"
    trainer.create_model_card()


def test_uploads_carry_the_card(tmp_path, monkeypatch):
    """Transformers' empty form on the Hub, in place of the card in the folder."""
    uploaded = {}

    class Repository:
        repo_id = "somebody/model"

    class Api:
        def create_repo(self, *args, **kwargs):
            return Repository

    def upload(self, working_dir, repo_id, files_timestamps, **kwargs):
        uploaded.update({path.name: path.read_text() for path in Path(working_dir).glob("*.md")})
        uploaded.update({path.name: path.read_text() for path in Path(working_dir).glob("*.py")})

    def blank(repo_id, tags=None, token=None):
        described = "This is the model card of a 🤗 transformers model that has been pushed on the Hub. This model card has been automatically generated."  # noqa: E501
        return ModelCard(f"---\nlibrary_name: transformers\n---\n# Model Card\n{described}\n")

    monkeypatch.setattr(hub, "hf_api", Api)
    monkeypatch.setattr("transformers.modeling_utils.hf_api", Api)
    monkeypatch.setattr(hub, "create_and_tag_model_card", blank)
    monkeypatch.setattr("transformers.modeling_utils.create_and_tag_model_card", blank)
    monkeypatch.setattr(hub.PushToHubMixin, "_upload_modified_files", upload)
    model = make_model()
    model.save_pretrained(tmp_path / "model", push_to_hub=True, repo_id="somebody/model")
    assert "## What was added" in uploaded["README.md"] and "xattn_stub.py" in uploaded
    uploaded.clear()
    model.push_to_hub("somebody/model")
    assert "## What was added" in uploaded["README.md"]
    (tmp_path / "model" / "README.md").write_text("# Mine\n")
    model.save_pretrained(tmp_path / "model", push_to_hub=True, repo_id="somebody/model")
    assert uploaded["README.md"] == "# Mine\n" == (tmp_path / "model" / "README.md").read_text()


def test_the_train_command(tmp_path):
    """A trained model whose card says nothing of its training, or where the pictures were."""
    from PIL import Image

    model = make_chat_model(tmp_path)
    data = tmp_path / "pictures"
    data.mkdir()
    for index in range(4):
        Image.new("RGB", (32, 32), (60 * index, 0, 0)).save(data / f"{index}.png")
    lines = [json.dumps({"file_name": f"{index}.png", "text": "a picture"}) for index in range(4)]
    (data / "metadata.jsonl").write_text("\n".join(lines))
    options = "--steps 2 --batch-size 2 --eval-share 0.25 --text-share 0 --device cpu".split()
    assert main(["train", str(model), "--data", str(data), "--output", str(tmp_path / "trained"), *options]) in (
        0,
        None,
    )
    _, card = card_of(tmp_path / "trained")
    rows = rows_of(card)
    assert (
        rows["examples"] == "3 of the folder pictures" and rows["optimizer steps"] == "2" and "evaluation loss" in rows
    )
    assert str(tmp_path) not in card


DEMO_CARD = (ROOT / "model_cards" / "hf-xattn-demo.md").read_text()


@pytest.mark.slow
def test_the_demos_card_says_what_a_run_gives(tmp_path, capsys):
    """Accuracy, or attention on the right digit, that nobody else gets; a last line whose answer is wrong."""
    pytest.importorskip("sklearn")
    results, said = demo.run(tmp_path / "out"), rows_of(DEMO_CARD)
    _, *command = shlex.split(capsys.readouterr().out.splitlines()[-1].removeprefix("Next: "))
    assert main(command) == 0
    digits = [int(digit) for digit in Path(command[3]).stem.split("-")[1:]]
    assert capsys.readouterr().out.split()[1::2] == [WORDS[digit] for digit in digits]
    share = {name: float(value.split()[0]) / 100 for name, value in said.items() if value.endswith("%")}
    assert results["digits right, retrofitted model"] == pytest.approx(
        share["digits right, retrofitted model"], abs=0.02
    )
    assert results["digits right, text-only model"] == pytest.approx(share["digits right, text-only model"], abs=0.05)
    assert results["canvases right, retrofitted model"] == pytest.approx(share["canvases without a mistake"], abs=0.03)
    attention = next(value for name, value in said.items() if name.startswith("attention on the digit"))
    for layer, value in zip((1, 2, 3), attention.replace("%", "").split(",")):
        assert results[f"attention on the digit, layer {layer}"] == pytest.approx(float(value) / 100, abs=0.1)
    assert said["text-only logits bit-identical to the base, before and after training"] == "yes, yes"
    assert (
        results["text-only logits bit-identical before training"]
        and results["text-only logits bit-identical after training"]
    )
