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

    from ..serving.chat_session import ChatSession

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


def run(arguments: argparse.Namespace) -> int:
    options = answer_options(arguments)
    model, processor, images = load_model_and_images(arguments)
    from transformers import set_seed

    from ..serving.chat_session import ChatSession

    if arguments.seed is not None:
        set_seed(arguments.seed)
    model.enable_image_store()
    session = ChatSession(model, processor, system=arguments.system, **options)
    if sys.stdin.isatty():
        print(HELP)
    return _talk(session, images)


def _talk(session: ChatSession, images: list[Image]) -> int:
    """Reads lines and answers them, until the input ends. Returns the exit status, 2 if a line of a script has failed.

    A script must get no answer without its image. So the message after a line that failed is answered only at a
    terminal.
    """
    at_terminal = sys.stdin.isatty()
    waiting, failed, status = list(images), False, 0
    for line in _lines(at_terminal):
        command, _, rest = line.partition(" ")
        try:
            if command == "/exit":
                break
            if command == "/help":
                print(HELP)
            elif command == "/clear":
                session.clear()
                if waiting:
                    print(f"({len(waiting)} image(s) that waited for a message are removed too)")
                waiting, failed = [], False
            elif command == "/image":
                waiting.append(_read_image(rest, session.processor))
            elif line.startswith("/"):
                raise ValueError(f"Expected {', '.join(COMMANDS)} or a message, got {command}.")
            elif failed:
                raise ValueError(f"Not asked, because a line before it failed: {line}")
            elif _answer(session, line, waiting):
                waiting = []
        except ValueError as error:
            print(error, file=sys.stdout if at_terminal else sys.stderr, flush=True)
            if not at_terminal:
                failed, status = line.startswith("/"), 2
                waiting = waiting if failed else []  # those of a message that was not answered are not for the next one
    return status


def _lines(at_terminal: bool) -> Iterator[str]:
    """Yields lines that are not empty. Ctrl-C at the prompt discards the current line."""
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


def _read_image(name: str, processor: Any) -> Image:
    """Returns the image of `/image`. Raises a `ValueError` if it cannot be read."""
    name = name.strip().strip("'\"")
    if not name:
        raise ValueError("Expected a file after /image, got nothing.")
    if getattr(processor, "image_processor", None) is None:
        raise ValueError("This model was saved without an image processor: it cannot read images.")
    from pathlib import Path

    from ..processing.image_reading import read_image

    try:
        return read_image(name if "://" in name else Path(name).expanduser(), "/image")
    except Exception as error:  # the chat continues after any error of a file or a server
        raise ValueError(str(error)) from error


def _answer(session: ChatSession, text: str, images: list[Image]) -> bool:
    """Prints the answer while it is generated. Returns whether there was one: if not, the images stay."""
    from jinja2 import TemplateError
    from transformers import TextStreamer

    streamer = TextStreamer(session.tokenizer, skip_prompt=True, skip_special_tokens=True)
    try:
        with _ctrl_c_asks_to_stop() as asked:
            session.ask(text, images, streamer=streamer, stop=asked)
    except (ValueError, TypeError, TemplateError) as error:
        raise ValueError(f"No answer: {error}") from error
    except KeyboardInterrupt:
        print("\n(stopped; your message was not answered)")
        return False
    return True


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
