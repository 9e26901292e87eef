"""What a command says of a mistake: a sentence that names it, in one or two lines, and the exit status 2."""

import shutil

import pytest

from helpers.inputs.training_examples import CAPTIONS, write_examples
from helpers.processes.command_runs import run
from hf_xattn.commands import examine
from hf_xattn.commands.main import COMMANDS, _parser, main


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_examples(tmp_path_factory.mktemp("data"), CAPTIONS)


def told(capsys, *arguments):
    """The message of a command that fails, without the lines before it."""
    status, _, error = run(capsys, *arguments)
    assert status == 2, error
    _, mark, message = error.partition(f"hf-xattn {arguments[0]}: error: ")
    assert mark and "Traceback" not in error and len(message.splitlines()) <= 2, error
    return message


def with_model(model, data, output):
    """Each command that takes a model, with what else it needs."""
    return {
        "generate": [model, "--prompt", "what is it ?"],
        "chat": [model],
        "check": [model],
        "encode": [model, "--image", f"{data}/red.png", "--output", output],
        "encode-features": [model, "--data", data, "--output", output],
        "train": [model, "--data", data, "--output", output],
        "serve": [model, "--port", "0"],
        "web": [model, "--port", "0"],
        "inspect": [model],
        "export": [model, "--output", output],
        "import": [model, "--output", output],
        "retrofit": [model, "--output", output],
    }


DEVICES = ("generate", "chat", "check", "encode", "encode-features", "train", "serve", "web")


def needed(command):
    pytest.importorskip({"serve": "fastapi", "web": "gradio"}.get(command, "torch"))


@pytest.mark.parametrize("command", DEVICES)
def test_a_device_that_is_missing_is_an_error_before_loading(saved, data, tmp_path, capsys, command):
    """An error of torch after minutes of loading, for a device that this machine lacks; choices of one command that
    another refuses.
    """
    needed(command)
    arguments = with_model(saved / "model", data, tmp_path / "out")[command]
    for device in ("foo", "Cuda"):
        assert f"device string: {device}" in told(capsys, command, *arguments, "--device", device)
    assert not (tmp_path / "out").exists()
    (commands,) = [action.choices for action in _parser()._actions if isinstance(action.choices, dict)]
    (option,) = [action for action in commands[command]._actions if action.dest == "device"]
    assert option.choices is None and "cpu, cuda, cuda:1, mps, xpu, ..." in option.help


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_devices_that_there_are(saved, data, tmp_path, capsys, device):
    """A choice of the help that a command does not take."""
    for command in ("generate", "encode", "encode-features", "train"):
        arguments = with_model(saved / "model", data, tmp_path / command)[command]
        short = {"generate": ["--max-new-tokens", "2"], "train": ["--steps", "1", "--batch-size", "1"]}.get(command, [])
        status, _, error = run(capsys, command, *arguments, *short, "--device", device)
        assert status == 0, error


@pytest.mark.parametrize("command", with_model("", "", ""))
def test_a_mistyped_folder_is_named_in_a_sentence(data, tmp_path, monkeypatch, capsys, command):
    """A mistyped folder that ends with a traceback, or leaves a folder."""
    needed(command)
    monkeypatch.chdir(tmp_path)
    for name in ("../nosuch", "a/b/c", "my model", "nosuch/", "/nowhere/at/all"):
        message = told(capsys, command, *with_model(name, data, "out")[command])
        assert name.strip("./") in message
    for name in ("nosuch", "nosuch/model"):  # may also be ids
        told(capsys, command, *with_model(name, data, "out")[command])
    assert not (tmp_path / "out").exists()


def test_a_model_without_a_tower(saved, data, tmp_path, capsys):
    """A demand for a processor, which then demands an image processor, where no picture can be read at all."""
    assert run(capsys, "retrofit", saved / "text", "--output", tmp_path / "blind")[0] == 0
    message = told(capsys, "train", tmp_path / "blind", "--data", data, "--output", tmp_path / "out")
    assert "with a vision tower" in message and "`--vision`" in message and "rocessor" not in message
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_damaged_tokenizer_is_named(saved, tmp_path, capsys):
    """A tokenizer that is said to be missing, and a model saved without it."""
    shutil.copytree(saved / "text", tmp_path / "text")
    (tmp_path / "text" / "tokenizer.json").write_text('{"model": ')
    assert "gives no tokenizer" not in told(capsys, "retrofit", tmp_path / "text", "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_bug_keeps_its_traceback(saved, monkeypatch):
    """An error of this package's own code, cut down to `'NoneType' object is not subscriptable`."""
    for bug in (lambda *_, **__: len(None), lambda *_, **__: {}["a"], lambda *_, **__: 1 / 0):
        monkeypatch.setattr(examine, "load_shapes", bug)
        with pytest.raises((TypeError, KeyError, ZeroDivisionError)):
            main(["inspect", str(saved / "model")])


def test_a_second_source_is_refused(capsys):
    """Questions that are not asked, because a later option has taken the place of theirs."""
    with pytest.raises(SystemExit):
        main(["eval", "model", "--data", "one", "--data", "two"])
    assert "--data: expected one source, got 'one' and 'two'" in capsys.readouterr().err


def test_the_command_alone_prints_its_help(capsys):
    """An error about a missing argument, where a person asks what there is."""
    assert main([]) == 0
    begins = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    (commands,) = [action for action in _parser()._actions if isinstance(action.choices, dict)]
    assert len(commands.choices) == len(COMMANDS) and commands.choices.keys() <= set(begins)
    told = {each.dest: each.help for each in commands._choices_actions}
    assert told.keys() == commands.choices.keys() and all(told.values())
