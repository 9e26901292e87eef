"""`hf-xattn chat`: a conversation about images in the terminal. Images can be added at any turn."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .loading import add_model_and_images, load_model_and_images
from .options import add_answers, answer_options


if TYPE_CHECKING:
    from PIL.Image import Image

    from ..chat_session import ChatSession

HELP = """\
/image FILE  adds an image to your next message (a file or a URL)
/clear       starts a new conversation
/help        shows these lines
/exit        ends the chat, as Ctrl-D does
Ctrl-C       stops an answer"""
COMMANDS = ("/image", "/clear", "/help", "/exit")


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("chat", help="talk with a model about images, in the terminal")
    add_model_and_images(parser)
    add_answers(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    options = answer_options(arguments)
    model, processor, images = load_model_and_images(arguments)
    from transformers import set_seed

    from ..chat_session import ChatSession

    if arguments.seed is not None:
        set_seed(arguments.seed)
    model.enable_image_store()
    session = ChatSession(model, processor, system=arguments.system, **options)
    if sys.stdin.isatty():
        print(HELP)
    _talk(session, images)


def _talk(session: ChatSession, images: list[Image]) -> None:
    """Reads lines and answers them, until the input ends.

    Raises:
        ValueError: for a line that fails, if the lines do not come from a terminal: a script must not get answers without its images.
    """
    waiting = list(images)
    for line in _lines():
        command, _, rest = line.partition(" ")
        if command not in COMMANDS and line.startswith("/"):
            _fail(f"Expected {', '.join(COMMANDS)} or a message, got {command}.")
        elif command == "/exit":
            return
        elif command == "/help":
            print(HELP)
        elif command == "/clear":
            session.clear()
            if waiting:
                print(f"({len(waiting)} image(s) that waited for a message are removed too)")
            waiting = []
        elif command == "/image":
            waiting += _read_image(rest, session.processor)
        elif _answer(session, line, waiting):
            waiting = []


def _lines() -> Iterator[str]:
    """Yields lines that are not empty. Ctrl-C at the prompt discards the current line."""
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        try:
            import readline  # noqa: F401  # gives `input` a line editor with a history
        except ImportError:
            pass
    while True:
        try:
            line = input("> " if at_terminal else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D ends the chat)")
            continue
        if line:
            yield line


def _read_image(name: str, processor: Any) -> list[Image]:
    """Returns the image of `/image` as a list. If the image cannot be read, prints a message and returns an empty list."""
    name = name.strip().strip("'\"")
    if not name:
        _fail("Expected a file after /image, got nothing.")
        return []
    if getattr(processor, "image_processor", None) is None:
        _fail("This model was saved without an image processor: it cannot read images.")
        return []
    from pathlib import Path

    from ..image_reading import read_image

    try:
        return [read_image(name if "://" in name else Path(name).expanduser(), "/image")]
    except Exception as error:  # the chat continues after any error of a file or a server
        _fail(str(error))
        return []


def _answer(session: ChatSession, text: str, images: list[Image]) -> bool:
    """Prints the answer while it is generated. Returns whether there was one; if not, the images stay for the next message."""
    from transformers import TextStreamer

    streamer = TextStreamer(session.tokenizer, skip_prompt=True, skip_special_tokens=True)
    try:
        with _ctrl_c_asks_to_stop() as asked:
            session.ask(text, images, streamer=streamer, stop=asked)
    except (ValueError, TypeError) as error:
        _fail(f"No answer: {error}")
        return False
    except KeyboardInterrupt:
        print("\n(stopped; your message was not answered)")
        return False
    return True


def _fail(message: str) -> None:
    """Tells a person at the terminal, who can type something else. Ends a chat whose lines come from a script."""
    if not sys.stdin.isatty():
        raise ValueError(message)
    print(message)


@contextmanager
def _ctrl_c_asks_to_stop() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C ends the answer after the current token. The second Ctrl-C interrupts it at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield event.is_set
        return

    def stop(number: int, frame: Any) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield event.is_set
    finally:
        signal.signal(signal.SIGINT, before)
