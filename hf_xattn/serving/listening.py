"""Binds the port of a server before its model is loaded, so that a wrong port costs no time."""

from __future__ import annotations

import socket


def address_of(host: str, port: int) -> str:
    """The web address of a host. An IPv6 address stands in brackets: `http://[::1]:8000`."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def bind(host: str, port: int) -> socket.socket:
    """Binds a port; 0 takes a free one.

    Raises:
        ValueError: if the address does not belong to this machine, or the port is in use.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ValueError(f"Cannot listen on `--host` {host}, `--port` {port}: {error}") from error
    return listener
