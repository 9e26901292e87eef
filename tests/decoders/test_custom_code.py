"""Decoders whose code is not transformers' own."""

import json
import shutil

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from helpers.models.checkpoints_with_code import make_custom, save_with_code
from helpers.models.custom_decoder import CustomDecoderConfig, CustomDecoderForCausalLM
from helpers.models.tiny_models import make_model, make_text, pixels, randomize, token_ids, vision_config
from helpers.models.word_models import make_picture, make_text_checkpoint, make_vision_checkpoint
from hf_xattn import XAttnConfig, XAttnForConditionalGeneration, XAttnModel, retrofit
from hf_xattn.commands.main import main
from hf_xattn.training.run_folder import OPTIONS_FILE
from hf_xattn.utils.custom_code import UnreadConfig


def same_state(first, second):
    first, second = first.state_dict(), second.state_dict()
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@torch.no_grad()
@pytest.mark.parametrize("base", [True, False])
def test_loaded_weights_stay(registered_decoder, tmp_path, base):
    """A decoder's own initialisation, which writes in place, run over its loaded weights."""
    text = make_custom()
    text.save_pretrained(tmp_path / "text")
    model = randomize(retrofit(tmp_path / "text", AutoModel.from_config(vision_config()), every=2))
    expected = make_custom()(token_ids()).logits
    assert torch.equal(model(token_ids()).logits, expected)
    model.save_pretrained(tmp_path / "model")
    auto_class = AutoModel if base else AutoModelForImageTextToText
    loaded, info = auto_class.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["missing_keys"]
    same_state(loaded, model.model if base else model)


@torch.no_grad()
def test_code_comes_along(checkpoints):
    """A model that was retrofitted with `trust_remote_code=True` and saved, and that nobody can load."""
    folder = checkpoints / "model"
    made = randomize(retrofit(checkpoints / "text", checkpoints / "vision", every=2, trust_remote_code=True)).eval()
    made.save_pretrained(folder)
    for name in ("text", "vision"):
        shutil.rmtree(checkpoints / name)
    assert {"custom_decoder.py", "custom_tower.py"} <= {file.name for file in folder.iterdir()}
    expected = made(token_ids(), pixel_values=pixels()).logits
    for auto_class in (AutoModelForImageTextToText, XAttnForConditionalGeneration):
        loaded, info = auto_class.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        same_state(loaded, made)
        assert torch.equal(loaded(token_ids(), pixel_values=pixels()).logits, expected)
        assert type(loaded.config.text_config).__name__ == "CustomDecoderConfig"
    assert type(AutoModel.from_pretrained(folder, trust_remote_code=True)) is XAttnModel
    loaded.save_pretrained(checkpoints / "again")
    again = AutoModelForImageTextToText.from_pretrained(checkpoints / "again", trust_remote_code=True)
    same_state(again, made)


def test_code_runs_only_where_it_may(checkpoints, monkeypatch):
    """Code of a checkpoint that is run without a word, or a prompt in the middle of a job."""
    folder = checkpoints / "model"
    retrofit(checkpoints / "text", checkpoints / "vision", trust_remote_code=True).save_pretrained(folder)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    for file in folder.glob("*.py"):
        file.write_text("raise RuntimeError('run')")
    for auto_class in (AutoModelForImageTextToText, XAttnForConditionalGeneration):
        for kwargs in ({}, {"trust_remote_code": False}):
            with pytest.raises(ValueError, match="'custom_decoder' part.*`trust_remote_code=True`"):
                auto_class.from_pretrained(folder, **kwargs)
    with pytest.raises(RuntimeError, match="run"):
        AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True)


def test_saving_a_loaded_model_does_not_ask(checkpoints, monkeypatch):
    """A prompt in the middle of a job, from the model card, which builds the model once more; a
    card without figures.
    """
    retrofit(checkpoints / "text", checkpoints / "vision", trust_remote_code=True).save_pretrained(
        checkpoints / "model"
    )
    loaded = AutoModelForImageTextToText.from_pretrained(checkpoints / "model", trust_remote_code=True)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    loaded.save_pretrained(checkpoints / "again")
    assert "custom_decoder, 14,784 parameters" in (checkpoints / "again" / "README.md").read_text()
    assert type(loaded.config.text_config) not in CONFIG_MAPPING.values()
    loaded.save_pretrained(checkpoints / "adapter", adapter_only=True)
    with pytest.raises(ValueError, match="'custom_decoder' part.*`trust_remote_code=True`"):
        AutoModelForImageTextToText.from_pretrained(checkpoints / "again")


def saved_by_commands(folder):
    """A text-only checkpoint with its own code and a tokenizer, retrofitted with a tower of transformers."""
    make_text_checkpoint(folder / "words")
    tokenizer = AutoTokenizer.from_pretrained(folder / "words")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    torch.manual_seed(0)
    names = {"AutoConfig": "CustomDecoderConfig", "AutoModelForCausalLM": "CustomDecoderForCausalLM"}
    references = {auto_class: f"custom_decoder.{name}" for auto_class, name in names.items()}
    text = CustomDecoderForCausalLM(CustomDecoderConfig(pad_token_id=0, eos_token_id=1))
    save_with_code(text, folder / "own", **references)
    tokenizer.save_pretrained(folder / "own")
    make_vision_checkpoint(folder / "tower")
    make_picture().save(folder / "picture.png")
    (folder / "metadata.jsonl").write_text('{"file_name": "picture.png", "text": "a dog"}\n')
    return folder


@pytest.mark.slow
def test_commands_run_code_only_where_they_may(checkpoints, monkeypatch, capsys):
    """A command that cannot load a model with custom code, runs the code unasked, or waits at a prompt."""
    folder = saved_by_commands(checkpoints)
    model, picture = folder / "seeing", folder / "picture.png"
    commands = [
        ["retrofit", folder / "own", "--vision", folder / "tower", "--every", "1", "--output", model],
        ["inspect", model],
        ["check", model, "--skip", "cache-static"],
        ["generate", model, "--prompt", "a dog", "--image", picture, "--max-new-tokens", "2"],
        ["chat", model, "--image", picture, "--max-new-tokens", "2"],
        ["encode", model, "--image", picture, "--output", folder / "images.safetensors"],
        ["encode-features", model, "--data", folder, "--output", folder / "features"],
        ["train", model, "--data", folder, "--output", folder / "trained", "--steps", "1", "--device", "cpu"],
        ["train", model, "--data", folder, "--output", folder / "trained", "--steps", "1", "--device", "cpu", "--resume"],  # noqa: E501
    ]  # fmt: skip
    lines = iter(["what is it ?"])

    def type_line(prompt=""):
        if prompt:
            pytest.fail(f"asked: {prompt}")
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", type_line)
    for command in commands:
        command = list(map(str, command))
        if "--resume" in command:  # a run that was killed while it saved the trained model
            file = folder / "trained" / OPTIONS_FILE
            file.write_text(json.dumps({**json.loads(file.read_text()), "complete": False}))
        else:
            assert main(command) == 2, command
            assert "trust_remote_code=True" in capsys.readouterr().err, command
        assert main([*command, "--trust-remote-code"]) == 0, (command, capsys.readouterr().err)
        capsys.readouterr()


def test_commands_that_load_a_model_have_the_option(capsys):
    """A command that was forgotten."""
    for name in ("retrofit", "check", "train", "generate", "chat", "serve", "web", "encode", "inspect"):
        with pytest.raises(SystemExit):
            main([name, "--help"])
        assert "--trust-remote-code" in capsys.readouterr().out, name


def test_configuration_without_its_code(checkpoints):
    """A configuration that loses what it does not understand."""
    folder = checkpoints / "model"
    made = retrofit(checkpoints / "text", checkpoints / "vision", trust_remote_code=True)
    made.save_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    assert isinstance(config.text_config, UnreadConfig) and isinstance(config.vision_config, UnreadConfig)
    assert "custom_decoder" in repr(config)
    config.save_pretrained(checkpoints / "config")
    again = XAttnConfig.from_pretrained(checkpoints / "config")
    assert again.text_config.to_dict() == config.text_config.to_dict()
    assert again.cross_attention_config.hidden_size == 32
    with pytest.raises(StrictDataclassError, match="'image_visibility' expected one of"):
        AutoConfig.from_pretrained(folder, image_visibility="first")
    with pytest.raises(ValueError, match=r"2 layers.*got \[9\]"):
        AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True, cross_attention_layers=[9])


def test_registered_classes_need_no_code(checkpoints, registered_decoder):
    """A session that has its own classes for a checkpoint, asked for the code beside it."""
    folder = checkpoints / "model"
    retrofit(CustomDecoderForCausalLM(CustomDecoderConfig())).save_pretrained(folder)
    assert [file.name for file in folder.glob("*.py")] == ["xattn_stub.py"]
    for trust in (None, True):
        loaded = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=trust)
        assert type(loaded.model.text_model) is CustomDecoderForCausalLM


CUSTOM_LLAMA = """
from transformers import LlamaForCausalLM


class CustomLlama(LlamaForCausalLM):
    def forward(self, input_ids=None, past_key_values=None, **kwargs):
        outputs = super().forward(input_ids, past_key_values=past_key_values, **kwargs)
        outputs.logits = outputs.logits * 2
        return outputs
"""


@pytest.mark.filterwarnings("default:.past_key_values. is deprecated")  # that code has the old name
@torch.no_grad()
def test_custom_code_of_a_known_type(checkpoints):
    """Transformers' own class in place of the one that came with the checkpoint, or the other way round."""
    text = make_text()
    save_with_code(text, checkpoints / "llama", AutoModelForCausalLM="custom_llama.CustomLlama")
    (checkpoints / "llama" / "custom_llama.py").write_text(CUSTOM_LLAMA)
    expected = text(token_ids()).logits
    for trust in (True, False):
        made = retrofit(checkpoints / "llama", trust_remote_code=trust)
        assert torch.equal(made(token_ids()).logits, expected * (2 if trust else 1))
        made.save_pretrained(checkpoints / f"model-{trust}")
        loaded = AutoModelForImageTextToText.from_pretrained(checkpoints / f"model-{trust}", trust_remote_code=True)
        assert torch.equal(loaded(token_ids()).logits, expected * (2 if trust else 1))


def test_code_of_one_name(checkpoints):
    """The code of one part written over that of the other."""
    shutil.move(checkpoints / "vision" / "custom_tower.py", checkpoints / "vision" / "custom_decoder.py")
    config = json.loads((checkpoints / "vision" / "config.json").read_text())
    config["auto_map"] = {
        name: ref.replace("custom_tower", "custom_decoder") for name, ref in config["auto_map"].items()
    }
    (checkpoints / "vision" / "config.json").write_text(json.dumps(config))
    made = retrofit(checkpoints / "text", checkpoints / "vision", trust_remote_code=True)
    with pytest.raises(ValueError, match="with the name custom_decoder.py"):
        made.save_pretrained(checkpoints / "model")
    make_model().save_pretrained(checkpoints / "native")
    assert [file.name for file in (checkpoints / "native").glob("*.py")] == ["xattn_stub.py"]
