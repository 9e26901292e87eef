"""Parts of a model that a name in its configuration chooses: connectors, gates and codes of positions, ours and yours.

A folder holds the name and the weights of a part. Its class is code, and is registered in each process before a model
is built, by [`register_connector`], [`register_gate`] or [`register_position`]. The first values of its weights are
those that its `__init__` gives.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import initialization as init

from .stub import PACKAGE


# What the constructors of `nn.Linear` and `nn.Embedding` call, in `torch.nn.init` and on tensors. Norms and gates do
# not use them.
FILLS = frozenset({"kaiming_uniform_", "uniform_", "normal_", "zero_"})


class ValuesComeLater(TorchFunctionMode):
    """Leaves new layers without values. For constructors of a model that then calls `post_init`, or on the meta device.

    torch's layers draw random numbers in their constructors, and `_init_weights` writes every weight of a block or
    connector again: on a CPU the lost numbers took more time than those that stay. A mode of torch holds for one
    thread: models that other threads make are not changed.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", None) in FILLS:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)


# Inside: names of a configuration that comes with code, which registers them before the model is built.
_come_later: contextvars.ContextVar[bool] = contextvars.ContextVar("come_later", default=False)


@contextlib.contextmanager
def names_come_later(later: bool = True) -> Iterator[None]:
    """Inside, a configuration may name parts that are not registered yet. Building one raises an error still."""
    token = _come_later.set(later or _come_later.get())
    try:
        yield
    finally:
        _come_later.reset(token)


class Parts:
    """The parts of one kind, by name.

    Args:
        kind (`str`): what they are.
        field (`str`): of the configuration, which names one.
    """

    def __init__(self, kind: str, field: str):
        self.kind, self.field = kind, field
        self._makers: dict[str, Callable[[Any], Any]] = {}

    def register(self, name: str, maker: Callable[[Any], Any], exist_ok: bool = False) -> None:
        """Gives a part its name. `maker`, called with a configuration, makes one."""
        known = self._makers.get(name)
        if known is not None and not exist_ok and (_is_ours(known) or not _is_same(known, maker)):
            raise ValueError(
                f"Expected a new `name` for a {self.kind}, got {name!r}, which is {_path_of(known)}. Take another "
                "name, or pass `exist_ok=True`: models that are built from now on get the new one."
            )
        self._makers[name] = maker

    def check(self, name: Any, options: Any) -> None:
        """Raises a `ValueError` for a name that is not registered, unless its code comes later, and for its options."""
        if name not in self._makers and not _come_later.get():
            raise ValueError(self._unknown(name))
        if options is None:
            return
        if not self.is_own(name):
            raise ValueError(f"`{self.kind}_options` are for a {self.kind} of your own, got {options!r} with {name!r}.")

    def is_own(self, name: str) -> bool:
        """Whether a part is not of this package."""
        return name not in self._makers or not _is_ours(self._makers[name])

    def starts_at_zero(self, name: str) -> bool:
        """Whether fresh parts return zero, as their class says."""
        return bool(getattr(self._makers.get(name), "starts_at_zero", False))

    def keeps_positions(self, name: str) -> bool:
        """Whether a connector gives one token for each patch, in their order, as its class says."""
        return bool(getattr(self._makers.get(name), "keeps_positions", False))

    def needs_square(self, name: str) -> bool:
        """Whether a connector reads square pictures alone."""
        return bool(getattr(self._makers.get(name), "needs_square", False))

    def find(self, name: str) -> Callable[[Any], Any] | None:
        return self._makers.get(name)

    def maker(self, name: str) -> Callable[[Any], Any]:
        if name not in self._makers:
            raise ValueError(self._unknown(name))
        return self._makers[name]

    def make(self, name: str, config: Any) -> Any:
        """A part with first values, which transformers does not write over."""
        part = self.maker(name)(config)
        if self.is_own(name):
            for module in part.modules():
                for tensor in _tensors(module).values():
                    if not tensor.is_meta:
                        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
        return part

    def write_first_values(self, name: str, part: Any, module: nn.Module, config: Any) -> bool:
        """Writes what a checkpoint lacks of a module in an own part, and is empty memory, as the constructor gives it.

        Returns whether the module is in that part, which is no module where it is ours, or where there is no MLP.
        """
        if not isinstance(part, nn.Module) or not self.is_own(name):
            return False
        path = next((path for path, each in part.named_modules() if each is module), None)
        if path is None:
            return False
        with torch.random.fork_rng(devices=[]):
            fresh = _tensors(self.maker(name)(config).get_submodule(path))
        for each, value in _tensors(module).items():
            init.copy_(value, fresh[each])
        return True

    def _unknown(self, name: Any) -> str:
        known = ", ".join(map(repr, sorted(self._makers)))
        return (
            f"Expected `{self.field}` to name a {self.kind}: {known}, got {name!r}. Register one of your own first: "
            f"`hf_xattn.register_{self.kind}({name!r}, ITS_CLASS)`, or load with `trust_remote_code=True` a checkpoint "
            "that brings its code."
        )


CONNECTORS = Parts("connector", "connector_type")
GATES = Parts("gate", "gate")
POSITIONS = Parts("position", "position")


def named_parts(config: Any) -> list[tuple[Parts, str]]:
    """The parts that an [`XAttnConfig`] chooses by a name, each with the parts of its kind."""
    connector = [] if config.vision_config is None else [(CONNECTORS, config.connector_type)]
    block = config.cross_attention_config
    return [*connector, (GATES, block.gate), (POSITIONS, block.position)]


def register_connector(name: str, connector: type[nn.Module], exist_ok: bool = False) -> None:
    """Makes a connector of your own known under a name, for `connector_type` of [`XAttnConfig`] and [`retrofit`].

    Register it in each process, before a model that has it is built or loaded.

    Args:
        name (`str`): as saved in the configuration.
        connector (`type`): a class of `torch.nn.Module`. `connector(config)` gets the [`XAttnConfig`]: `vision_config`,
            `cross_attention_config.context_size`, and your own `connector_options`. Its `forward` turns the features
            of the vision tower `(..., tokens, width)` into image tokens `(..., tokens, context_size)`, more or fewer of
            them, but equally many of each image. With `vision_feature_layer` of several layers, `width` is their sum.
            `keeps_positions = True` in the class says that each token is that of one patch, in their order, which
            `AttentionMaps.grid` needs.
        exist_ok (`bool`, defaults to `False`): replace another one of this name.

    Raises:
        ValueError: for a name that is taken.

    Example:

    ```python
    >>> import hf_xattn
    >>> from torch import nn

    >>> class Normed(nn.Sequential):
    ...     def __init__(self, config):
    ...         width = config.vision_config.hidden_size
    ...         super().__init__(nn.LayerNorm(width), nn.Linear(width, config.cross_attention_config.context_size))

    >>> hf_xattn.register_connector("normed", Normed)
    >>> model = hf_xattn.retrofit(
    ...     "HuggingFaceTB/SmolLM2-135M-Instruct", "google/siglip-base-patch16-224", connector_type="normed"
    ... )
    ```
    """
    CONNECTORS.register(name, connector, exist_ok)


def register_gate(name: str, gate: type[nn.Module], exist_ok: bool = False) -> None:
    """Makes a gate of your own known under a name, for `gate` of [`CrossAttentionConfig`].

    Register it in each process, before a model that has it is built or loaded. Its weights are float32, in a model of
    any dtype; it gets its inputs in float32.

    Args:
        name (`str`): as saved in the configuration.
        gate (`type`): a class of `torch.nn.Module`. `gate(config)` gets the [`CrossAttentionConfig`] with your own
            `gate_options`; each block makes one for the attention and one for the MLP. Its `forward(update,
            hidden_states)` gets what the branch would add and the text `(batch, text_len, hidden_size)`, and returns
            what is added, in the same shape. A class attribute `starts_at_zero = True` says that a fresh gate returns
            zero: `zero_init=False` is then for you.
        exist_ok (`bool`, defaults to `False`): replace another one of this name.

    Raises:
        ValueError: for a name that is taken.

    Example:

    ```python
    >>> import hf_xattn
    >>> import torch
    >>> from torch import nn

    >>> class Half(nn.Module):
    ...     starts_at_zero = True
    ...
    ...     def __init__(self, config):
    ...         super().__init__()
    ...         self.scale = nn.Parameter(torch.zeros(1))
    ...
    ...     def forward(self, update, hidden_states):
    ...         return update * self.scale.sigmoid().sub(0.5)

    >>> hf_xattn.register_gate("half", Half)
    >>> config = hf_xattn.CrossAttentionConfig(gate="half", zero_init=False)
    ```
    """
    GATES.register(name, gate, exist_ok)


def register_position(name: str, position: type[nn.Module], exist_ok: bool = False) -> None:
    """Makes a code of positions of your own known under a name, for `position` of [`CrossAttentionConfig`].

    It changes queries and keys in front of the attention, as a rotary embedding does. Keys are cached as it returns
    them. Register it in each process, before a model that has it is built or loaded.

    Args:
        name (`str`): as saved in the configuration.
        position (`type`): a class of `torch.nn.Module`. `position(config)` gets the [`CrossAttentionConfig`] with your
            own `position_options`; each block makes one. Its `forward(states, places, of)` is called of `"keys"`, with
            keys `(rows, tokens, heads, head_dim)` and the place of each token in its image, from 0, `(1, tokens)`; and
            of `"queries"`, with queries `(rows, text_len, heads, head_dim)` and the place of each token in its text,
            without padding, `(rows or 1, text_len)`: `position_ids` where they are given. It returns states of the
            same shape.
        exist_ok (`bool`, defaults to `False`): replace another one of this name.

    Raises:
        ValueError: for a name that is taken.

    Example:

    ```python
    >>> import hf_xattn
    >>> from torch import nn

    >>> class Places(nn.Module):
    ...     def __init__(self, config):
    ...         super().__init__()
    ...         self.table = nn.Embedding(1024, config.head_dim)
    ...
    ...     def forward(self, states, places, of):
    ...         return states + self.table(places)[:, :, None] if of == "keys" else states

    >>> hf_xattn.register_position("places", Places)
    >>> block = hf_xattn.GatedCrossAttentionBlock(hf_xattn.CrossAttentionConfig(position="places"))
    ```
    """
    POSITIONS.register(name, position, exist_ok)


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def _path_of(maker: Any) -> str:
    return f"{maker.__module__}.{maker.__qualname__}"


def _is_same(known: Any, maker: Any) -> bool:
    """Whether a class is another's definition: from a cell of a notebook that ran again, or from a copy of its file."""
    if _path_of(known) == _path_of(maker):
        return True
    files = [getattr(sys.modules.get(each.__module__), "__file__", None) for each in (known, maker)]
    if known.__qualname__ != maker.__qualname__ or None in files:
        return False
    return Path(files[0] or "").read_bytes() == Path(files[1] or "").read_bytes()


def _is_ours(maker: Any) -> bool:
    return f"{maker.__module__}.".startswith(f"{PACKAGE}.")


__all__ = ["register_connector", "register_gate", "register_position"]
