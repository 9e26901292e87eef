"""Registers the parts that a configuration chooses by a name: connectors, gates and position encodings.

Some of them belong to this package, and users can add their own. A saved folder holds the name and the weights of a
part. The class of a user's part is code, so it must be registered in each process before a model is built, with
[`register_connector`], [`register_gate`] or [`register_position`]. Its weights are initialised by its `__init__`.
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
from transformers import PreTrainedConfig
from transformers import initialization as init

from .stub import PACKAGE


# The functions of `torch.nn.init` and of tensors that the constructors of `nn.Linear` and `nn.Embedding` call. The
# constructors of norms and gates do not call them.
FILLS = frozenset({"kaiming_uniform_", "uniform_", "normal_", "zero_"})


class ValuesComeLater(TorchFunctionMode):
    """Context in which new layers get no values: for a model that calls `post_init` next, or on the meta device.

    torch's layers draw random numbers in their constructors, and then `_init_weights` writes every weight of a block or
    connector again. On a CPU, the first numbers took more time than the second ones. A mode of torch holds for one
    thread, so models that other threads build are not changed.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", None) in FILLS:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)


# True while a configuration is read whose checkpoint brings code, which registers the names before a model is built.
_come_later: contextvars.ContextVar[bool] = contextvars.ContextVar("come_later", default=False)


@contextlib.contextmanager
def names_come_later(later: bool = True) -> Iterator[None]:
    """Context in which a configuration may name parts that are not registered yet. Building them is still an error."""
    token = _come_later.set(later or _come_later.get())
    try:
        yield
    finally:
        _come_later.reset(token)


class Parts:
    """The parts of one kind, by name.

    Args:
        kind (`str`): the word for such a part in messages.
        field (`str`): the field of the configuration that names a part.
    """

    def __init__(self, kind: str, field: str):
        self.kind, self.field = kind, field
        self._makers: dict[str, Callable[[Any], Any]] = {}

    def register(self, name: str, maker: Callable[[Any], Any], exist_ok: bool = False) -> None:
        """Registers a part under a name. `maker` is called with a configuration and returns the part."""
        known = self._makers.get(name)
        if known is not None and not exist_ok and (_is_ours(known) or not _is_same(known, maker)):
            raise ValueError(
                f"Expected a new `name` for a {self.kind}, got {name!r}, which is {_path_of(known)}. Take another "
                "name, or pass `exist_ok=True` to replace it in models that are built from now on."
            )
        self._makers[name] = maker

    def check(self, name: str, options: object) -> None:
        """Raises a `ValueError` for a name that is not registered, unless its code comes later, and for options beside
        a part of this package.
        """
        if name not in self._makers and not _come_later.get():
            raise ValueError(self._unknown(name))
        if options is None:
            return
        if not self.is_own(name):
            raise ValueError(f"`{self.kind}_options` are for a {self.kind} of your own, got {options!r} with {name!r}.")

    def is_own(self, name: str) -> bool:
        """Whether a part does not belong to this package."""
        return name not in self._makers or not _is_ours(self._makers[name])

    def starts_at_zero(self, name: str) -> bool:
        """Whether the class of a part says that a fresh part returns zero."""
        return bool(getattr(self._makers.get(name), "starts_at_zero", False))

    def keeps_positions(self, name: str) -> bool:
        """Whether the class of a connector says that it returns one token for each patch, in the order of patches."""
        return bool(getattr(self._makers.get(name), "keeps_positions", False))

    def needs_square(self, name: str) -> bool:
        """Whether a connector reads only square images."""
        return bool(getattr(self._makers.get(name), "needs_square", False))

    def find(self, name: str) -> Callable[[Any], Any] | None:
        return self._makers.get(name)

    def maker(self, name: str) -> Callable[[Any], Any]:
        if name not in self._makers:
            raise ValueError(self._unknown(name))
        return self._makers[name]

    def make(self, name: str, config: PreTrainedConfig) -> Any:
        """Makes a part. The values that its constructor gives are marked, so that transformers keeps them."""
        part = self.maker(name)(config)
        if self.is_own(name):
            for module in part.modules():
                for tensor in _tensors(module).values():
                    if not tensor.is_meta:
                        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
        return part

    def write_first_values(self, name: str, part: object, module: nn.Module, config: PreTrainedConfig) -> bool:
        """Initialises weights of a user's part that a checkpoint lacks, with the values that the constructor gives.

        Args:
            name (`str`): name of the part.
            part: the part. It may be something else than a module, and then holds none.
            module (`nn.Module`): a module of the model, whose weights are empty memory.
            config: the configuration of the part.

        Returns:
            `bool`: whether `module` belongs to the part, which is a user's own.
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
            f"`hf_xattn.register_{self.kind}({name!r}, ITS_CLASS)`. If the checkpoint brings the code of the "
            f"{self.kind}, load it with `trust_remote_code=True`."
        )


CONNECTORS = Parts("connector", "connector_type")
GATES = Parts("gate", "gate")
POSITIONS = Parts("position", "position")


def named_parts(config: PreTrainedConfig) -> list[tuple[Parts, str]]:
    """Returns the names that an [`XAttnConfig`] chooses, each with the registered parts of its kind."""
    connector = [] if config.vision_config is None else [(CONNECTORS, config.connector_type)]
    block = config.cross_attention_config
    return [*connector, (GATES, block.gate), (POSITIONS, block.position)]


def register_connector(name: str, connector: type[nn.Module], exist_ok: bool = False) -> None:
    """Registers a connector of your own under a name, for `connector_type` of [`XAttnConfig`] and [`retrofit`].

    Register it in each process, before a model that uses it is built or loaded.

    Args:
        name (`str`): the name that the configuration saves.
        connector (`type`): a subclass of `torch.nn.Module`. It is called as `connector(config)` with the
            [`XAttnConfig`], which holds `vision_config`, `cross_attention_config.context_size` and your own
            `connector_options`. Its `forward` turns the features of the vision tower `(..., tokens, width)` into image
            tokens `(..., num_image_tokens, context_size)`. It may return more or fewer tokens, but equally many for
            each image. If `vision_feature_layer` names several layers, `width` is the sum of their widths. The class
            attribute `keeps_positions = True` says that there is one token for each patch, in the order of patches,
            which `AttentionMaps.grid` needs.
        exist_ok (`bool`, defaults to `False`): replace a connector that has this name already.

    Raises:
        ValueError: if the name is taken.

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
    """Registers a gate of your own under a name, for `gate` of [`CrossAttentionConfig`].

    Register it in each process, before a model that uses it is built or loaded. The weights and the inputs of a gate
    are float32, whatever the dtype of the model.

    Args:
        name (`str`): the name that the configuration saves.
        gate (`type`): a subclass of `torch.nn.Module`. It is called as `gate(config)` with the
            [`CrossAttentionConfig`], which holds your own `gate_options`. Each block makes one gate for the attention
            and one for the MLP. Its `forward(update, hidden_states)` gets the output of the branch and the hidden
            states of the text, both `(batch, text_len, hidden_size)`, and returns what the branch adds, in the same
            shape. The class attribute `starts_at_zero = True` says that a fresh gate returns zero, so that
            `zero_init=False` is allowed.
        exist_ok (`bool`, defaults to `False`): replace a gate that has this name already.

    Raises:
        ValueError: if the name is taken.

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
    """Registers a position encoding of your own under a name, for `position` of [`CrossAttentionConfig`].

    It changes the queries and the keys before the attention, as a rotary embedding does. The cache holds the keys that
    it returns. Register it in each process, before a model that uses it is built or loaded.

    Args:
        name (`str`): the name that the configuration saves.
        position (`type`): a subclass of `torch.nn.Module`. It is called as `position(config)` with the
            [`CrossAttentionConfig`], which holds your own `position_options`. Each block makes one. Its
            `forward(states, places, of)` returns states of the same shape. It is called in two ways:

            - With `of="keys"`, `states` are keys `(rows, tokens, heads, head_dim)`, and `places` are the places of the
              tokens in their image, from 0, `(1, tokens)`.
            - With `of="queries"`, `states` are queries `(rows, text_len, heads, head_dim)`, and `places` are the places
              of the tokens in their text, `(rows or 1, text_len)`. These are the `position_ids`, if they are given;
              otherwise padding is not counted.
        exist_ok (`bool`, defaults to `False`): replace a position encoding that has this name already.

    Raises:
        ValueError: if the name is taken.

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
    """Whether two classes have the same definition: a notebook cell ran again, or the file was copied."""
    if _path_of(known) == _path_of(maker):
        return True
    files = [getattr(sys.modules.get(each.__module__), "__file__", None) for each in (known, maker)]
    if known.__qualname__ != maker.__qualname__ or None in files:
        return False
    return Path(files[0] or "").read_bytes() == Path(files[1] or "").read_bytes()


def _is_ours(maker: Any) -> bool:
    return f"{maker.__module__}.".startswith(f"{PACKAGE}.")


__all__ = ["register_connector", "register_gate", "register_position"]
