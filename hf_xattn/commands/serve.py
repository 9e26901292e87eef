"""`hf-xattn serve`: transformers' OpenAI-compatible server, with one model that is loaded at its start."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from .loading import add_model, load_model_and_images
from .options import add_listening, address_of, bind, check_least


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("serve", help="answer clients of the OpenAI API (needs the extra `serve`)")
    add_model(parser)
    parser.add_argument("--name", help="name of the model for clients (default: DIR as given)")
    parser.add_argument(
        "--max-image-mib",
        type=int,
        default=20,
        metavar="MIB",
        help="largest image that a client may send or name, in MiB (default: 20)",
    )
    parser.add_argument(
        "--max-request-mib",
        type=int,
        metavar="MIB",
        help="largest body of a request, in MiB (default: four of the largest images fit, 107)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=4096,
        metavar="N",
        help="most tokens that a client may ask for in an answer (default: 4096)",
    )
    parser.add_argument(
        "--max-beams", type=int, default=8, metavar="N", help="most beams that a client may ask for (default: 8)"
    )
    parser.add_argument(
        "--private-addresses",
        action="store_true",
        help="fetch images that clients name also from this machine and from private networks",
    )
    add_listening(parser, port=8000)
    parser.set_defaults(run=run, image=None)


def run(arguments: argparse.Namespace) -> None:
    check_least(arguments, 0, "image_store")
    check_least(arguments, 1, "max_image_mib", "max_request_mib", "max_new_tokens", "max_beams")
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise ImportError("`hf-xattn serve` needs transformers' server: run `pip install 'transformers[serving]'`.")
    from ..serving.served_requests import AnswerLimits
    from ..serving.serving import SERVED, Server, build_app, check_answers

    limits = replace(SERVED, max_bytes=arguments.max_image_mib * 2**20, private_addresses=arguments.private_addresses)
    answers = AnswerLimits(arguments.max_new_tokens, arguments.max_beams)
    max_request_bytes = arguments.max_request_mib and arguments.max_request_mib * 2**20

    with bind(arguments.host, arguments.port) as listener:
        name = arguments.name or arguments.model
        print(f"Loading {arguments.model}", flush=True)
        model, processor, _ = load_model_and_images(arguments)
        check_answers(name, model, processor)
        if arguments.image_store:
            model.enable_image_store(arguments.image_store * 2**20)
        address = f"{address_of(arguments.host, listener.getsockname()[1])}/v1"

        def ready() -> None:
            print(f"Ready: {address} serves {name}. Stop with Ctrl-C.\n{_question(address, name)}", flush=True)

        try:
            Server(build_app(name, model, processor, limits, max_request_bytes, answers), ready).run(sockets=[listener])
        except KeyboardInterrupt:  # raised again by uvicorn after a clean stop
            pass


def _question(address: str, name: str) -> str:
    """A question about picture.png, to copy into a terminal."""
    data = r"data:image/png;base64,$(base64 < picture.png | tr -d '\n')"
    parts = [{"type": "image_url", "image_url": {"url": "DATA"}}, {"type": "text", "text": "What is it?"}]
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": parts}]}).replace("DATA", data)
    command = f"curl {address}/chat/completions -H 'Content-Type: application/json' -d @-"
    return f"Ask, for example:\n{command} <<END\n{body}\nEND"
