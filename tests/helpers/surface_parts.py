"""What the registration of own parts takes; see `test_public_surface.py`."""

import own_parts
from surface import Surface, needs, value
from torch import nn

from hf_xattn import register_connector, register_gate, register_position


PARTS = {
    "connector": own_parts.PoolingConnector,
    "gate": own_parts.SigmoidGate,
    "position": own_parts.TurningPosition,
}
NAMES = {"connector": "pooling", "gate": "offset_sigmoid", "position": "turning"}


def call(function, kind, **given):
    return function(**needs(given, name=NAMES[kind], **{kind: PARTS[kind]}))


SURFACES = {
    f"register_{kind}": Surface(
        function,
        lambda function=function, kind=kind, **given: call(function, kind, **given),
        {
            "name": value(none=None, kind=3, size=""),
            kind: value(none=None, kind=nn.Linear(2, 2), dtype=int),
            "exist_ok": value(none=None, kind="yes", size=1),
        },
    )
    for kind, function in (
        ("connector", register_connector),
        ("gate", register_gate),
        ("position", register_position),
    )
}
