"""The commands that serve one model, which they load when they start.

`hf-xattn serve` answers clients of the OpenAI API. `hf-xattn web` shows a page on which a visitor draws or drops
images, asks about them, and sees where the model looked.
"""

from __future__ import annotations

import argparse
import json
import socket
from pathlib import Path

from .shared import add_answers, add_loading, add_model, add_number, answer_options, load_model_and_images


def register_serve(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model to clients of the OpenAI API (needs the extra `serve`)",
        description="Serves one model to clients of the OpenAI API: POST /v1/chat/completions, GET /v1/models and GET "
        "/health. The server has no passwords and no encryption: put a proxy in front of it before others reach it.",
        usage="%(prog)s MODEL [options]",
    )
    add_model(parser)
    name = "name by which clients ask for the model (default: MODEL as given)"
    parser.add_argument("--name", metavar="NAME", help=name)
    _add_listening(parser, port=8000)
    limits = parser.add_argument_group("limits of a request")
    image = "largest image that a client may send or name, in MiB"
    add_number(limits, "--max-image-mib", 20, image, metavar="MIB")
    add_number(limits, "--max-images", 64, "largest number of images in a request")
    pixels = "largest number of pixels of all images of a request together, in millions"
    add_number(limits, "--max-request-megapixels", 68, pixels)
    request = "largest body of a request, in MiB (default: room for four images of --max-image-mib, 107 if that is 20)"
    add_number(limits, "--max-request-mib", None, request, metavar="MIB")
    add_number(limits, "--max-new-tokens", 4096, "largest number of tokens that a client may ask for in an answer")
    add_number(limits, "--max-beams", 8, "largest number of beams that a client may ask for")
    requests = "largest number of requests at the same time, whether they are read, wait or are answered"
    add_number(limits, "--max-requests", 16, requests)
    fetching = parser.add_argument_group("images at web addresses")
    fetch = (
        "download images from public web addresses that clients name (default: clients must send images as data URLs)"
    )
    fetching.add_argument("--fetch-images", action="store_true", help=fetch)
    private = "download images also from this machine and from private networks; --fetch-images is then on"
    fetching.add_argument("--private-addresses", action="store_true", help=private)
    add_loading(parser)
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
        except KeyboardInterrupt:  # uvicorn raises it again after it has stopped
            pass


def _question(address: str, name: str) -> str:
    """Returns a command that asks about picture.png, for a person to copy into a terminal."""
    data = r"data:image/png;base64,$(base64 < picture.png | tr -d '\n')"
    parts = [{"type": "image_url", "image_url": {"url": "DATA"}}, {"type": "text", "text": "What is it?"}]
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": parts}]}).replace("DATA", data)
    command = f"curl {address}/chat/completions -H 'Content-Type: application/json' -d @-"
    return f"Ask, for example:\n{command} <<END\n{body}\nEND"


def register_web(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "web",
        help="show a page to draw or drop images and chat about them (needs the extra `web`)",
        description="Shows a web page on which visitors draw or drop images, ask about them, and see where the model "
        "looked. The page has no passwords and no encryption: put a proxy in front of it before others reach it.",
        usage="%(prog)s MODEL [options]",
    )
    add_model(parser)
    _add_listening(parser, port=7860)
    page = parser.add_argument_group("page")
    page.add_argument("--name", metavar="TEXT", help="heading of the page (default: the last part of MODEL)")
    question = (
        "a question that visitors choose with one click; repeat the option for several (default: the questions in the "
        "model card)"
    )
    page.add_argument("--question", action="append", metavar="TEXT", help=question)
    canvas = "width and height of the canvas in pixels (default: a multiple of the image size that the model reads)"
    page.add_argument("--canvas", type=_size, metavar="WxH", help=canvas)
    ink = "colour of lines, as in CSS (default: white if the model reads images below 64 pixels, else black)"
    page.add_argument("--ink", metavar="COLOUR", help=ink)
    paper = "colour of the canvas (default: black if the model reads images below 64 pixels, else white)"
    page.add_argument("--paper", metavar="COLOUR", help=paper)
    add_answers(parser)
    add_loading(parser)
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
    with bind(arguments.host, arguments.port) as listener:  # an error comes before the model is loaded
        port = listener.getsockname()[1]
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
    try:
        page.launch(server_name=arguments.host, server_port=port, quiet=True, prevent_thread_lock=True)
        print(f"Ready: {address_of(arguments.host, port)} shows {arguments.model}. Stop with Ctrl-C.", flush=True)
        page.block_thread()
    except KeyboardInterrupt:  # outside of `block_thread`, Gradio does not catch it
        pass
    finally:
        page.close(verbose=False)


def _add_listening(parser: argparse.ArgumentParser, port: int) -> None:
    host = "address to listen on; 0.0.0.0 lets other machines connect (default: localhost)"
    parser.add_argument("--host", default="localhost", metavar="HOST", help=host)
    add_number(parser, "--port", port, "port to listen on; 0 takes a free port", least=0)
    store = "memory for encoded images, so that later questions about them start sooner, in MiB; 0 keeps none"
    add_number(parser, "--image-store", 1024, store, metavar="MIB", least=0)


def address_of(host: str, port: int) -> str:
    """Returns the web address of a host and a port. An IPv6 address gets brackets: `http://[::1]:8000`."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def bind(host: str, port: int) -> socket.socket:
    """Binds a port, or a free one for 0.

    Raises:
        ValueError: if `host` is no address of this machine, or if the port is in use.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ValueError(f"Cannot listen on `--host` {host}, `--port` {port}: {error}") from error
    return listener
