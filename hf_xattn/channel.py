"""A way around decoders that do not hand keyword arguments to their layers.

The model lays the context of one forward down here, and the layer's `__call__` takes it up and passes it to the layer's
`forward` as the same keyword that other decoders hand on themselves. Activation checkpointing wraps `forward`, so the
recomputation sees an argument and not the channel, which would be empty by then and leave the image without a gradient.

The channel belongs to a thread and to one call. So nothing stays on modules that DDP, deepcopy or a replica in another
thread could lose or mix up.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from .context import CrossAttentionContext


class _Channel(threading.local):
    context: CrossAttentionContext | None = None


_channel = _Channel()


@contextlib.contextmanager
def carrying(context: CrossAttentionContext) -> Iterator[None]:
    """Layers that are called inside get `context`."""
    before, _channel.context = _channel.context, context
    try:
        yield
    finally:
        _channel.context = before


def carried_context() -> CrossAttentionContext | None:
    """The context of the call that is under way in this thread."""
    return _channel.context
