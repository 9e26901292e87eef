"""`hf-xattn chat`: a conversation on a kept cache, as a person has it in a terminal."""

import io
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from helpers.models.tiny_models import randomize
from helpers.models.word_models import make_picture, make_text_checkpoint, make_vision_checkpoint
from hf_xattn import XAttnProcessor, retrofit
from hf_xattn.commands.main import main
from hf_xattn.serving.chat_session import ChatSession


TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' ? ' }}{% if message['content'] is string %}{{ "
    "message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] "
    "}}{% endif %}{% endfor %}{% endif %}{{ ' [EOS] ' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant ? ' "
    "}}{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that follows no markers and gives answers that differ from picture to picture."""
    folder = tmp_path_factory.mktemp("chat")
    make_text_checkpoint(folder / "text")
    make_vision_checkpoint(folder / "vision")
    model = randomize(retrofit(folder / "text", folder / "vision", every=2), seed=3)
    model.generation_config.eos_token_id = None  # the answers are as long as they may be
    model.generation_config.suppress_tokens = [0, 1, 2]  # and of words alone
    model.save_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "text")
    size = {"height": 32, "width": 32}
    XAttnProcessor(SiglipImageProcessorPil(size=size), tokenizer, chat_template=TEMPLATE).save_pretrained(
        folder / "model"
    )
    for seed in (0, 1):
        make_picture(seed).save(folder / f"{seed}.png")
    return folder


@pytest.fixture
def model(folder):
    return AutoModelForImageTextToText.from_pretrained(folder / "model").eval()


@pytest.fixture
def processor(folder):
    return AutoProcessor.from_pretrained(folder / "model")


def fresh(model, processor, messages, new_tokens):
    """The answer to a conversation that is read at once, without a kept cache."""
    inputs = processor.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    tokens = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    return processor.tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def picture_message(text, *seeds):
    parts = [{"type": "image", "image": make_picture(seed)} for seed in seeds]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def count_calls(module):
    calls = []
    module.register_forward_hook(lambda module, args, output: calls.append(output))
    return calls


def test_turns_on_a_kept_cache(model, processor):
    """A second turn that forgets the picture or the first turn, or reads both again."""
    session = ChatSession(model, processor, max_new_tokens=6, do_sample=False)
    towers, texts = count_calls(model.model.vision_tower), count_calls(model.get_input_embeddings())
    first = session.ask("what is in the picture", [make_picture(0)])
    asked = [picture_message("what is in the picture", 0)]
    read = sum(text.shape[1] for text in texts)
    texts.clear()
    second = session.ask("how many")
    assert len(towers) == 1
    assert texts[0].shape[1] == len(session._cached_ids) - 5 - read  # the rest of the first turn and the new question
    assert first == fresh(model, processor, asked, 6)
    asked += [{"role": "assistant", "content": first}, {"role": "user", "content": "how many"}]
    assert second == fresh(model, processor, asked, 6)
    assert [message["role"] for message in session.messages] == ["user", "assistant"] * 2


def test_pictures_decide_the_answer(model, processor):
    """A chat that drops the picture: the answers to two pictures, and to none, are then the same."""
    answers = set()
    for pictures in ([], [make_picture(0)], [make_picture(1)]):
        answers.add(ChatSession(model, processor, max_new_tokens=8, do_sample=False).ask("describe it", pictures))
    assert len(answers) == 3


def test_picture_in_a_later_turn(model, processor):
    """A second picture that the tower does not see, or a first one that it sees again: the store of `chat` has it."""
    model.enable_image_store()
    session = ChatSession(model, processor, max_new_tokens=4, do_sample=False)
    session.ask("describe it", [make_picture(0)])
    towers = count_calls(model.model.vision_tower)
    session.ask("how many", [make_picture(1)])
    assert len(towers) == 1 and towers[0].last_hidden_state.shape[0] == 1
    assert session._cache.cross_attention_cache.layout.num_images == 2


def test_template_that_renders_earlier_turns_differently(model, processor):
    """A cache that keeps text which is no longer in the conversation."""
    processor.chat_template = TEMPLATE.replace(
        "{{ message['content'] }}",
        "{{ message['content'] if loop.last or message['role'] == 'user' else 'an' }}",
    )
    session = ChatSession(model, processor, max_new_tokens=5, do_sample=False)
    first = session.ask("what is it", [make_picture(0)])
    second = session.ask("a dog")
    messages = [
        picture_message("what is it", 0),
        {"role": "assistant", "content": first},
        {"role": "user", "content": "a dog"},
    ]
    assert second == fresh(model, processor, messages, 5)


def test_failed_question_leaves_the_conversation(model, processor):
    """An error that leaves half a turn behind, or a cache with an image of no message."""
    session = ChatSession(model, processor, max_new_tokens=5, do_sample=False)
    first = session.ask("what is it", [make_picture(0)])

    class Broken:
        def put(self, value):
            raise ValueError("broken pipe")

    with pytest.raises(ValueError, match="broken pipe"):
        session.ask("describe", [make_picture(1)], streamer=Broken())
    with pytest.raises(ValueError, match="Expected a conversation of at most 2048 tokens.*Start a new conversation"):
        session.ask("cat " * 2050)
    assert len(session.messages) == 2
    messages = [
        picture_message("what is it", 0),
        {"role": "assistant", "content": first},
        {"role": "user", "content": "how many"},
    ]
    assert session.ask("how many") == fresh(model, processor, messages, 5)


def test_stopped_answer_counts(model, processor):
    """A stopped answer after which the chat and its cache disagree."""
    session = ChatSession(model, processor, max_new_tokens=50, do_sample=False)
    stops = iter([False, False, True])
    answer = session.ask("what is it", [make_picture(0)], stop=lambda: next(stops))
    assert session.messages[-1] == {"role": "assistant", "content": answer}
    assert session._cache.get_seq_length() == len(session._cached_ids)
    session.options["max_new_tokens"] = 5
    messages = [picture_message("what is it", 0), session.messages[-1], {"role": "user", "content": "how many"}]
    assert session.ask("how many") == fresh(model, processor, messages, 5)


class Person(io.StringIO):
    def isatty(self):
        return True


def say(monkeypatch, capsys, folder, lines, *options, source=io.StringIO):
    monkeypatch.setattr("sys.stdin", source("".join(line + "\n" for line in lines)))
    status = main(["chat", str(folder / "model"), "--max-new-tokens", "6", "--temperature", "0", *options])
    captured = capsys.readouterr()
    return status, captured.out.splitlines(), captured.err


def test_commands_of_the_chat_do_not_reach_the_model(folder, model, processor, monkeypatch, capsys):
    """A command that is sent to the model, or a mistake that ends the chat."""
    lines = [
        f"/image {folder / '0.png'}",
        "what is it",
        "/help",
        "/clear",
        "",
        f"/image {folder / '0.png'}",
        "/clear",
        f"/image '{folder / '1.png'}'",
        "what is it",
        "/exit",
        "never read",
    ]
    status, out, _ = say(monkeypatch, capsys, folder, lines)
    assert status == 0
    assert out[0].split() == fresh(model, processor, [picture_message("what is it", 0)], 6).split()
    assert out[1].startswith("/image FILE")
    assert out[-2] == "(1 image(s) that waited for a message are removed too)"
    assert out[-1].split() == fresh(model, processor, [picture_message("what is it", 1)], 6).split()


def test_a_name_as_terminals_paste_it(folder, tmp_path, model, processor, monkeypatch, capsys):
    """`my\\ pic.png`, which is taken for a file with a backslash in its name."""
    given = tmp_path / "my pic (1).png"
    shutil.copy(folder / "0.png", given)
    pasted = re.sub(r"([ ()])", r"\\\1", str(given))
    status, out, _ = say(monkeypatch, capsys, folder, [f"/image {pasted}", "what is it", "/exit"])
    assert status == 0 and "\\ " in pasted
    assert out[0].split() == fresh(model, processor, [picture_message("what is it", 0)], 6).split()


@pytest.mark.parametrize(
    "line, expected",
    [
        ("/imgae x", "Expected /image, /clear, /help, /exit or a message, got /imgae."),
        ("/image", "Expected a file after /image, got nothing."),
        ("/image none.png", "none.png"),
    ],
)
def test_a_mistake_ends_a_script_but_not_a_chat(folder, model, processor, monkeypatch, capsys, line, expected):
    """A mistake that ends the chat of a person, or after which a script gets an answer without its image."""
    status, out, error = say(monkeypatch, capsys, folder, ["/clear", line, "what is it"])
    assert status == 2 and expected in error and not out
    status, out, error = say(monkeypatch, capsys, folder, [line, "what is it"], source=Person)
    assert status == 0 and any(expected in printed for printed in out)


def test_image_option_and_system_message(folder, model, processor, monkeypatch, capsys):
    """An option that changes nothing."""
    _, out, _ = say(monkeypatch, capsys, folder, ["what is it"], "--image", str(folder / "1.png"), "--system", "tree")
    messages = [{"role": "system", "content": "tree"}, picture_message("what is it", 1)]
    assert out[0].split() == fresh(model, processor, messages, 6).split()
    status, _, error = say(monkeypatch, capsys, folder, ["what"], "--image", "nothing.png")
    assert status == 2 and "nothing.png" in error


class Terminal:
    """What a person sees and types."""

    def __init__(self):
        self.ours, self.theirs = pty.openpty()
        self.unread = b""

    def wait_for(self, wanted, timeout=60):
        end = time.monotonic() + timeout
        while wanted not in self.unread:
            ready, _, _ = select.select([self.ours], [], [], max(0, end - time.monotonic()))
            assert ready, f"Expected {wanted!r}, got {self.unread!r}."
            self.unread += os.read(self.ours, 4096)
        self.unread = self.unread.split(wanted, 1)[1]

    def type(self, line):
        os.write(self.ours, line.encode() + b"\n")
        self.wait_for(line.encode())

    def close(self):
        os.close(self.ours)
        os.close(self.theirs)


def test_ctrl_c_stops_the_answer_and_not_the_chat(folder):
    """Ctrl-C that ends the program, or an answer that goes on."""
    terminal = Terminal()
    command = [sys.executable, "-m", "hf_xattn.commands.main", "chat", str(folder / "model"), "--temperature", "0"]
    process = subprocess.Popen(
        [*command, "--max-new-tokens", "1900"],
        stdin=terminal.theirs,
        stdout=terminal.theirs,
        stderr=terminal.theirs,
        start_new_session=True,
        env=os.environ | {"TERM": "dumb"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a background job would ignore it
    )
    try:
        terminal.wait_for(b"stops an answer")  # libraries may print warnings before the chat begins
        terminal.wait_for(b"> ")
        time.sleep(
            1
        )  # the prompt is shown before Python waits for a line, and a signal between the two is seen after the line
        process.send_signal(signal.SIGINT)
        terminal.wait_for(b"(/exit or Ctrl-D ends the chat)")
        terminal.wait_for(b"> ")
        terminal.type("what is it")
        terminal.wait_for(b"\n")
        terminal.wait_for(b" ")  # the answer has begun
        process.send_signal(signal.SIGINT)
        terminal.wait_for(b"> ")
        terminal.type("/exit")
        assert process.wait(30) == 0
    finally:
        process.kill()
        terminal.close()


def test_sliding_window_and_states(processor):
    """A cache that cannot be cropped, cropped all the same."""
    from helpers.models.tiny_decoders import make_tiny

    for name in ("mistral", "mamba2"):
        text = make_tiny(name)
        if name == "mistral":
            text.config.sliding_window = 8
        model = randomize(retrofit(text, every=1, cross_attention={"context_size": 16}).eval())
        model.generation_config.eos_token_id = None
        tokenizer = processor.tokenizer
        tokenizer.chat_template = TEMPLATE.replace(
            "{{ message['content'] }}", "{{ loop.length }} {{ message['content'] }}"
        )
        session = ChatSession(model, tokenizer, max_new_tokens=3, do_sample=False)
        session.ask("what is it")
        answer = session.ask("how many")
        inputs = tokenizer.apply_chat_template(
            session.messages[:-1], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        inputs = {key: inputs[key] for key in ("input_ids", "attention_mask")}
        tokens = model.generate(**inputs, max_new_tokens=3, do_sample=False)
        assert answer == tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert torch.equal(session._cached_ids, tokens[0, :-1])


def test_a_message_that_fails(folder, model, processor, monkeypatch, capsys):
    """A chat of a person that ends, or in which the next message comes without the picture of the one that failed."""
    lines = [f"/image {folder / '1.png'}", "cat " * 2050, "what is it"]
    expected = "No answer: Expected a conversation of at most 2048 tokens"
    status, out, error = say(monkeypatch, capsys, folder, lines)
    assert status == 2 and expected in error and not out
    status, out, _ = say(monkeypatch, capsys, folder, lines, source=Person)
    assert status == 0 and any(expected in printed for printed in out)
    answer = fresh(model, processor, [picture_message("what is it", 1)], 6).split()
    assert answer in [printed.removeprefix("> ").split() for printed in out]
