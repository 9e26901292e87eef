"""`hf-xattn generate`: answers one prompt about images. `hf-xattn chat`: a conversation about them in the terminal.
`hf-xattn encode`: saves the keys and values of images in all blocks, to ask questions about them.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .shared import (
    add_answers,
    add_images,
    add_model,
    add_number,
    answer_options,
    check_images,
    images_alone,
    load_model_and_images,
)


if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from ..serving.chat_session import ChatSession

HELP = """\
/image FILE  adds an image to your next message (a file or a URL)
/clear       starts a new conversation
/help        shows these lines
/exit        ends the chat, as Ctrl-D does
Ctrl-C       stops an answer"""
COMMANDS = ("/image", "/clear", "/help", "/exit")


def register_generate(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("generate", help="answer a prompt about images")
    add_model(parser)
    images = parser.add_mutually_exclusive_group()
    add_images(images)
    prompt = "a question, which goes into the model's chat template if it has one"
    parser.add_argument("--prompt", required=True, metavar="TEXT", help=prompt)
    parser.add_argument("--raw", action="store_true", help="take the prompt as it is, without a chat template")
    cache = "encoded images, a file that `hf-xattn encode` wrote"
    images.add_argument("--image-cache", type=Path, metavar="FILE", help=cache)
    add_number(parser, "--max-new-tokens", 64, "maximum number of tokens in the answer")
    add_number(parser, "--num-beams", 1, "beams of beam search")
    parser.set_defaults(run=run_generate)


def run_generate(arguments: argparse.Namespace) -> None:
    model, processor, images = load_model_and_images(arguments)
    cache = None
    if arguments.image_cache is not None:
        from ..storage.image_files import load_image_cache

        cache = load_image_cache(arguments.image_cache, model)
    from PIL import Image

    from ..serving.chat_session import ChatSession

    layout = None if cache is None else cache.cross_attention_cache.layout
    # Processors make text according to their images, so a blank one stands for each that is encoded already.
    shown = images if layout is None else [Image.new("RGB", (32, 32))] * layout.num_images
    prompt = _Prompt(processor, arguments.prompt, shown, arguments.raw, with_pixels=cache is None)
    options = {"max_new_tokens": arguments.max_new_tokens, "num_beams": arguments.num_beams, "do_sample": False}
    print(ChatSession(model, prompt, cache=cache, **options).ask(arguments.prompt, images))


class _Prompt:
    """Stands for a processor in a [`ChatSession`]: renders one question, in the chat template or as it is (`raw`)."""

    def __init__(self, processor: Any, text: str, images: list[Image], raw: bool, with_pixels: bool):
        self.processor, self.text, self.images, self.with_pixels = processor, text, images, with_pixels
        self.tokenizer = getattr(processor, "tokenizer", processor)
        from ..processing_xattn import XAttnProcessor  # has a default template

        named = getattr(processor, "chat_template", None) or getattr(self.tokenizer, "chat_template", None)
        self.raw = raw or not (named or isinstance(processor, XAttnProcessor))

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> Mapping[str, torch.Tensor]:
        from ..serving.chat_session import question

        if self.raw:
            seen = {"images": self.images or None} if hasattr(self.processor, "image_processor") else {}
            made = self.processor(text=self.text, return_tensors="pt", **seen)
        else:
            marker = getattr(self.processor, "image_token", None)
            if marker and marker in self.text:
                told = "which the chat template writes. Leave it out, or add `--raw`."
                raise ValueError(f"`--prompt` contains {marker}, {told}")
            shown = self.images if hasattr(self.processor, "tokenizer") else None
            made = self.processor.apply_chat_template([question(self.text, shown)], **options)
        return made if self.with_pixels else {name: made[name] for name in ("input_ids", "attention_mask")}


def register_encode(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("encode", help="save keys and values of images to a file")
    add_model(parser)
    add_images(parser, required=True)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="a new .safetensors file")
    parser.set_defaults(run=run_encode)


def run_encode(arguments: argparse.Namespace) -> None:
    output: Path = arguments.output
    if output.exists():
        raise ValueError(f"`--output` must be a new file, got {output}, which exists already.")
    model, processor, images = load_model_and_images(arguments)
    import torch

    from ..storage.image_files import save_image_cache

    inputs = images_alone(processor)(images=[images])
    with torch.no_grad():
        cache = model.encode_images(**{name: value.to(model.device) for name, value in inputs.items()})
    save_image_cache(cache, output, model)
    print(f"{len(images)} image(s), {output.stat().st_size:,} bytes: {output}")


def register_chat(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("chat", help="talk with a model about images, in the terminal")
    add_model(parser)
    add_images(parser)
    add_answers(parser)
    parser.set_defaults(run=run_chat)


def run_chat(arguments: argparse.Namespace) -> int:
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
    name = name.strip().strip("'\"")
    if not name:
        raise ValueError("Expected a file after /image, got nothing.")
    check_images("This model", processor)
    from ..processing.image_reading import read_image

    try:
        if "://" in name:
            return read_image(name, "/image")
        file = Path(name).expanduser()
        if "\\" in name and not file.exists():  # as terminals paste a name with blanks
            file = Path(re.sub(r"\\(.)", r"\1", name)).expanduser()
        return read_image(file, "/image")
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

    def stop(number: int, frame: Any) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield event.is_set
    finally:
        signal.signal(signal.SIGINT, before)
