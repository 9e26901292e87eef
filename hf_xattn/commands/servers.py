"""`hf-xattn serve` and `hf-xattn web`: servers for one model, which is loaded when they start.

`serve` answers clients of the OpenAI API; `web` is a page to draw, ask, and see where the model looked.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from pathlib import Path

from .shared import add_answers, add_model, add_number, answer_options, load_model_and_images


def register_serve(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("serve", help="answer clients of the OpenAI API (needs the extra `serve`)")
    add_model(parser)
    parser.add_argument("--name", help="name of the model for clients (default: DIR as given)")
    image = "largest image that a client may send or name, in MiB"
    add_number(parser, "--max-image-mib", 20, image, metavar="MIB")
    request = "largest body of a request, in MiB (default: four of the largest images fit, 107)"
    add_number(parser, "--max-request-mib", None, request, metavar="MIB")
    add_number(parser, "--max-images", 64, "most images of a request")
    pixels = "most pixels of all images of a request, in millions"
    add_number(parser, "--max-request-megapixels", 68, pixels, metavar="N")
    add_number(parser, "--max-requests", 16, "most requests that are read, wait or are answered at the same time")
    add_number(parser, "--max-new-tokens", 4096, "most tokens that a client may ask for in an answer")
    add_number(parser, "--max-beams", 8, "most beams that a client may ask for")
    fetch = "fetch images from the public web addresses that clients name (default: data URLs alone)"
    parser.add_argument("--fetch-images", action="store_true", help=fetch)
    private = "fetch images also from this machine and from private networks"
    parser.add_argument("--private-addresses", action="store_true", help=private)
    _add_listening(parser, port=8000)
    parser.set_defaults(run=run_serve, image=None)


def run_serve(arguments: argparse.Namespace) -> None:
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ImportError("`hf-xattn serve` needs FastAPI: run `pip install 'fastapi>=0.115' uvicorn`.") from error
    from ..processing.chat_templates import check_template
    from ..serving.request_limits import ServerLimits
    from ..serving.serving import Server, build_app

    limits = ServerLimits(
        max_image_bytes=arguments.max_image_mib * 2**20,
        max_request_bytes=arguments.max_request_mib and arguments.max_request_mib * 2**20,
        max_images=arguments.max_images,
        max_pixels=arguments.max_request_megapixels * 10**6,
        max_requests=arguments.max_requests,
        max_new_tokens=arguments.max_new_tokens,
        max_beams=arguments.max_beams,
        fetch=arguments.fetch_images or arguments.private_addresses,
        private_addresses=arguments.private_addresses,
    )
    with bind(arguments.host, arguments.port) as listener:
        name = arguments.name or arguments.model
        print(f"Loading {arguments.model}", flush=True)
        model, processor, _ = load_model_and_images(arguments)
        check_template(processor)
        if arguments.image_store:
            model.enable_image_store(arguments.image_store * 2**20)
        address = f"{address_of(arguments.host, listener.getsockname()[1])}/v1"

        def ready() -> None:
            print(f"Ready: {address} serves {name}. Stop with Ctrl-C.\n{_question(address, name)}", flush=True)

        try:
            Server(build_app(name, model, processor, limits), ready).run(sockets=[listener])
        except KeyboardInterrupt:  # raised again by uvicorn after a clean stop
            pass


def _question(address: str, name: str) -> str:
    """A question about picture.png, to copy into a terminal."""
    data = r"data:image/png;base64,$(base64 < picture.png | tr -d '\n')"
    parts = [{"type": "image_url", "image_url": {"url": "DATA"}}, {"type": "text", "text": "What is it?"}]
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": parts}]}).replace("DATA", data)
    command = f"curl {address}/chat/completions -H 'Content-Type: application/json' -d @-"
    return f"Ask, for example:\n{command} <<END\n{body}\nEND"


def register_web(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("web", help="a page to draw pictures and chat about them (needs the extra `web`)")
    add_model(parser)
    parser.add_argument("--name", help="heading of the page (default: the name of DIR)")
    parser.add_argument(
        "--question",
        action="append",
        metavar="TEXT",
        help="a question to choose with one click; repeat the option for several (default: those in the card of DIR)",
    )
    canvas = "size of the canvas in pixels (default: what the model reads, times a whole number)"
    parser.add_argument("--canvas", type=_size, metavar="WxH", help=canvas)
    colours = "default: white on black for pictures below 64 pixels, else black on white"
    parser.add_argument("--ink", metavar="COLOUR", help=f"colour of lines, as in CSS ({colours})")
    parser.add_argument("--paper", metavar="COLOUR", help="colour of the canvas")
    add_answers(parser)
    _add_listening(parser, port=7860)
    parser.set_defaults(run=run_web, image=None)


def _size(text: str) -> tuple[int, int]:
    width, height = map(int, text.lower().split("x"))
    return width, height


def run_web(arguments: argparse.Namespace) -> None:
    options = answer_options(arguments)
    from transformers import set_seed

    try:
        from ..serving.web import build_page
    except ImportError as error:
        raise ImportError("The page needs Gradio: run `pip install 'gradio>=6.10,<7'`.") from error
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
            page.block_thread()
        except KeyboardInterrupt:  # Gradio catches it only inside `block_thread`
            pass
        finally:
            page.close(verbose=False)


def _add_listening(parser: argparse.ArgumentParser, port: int) -> None:
    parser.add_argument("--host", default="localhost", help="address to listen on (default: localhost)")
    add_number(parser, "--port", port, "port to listen on; 0 takes a free one", least=0)
    store = "memory to keep encoded images for later questions, in MiB; 0 turns this off"
    add_number(parser, "--image-store", 1024, store, metavar="MIB", least=0)


def address_of(host: str, port: int) -> str:
    """The web address of a host. An IPv6 address stands in brackets: `http://[::1]:8000`."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def bind(host: str, port: int) -> socket.socket:
    """Binds a port; 0 takes a free one. Raises a `ValueError` if the address is not ours, or the port is in use."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ValueError(f"Cannot listen on `--host` {host}, `--port` {port}: {error}") from error
    return listener
