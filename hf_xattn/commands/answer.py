"""The commands that ask a model in the terminal.

`hf-xattn generate` answers one prompt about images, and `hf-xattn chat` holds a conversation about them. `hf-xattn
encode` saves the keys and values of images in all blocks, so that later questions about them need no vision tower.
"""

from __future__ import annotations

import argparse
import math
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .shared import (
    add_answers,
    add_images,
    add_loading,
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
    parser = commands.add_parser(
        "generate",
        help="answer one prompt about images",
        description="Answers one prompt about images, or about no image, and prints the answer. It takes the most "
        "likely tokens (no sampling).",
        usage="%(prog)s MODEL --prompt TEXT [options]",
        epilog="example: hf-xattn generate seeing --image photo.png --prompt 'what is it ?'",
    )
    add_model(parser)
    prompt = "the question; it is put into the model's chat template, if the model has one"
    parser.add_argument("--prompt", required=True, metavar="TEXT", help=prompt)
    images = parser.add_mutually_exclusive_group()
    add_images(images)
    cache = "file of encoded images that `hf-xattn encode` wrote, in place of --image"
    images.add_argument("--image-cache", type=Path, metavar="FILE", help=cache)
    raw = "use the prompt as it is, without a chat template (default: with the chat template)"
    parser.add_argument("--raw", action="store_true", help=raw)
    add_number(parser, "--max-new-tokens", 64, "maximum number of tokens in the answer")
    add_number(parser, "--num-beams", 1, "number of beams; 1 is greedy search")
    add_loading(parser)
    parser.set_defaults(run=run_generate)


def run_generate(arguments: argparse.Namespace) -> None:
    model, processor, images = load_model_and_images(arguments)
    cache: dict[str, Any] = {}
    if arguments.image_cache is not None:
        from PIL import Image

        from ..storage.image_files import load_image_cache

        cache["cache"] = load_image_cache(arguments.image_cache, model)
        # A processor needs the images to make the text, so a blank image stands for each image that is encoded already.
        images = [Image.new("RGB", (32, 32))] * cache["cache"].cross_attention_cache.layout.num_images
    inputs = _inputs(model, processor, arguments.prompt, images, arguments.raw)
    if cache:
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": arguments.max_new_tokens, "num_beams": arguments.num_beams, "do_sample": False}
    length = inputs["input_ids"].shape[1]
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", math.inf)
    if length + arguments.max_new_tokens > longest:
        got = f"{length} tokens and `--max-new-tokens {arguments.max_new_tokens}`"
        raise ValueError(
            f"Expected a prompt and an answer of at most {longest} tokens, the limit of the model, got {got}."
        )
    answer = model.generate(**inputs, **cache, **options)[0, length:]
    print(getattr(processor, "tokenizer", processor).decode(answer, skip_special_tokens=True))


def _inputs(model: Any, processor: Any, text: str, images: list[Image], raw: bool) -> dict[str, torch.Tensor]:
    """Returns the inputs of one question: in the chat template, or as it is (`raw`, and without a template)."""
    from ..processing_xattn import XAttnProcessor  # which has a default chat template
    from ..serving.chat_session import chat_inputs, question

    tokenizer = getattr(processor, "tokenizer", processor)
    named = getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None)
    if raw or not (named or isinstance(processor, XAttnProcessor)):
        seen = {"images": images or None} if hasattr(processor, "image_processor") else {}
        made = processor(text=text, return_tensors="pt", **seen)
        return {name: value.to(model.device) for name, value in made.items() if name != "token_type_ids"}
    marker = getattr(processor, "image_token", None)
    if marker and marker in text:
        told = "which the chat template writes. Leave it out, or add `--raw`."
        raise ValueError(f"`--prompt` contains {marker}, {told}")
    shown = images if hasattr(processor, "tokenizer") else None
    return chat_inputs(model, processor, [question(text, shown)])[0]


def register_encode(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "encode",
        help="encode images once and save them to a file, for `hf-xattn generate --image-cache`",
        description="Encodes images once and saves their keys and values to a file. `hf-xattn generate --image-cache` "
        "then asks about these images without running the vision tower. The file fits this model alone.",
        usage="%(prog)s MODEL --image FILE --output FILE [options]",
    )
    add_model(parser)
    add_images(parser, required=True)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="new .safetensors file to write")
    add_loading(parser)
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
    parser = commands.add_parser(
        "chat",
        help="talk with a model about images in the terminal",
        description="Holds a conversation about images in the terminal.",
        usage="%(prog)s MODEL [options]",
        epilog=f"in the chat:\n{HELP}\n\nexample: hf-xattn chat seeing --image photo.png",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser)
    add_images(parser)
    add_answers(parser)
    add_loading(parser)
    parser.set_defaults(run=run_chat)


def run_chat(arguments: argparse.Namespace) -> None:
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
    _talk(session, images)


def _talk(session: ChatSession, images: list[Image]) -> None:
    """Reads lines and answers them, until the input ends.

    At a terminal, the chat goes on after an error. In a script, an error ends it: a later message may need the image or
    the answer that is missing.
    """
    at_terminal = sys.stdin.isatty()
    waiting = list(images)
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
                waiting = []
            elif command == "/image":
                waiting.append(_read_image(rest, session.processor))
            elif line.startswith("/"):
                raise ValueError(f"Expected {', '.join(COMMANDS)} or a message, got {command}.")
            elif _answer(session, line, waiting):
                waiting = []
        except ValueError as error:
            if not at_terminal:
                raise
            print(error, flush=True)


def _lines(at_terminal: bool) -> Iterator[str]:
    """Yields the lines that are not empty. Ctrl-C at the prompt discards the current line."""
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
        if "\\" in name and not file.exists():  # a terminal pastes a name with blanks as `my\ picture.png`
            file = Path(re.sub(r"\\(.)", r"\1", name)).expanduser()
        return read_image(file, "/image")
    except Exception as error:  # whatever is wrong with a file or a server, the chat goes on
        raise ValueError(str(error)) from error


def _answer(session: ChatSession, text: str, images: list[Image]) -> bool:
    """Prints the answer while it is generated. Returns False if a second Ctrl-C has interrupted it."""
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
