"""Runs of `hf-xattn` in this process."""

import shlex

import pytest
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, Trainer, TrainerCallback

from helpers.models.chat_models import answer, question
from helpers.models.word_models import make_picture, make_text_checkpoint, make_vision_checkpoint
from hf_xattn.commands.main import main


def save_for_commands(folder):
    """Saves the checkpoints `text` and `vision`, the picture `picture.png`, and the retrofitted `model` in shards."""
    make_text_checkpoint(folder / "text")
    make_vision_checkpoint(folder / "vision")
    make_picture().save(folder / "picture.png")
    command = ["retrofit", folder / "text", "--vision", folder / "vision", "--every", "2", "--output", folder / "model"]
    assert main(list(map(str, [*command, "--max-shard-size", "100KB"]))) == 0
    return folder


def run(capsys, *arguments):
    """Status, output and errors of a command."""
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def run_training(capsys, *arguments, texts=False):
    """Status, output and errors of `hf-xattn train` on the CPU, without text prompts where nothing asks for them."""
    asked = texts or "--text-share" in arguments or "--text-prompts" in arguments
    share = [] if asked else ["--text-share", "0"]
    return run(capsys, "train", *arguments, *share, "--device", "cpu")


FAST = ["--batch-size", "2", "--learning-rate", "0.01", "--log-steps", "2"]


class Stop(TrainerCallback):
    """Ends a run as a power cut would, after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def interrupted(capsys, monkeypatch, step, *arguments, texts=False):
    """Runs `hf-xattn train` until Ctrl-C after this step."""
    whole = Trainer.__init__

    def with_stop(self, *args, **kwargs):
        whole(self, *args, **kwargs)
        self.add_callback(Stop(step))

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "__init__", with_stop)
        with pytest.raises(SystemExit) as stopped:
            run_training(capsys, *arguments, texts=texts)
    assert stopped.value.code == 130 and "--resume" in capsys.readouterr().out


def check_last_line(printed, capsys, folder):
    """The last line of a demo is a command, whose answer is the model's in a chat."""
    last = printed.splitlines()[-1]
    assert last.startswith("Next: hf-xattn generate ")
    _, *command = shlex.split(last.removeprefix("Next: "))
    capsys.readouterr()
    assert main(command) == 0
    given = dict(zip(command[2::2], command[3::2]))
    model, processor = (auto.from_pretrained(folder / "model") for auto in (AutoModelForImageTextToText, AutoProcessor))
    message = question(given["--prompt"], Image.open(given["--image"]))
    assert capsys.readouterr().out == answer(model, processor, [message], max_new_tokens=64) + "\n"
