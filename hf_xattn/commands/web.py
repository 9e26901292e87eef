"""`hf-xattn web`: a page to play with a model: draw, ask, and see where it looked."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .loading import add_model, load_model_and_images
from .options import add_answers, add_listening, address_of, answer_options, bind, check_least


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("web", help="a page to draw pictures and chat about them (needs the extra `web`)")
    add_model(parser)
    parser.add_argument("--name", help="heading of the page (default: the name of DIR)")
    parser.add_argument(
        "--question",
        action="append",
        metavar="TEXT",
        help="a question to choose with one click; repeat the option for several (default: those in the card of DIR)",
    )
    parser.add_argument(
        "--canvas",
        type=_size,
        metavar="WxH",
        help="size of the canvas in pixels (default: what the model reads, times a whole number)",
    )
    colours = "default: white on black for pictures below 64 pixels, else black on white"
    parser.add_argument("--ink", metavar="COLOUR", help=f"colour of lines, as in CSS ({colours})")
    parser.add_argument("--paper", metavar="COLOUR", help="colour of the canvas")
    add_answers(parser)
    add_listening(parser, port=7860)
    parser.set_defaults(run=run, image=None)


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.lower().partition("x")
    try:
        return int(width), int(height)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected WIDTHxHEIGHT in pixels, got {text!r}") from None


def run(arguments: argparse.Namespace) -> None:
    check_least(arguments, 0, "image_store")
    options = answer_options(arguments)
    from transformers import set_seed

    from ..serving.web.page import build_page, load_gradio

    load_gradio()
    # Gradio binds the port itself, after the model is loaded. Until then this one holds it, and on Linux until Gradio
    # has it too: there a port that nobody listens on can be bound twice by name, but is not given to others that ask
    # for a free one.
    with bind(arguments.host, arguments.port) as listener:
        print(f"Loading {arguments.model}", flush=True)
        model, processor, _ = load_model_and_images(arguments)
        if arguments.seed is not None:
            set_seed(arguments.seed)
        if arguments.image_store:
            model.enable_image_store(arguments.image_store * 2**20)
        page = build_page(
            model,
            processor,
            title=arguments.name or Path(arguments.model).name,
            questions=arguments.question,
            system=arguments.system,
            canvas=arguments.canvas,
            ink=arguments.ink,
            paper=arguments.paper,
            generate_kwargs=options,
        )
        port = listener.getsockname()[1]
        if sys.platform != "linux":
            listener.close()
        try:
            page.launch(server_name=arguments.host, server_port=port, quiet=True, prevent_thread_lock=True)
            listener.close()
            print(f"Ready: {address_of(arguments.host, port)} shows {arguments.model}. Stop with Ctrl-C.", flush=True)
            page.get_blocks().block_thread()
        except KeyboardInterrupt:  # Gradio catches it only inside `block_thread`
            pass
        finally:
            if page.blocks is not None:
                page.get_blocks().close(verbose=False)
