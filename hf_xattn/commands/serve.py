"""`hf-xattn serve`: transformers' OpenAI-compatible server, with one model that is loaded at its start."""

from __future__ import annotations

import argparse
import json

from .loading import DTYPES, load_model_and_images


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("serve", help="answer clients of the OpenAI API (needs the extra `serve`)")
    parser.add_argument("model", metavar="DIR", help="a retrofitted model: a folder or a Hub id")
    parser.add_argument("--name", help="name of the model for clients (default: DIR as given)")
    parser.add_argument("--host", default="localhost", help="address to listen on (default: localhost)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one (default: 8000)")
    parser.add_argument("--dtype", default="auto", choices=DTYPES)
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    parser.add_argument(
        "--image-store",
        type=int,
        default=1024,
        metavar="MIB",
        help="memory to keep encoded images for later questions, in MiB; 0 turns this off (default: 1024)",
    )
    parser.set_defaults(run=run, image=None)


def run(arguments: argparse.Namespace) -> None:
    if arguments.image_store < 0:
        raise ValueError(f"`--image-store` must be at least 0, got {arguments.image_store}.")
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise ImportError("`hf-xattn serve` needs transformers' server: run `pip install 'hf_xattn[serve]'`.")
    from ..serving import Server, bind, build_app, check_answers

    with bind(arguments.host, arguments.port) as listener:
        if arguments.device == "auto":
            import torch

            arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
        name = arguments.name or arguments.model
        print(f"Loading {arguments.model}", flush=True)
        model, processor, _ = load_model_and_images(arguments)
        check_answers(name, model, processor)
        if arguments.image_store:
            model.enable_image_store(arguments.image_store * 2**20)
        address = f"http://{arguments.host}:{listener.getsockname()[1]}/v1"

        def ready() -> None:
            print(f"Ready: {address} serves {name}. Stop with Ctrl-C.\n{_question(address, name)}", flush=True)

        try:
            Server(build_app(name, model, processor), ready).run(sockets=[listener])
        except KeyboardInterrupt:  # raised again by uvicorn after a clean stop
            pass


def _question(address: str, name: str) -> str:
    """A question about picture.png, to copy into a terminal."""
    data = r"data:image/png;base64,$(base64 < picture.png | tr -d '\n')"
    parts = [{"type": "image_url", "image_url": {"url": "DATA"}}, {"type": "text", "text": "What is it?"}]
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": parts}]}).replace("DATA", data)
    command = f"curl {address}/chat/completions -H 'Content-Type: application/json' -d @-"
    return f"Ask, for example:\n{command} <<END\n{body}\nEND"
