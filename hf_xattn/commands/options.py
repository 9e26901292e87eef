"""Options that several commands share: the device, how answers are generated, and where a server listens."""

from __future__ import annotations

import argparse
import socket
from typing import Any


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Adds the option that `hub_options` reads."""
    parser.add_argument("--trust-remote-code", action="store_true", help="run custom code that a checkpoint contains")


def hub_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns keyword arguments of every `from_pretrained`. Without the option, custom code is an error."""
    return {"trust_remote_code": arguments.trust_remote_code}


def add_device(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds the option that `device_of` reads."""
    parser.add_argument(
        "--device", default=default, help=f"auto (a GPU if there is one), cpu, cuda, cuda:1, ... (default: {default})"
    )


def device_of(name: str) -> Any:  # mypy knows no `to` of a model that takes a name
    """Returns the device that `--device` names. Raises a `ValueError` for one that this machine does not have."""
    import torch

    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    gpus = [] if found is None else [f"{found.type}:{index}" for index in range(torch.accelerator.device_count())]
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", *gpus, *(gpu.partition(":")[0] for gpu in gpus)):
        built = "" if "cuda" not in name or torch.version.cuda else f" torch {torch.__version__} is built without CUDA."
        raise ValueError(
            f"Expected `--device` to be a device of this machine ({', '.join(['auto', 'cpu', *gpus])}), got "
            f"{name!r}.{built}"
        )
    return name


def add_answers(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `answer_options` reads."""
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="maximum number of tokens in an answer")
    parser.add_argument(
        "--temperature",
        type=float,
        help="0 always takes the most likely token (default: the model's generation settings)",
    )
    parser.add_argument("--seed", type=int, help="makes sampled answers repeatable")


def answer_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns keyword arguments of `generate`. Raises a `ValueError` for values out of bounds."""
    check_least(arguments, 1, "max_new_tokens")
    check_least(arguments, 0, "temperature")
    options: dict[str, Any] = {"max_new_tokens": arguments.max_new_tokens}
    if arguments.temperature is not None:
        options["do_sample"] = arguments.temperature > 0
    if arguments.temperature:
        options["temperature"] = arguments.temperature
    return options


def add_listening(parser: argparse.ArgumentParser, port: int) -> None:
    """Adds the options of a server. `port` is the default port."""
    parser.add_argument("--host", default="localhost", help="address to listen on (default: localhost)")
    parser.add_argument(
        "--port", type=int, default=port, help=f"port to listen on; 0 takes a free one (default: {port})"
    )
    parser.add_argument(
        "--image-store",
        type=int,
        default=1024,
        metavar="MIB",
        help="memory to keep encoded images for later questions, in MiB; 0 turns this off (default: 1024)",
    )


def check_least(arguments: argparse.Namespace, least: int, *names: str) -> None:
    """Raises a `ValueError` for an option below a number."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ValueError(f"`--{name.replace('_', '-')}` must be at least {least}, got {value}.")


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
