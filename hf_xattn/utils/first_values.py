"""Making modules whose first values `_init_weights` writes.

torch's layers draw random numbers in their constructors. `_init_weights` then writes every weight of a block or connector again. The
first numbers would be lost, and on a CPU they took more time than those that stay.
"""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode


# What the constructors of `nn.Linear` and `nn.Embedding` call, in `torch.nn.init` and on tensors. Norms and gates do not use them.
FILLS = frozenset({"kaiming_uniform_", "uniform_", "normal_", "zero_"})


class ValuesComeLater(TorchFunctionMode):
    """Leaves new layers without values. For constructors of a model that then calls `post_init`, or on the meta device.

    A mode of torch holds for one thread. Replacing the functions in `torch.nn.init` would change models that other threads make.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", None) in FILLS:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)
