"""Brings the context to the layers of decoders that do not pass keyword arguments to their layers.

The model stores the context of one forward in the channel. A layer's `__call__` reads the channel and passes the
context to the layer's `forward` as a keyword argument, the same keyword that other decoders pass on. Activation
checkpointing wraps `forward`, so the recomputation gets the context as an argument. By then the channel is empty: a
`forward` that read the channel would lose the image's gradient.

The channel belongs to one thread and one call. Nothing is stored on modules, where DDP, deepcopy or a replica in
another thread could lose the context or mix contexts up.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from ..layers.context import CrossAttentionContext


class _Channel(threading.local):
    context: CrossAttentionContext | None = None


_channel = _Channel()


@contextlib.contextmanager
def carrying(context: CrossAttentionContext) -> Iterator[None]:
    """Gives `context` to all layers that are called inside the `with` statement."""
    before, _channel.context = _channel.context, context
    try:
        yield
    finally:
        _channel.context = before


def carried_context() -> CrossAttentionContext | None:
    """The context of the call that runs in this thread."""
    return _channel.context
