"""Reads the self-attention of decoder layers, so that the blocks in front of them can start with its projections.

Names of modules do not tell what a layer computes: how a fused projection is cut, what its norms add to their weights,
how scores are scaled. So nothing is taken over that was not computed. The text model reads one token at position 0,
where rotary embeddings turn nothing. What its layers, their query projections and torch's attention kernel get there is
recorded, and weights are taken only if a block with them would give its kernel the same.

What has no place in a block is left out: rotary positions, windows, soft caps and sinks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..configuration_xattn import CrossAttentionConfig, XAttnConfig
from ..layers.block import GatedCrossAttentionBlock
from ..utils.architectures import text_num_hidden_layers
from ..utils.quantized_weights import is_packed, is_quantized
from .decoder import find_decoder


INITS = ("random", "self_attention")
REMEDY = 'Or leave the blocks with random weights: `init="random"`.'
SEPARATE = ("q_proj", "k_proj", "v_proj")
FUSED = ("qkv_proj", "query_key_value", "c_attn", "Wqkv")
EPSILONS = ("eps", "variance_epsilon", "epsilon")
# Largest relative difference between what was recorded and what the weights give: a rounding of the dtype.
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
PLACES = (0.25, 0.5, 0.75)  # of the tokens that are read, in the vocabulary


class Projection(NamedTuple):
    """Views of a layer's weights."""

    weight: torch.Tensor  # (out_features, in_features)
    bias: torch.Tensor | None

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(states.float(), self.weight.float(), bias)


class Norm(NamedTuple):
    """A norm in the terms of a block."""

    kind: str  # of `norm_type`
    weight: torch.Tensor  # (size,), float32
    bias: torch.Tensor | None
    eps: float

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        if self.kind == "rmsnorm":
            return nn.functional.rms_norm(states.float(), self.weight.shape, self.weight, self.eps)
        return nn.functional.layer_norm(states.float(), self.weight.shape, self.weight, self.bias, self.eps)


class SelfAttention(NamedTuple):
    """What a block takes over from the layer behind it."""

    query: Projection
    key: Projection
    value: Projection
    norm: Norm
    head_norms: tuple[Norm, Norm] | None  # of queries and of keys
    scale: float  # of the scores, beside `head_dim ** -0.5`
    fields: dict[str, Any]  # of `CrossAttentionConfig`

    @torch.no_grad()
    def copy_to(self, block: GatedCrossAttentionBlock) -> None:
        attn = block.attn
        for target, source in ((attn.q_proj, self.query), (attn.k_proj, self.key), (attn.v_proj, self.value)):
            target.weight.copy_(source.weight)
            if source.bias is not None:
                target.bias.copy_(source.bias)  # without one it starts at zero
        block.attn_norm.weight.copy_(self.norm.weight)
        if self.norm.bias is not None:
            block.attn_norm.bias.copy_(self.norm.bias)  # type: ignore[operator]
        if self.head_norms is not None:
            assert attn.q_norm is not None and attn.k_norm is not None
            attn.q_norm.weight.copy_(self.head_norms[0].weight)
            attn.k_norm.weight.copy_(self.head_norms[1].weight)
        if self.scale != 1.0:
            scaled = [attn.q_proj.weight, attn.q_proj.bias] if attn.q_norm is None else [attn.q_norm.weight]
            for weight in scaled:
                if weight is not None:
                    weight.mul_(self.scale)


class _Kernel(NamedTuple):
    """What torch's attention kernel was given."""

    query: torch.Tensor  # (tokens, heads, 1, head_dim)
    key: torch.Tensor
    value: torch.Tensor
    scale: float | None


class _Seen:
    """What was recorded of a layer."""

    def __init__(self) -> None:
        self.hidden_states: torch.Tensor | None = None
        self.projected: torch.Tensor | None = None  # the input of its query projection
        self.kernels: list[_Kernel] = []


class _Recorder(TorchFunctionMode):
    """Records the calls of torch's attention kernel, for the layer that runs. A mode of torch holds for one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: _Seen | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is nn.functional.scaled_dot_product_attention and self.layer is not None:
            given = dict(zip(("query", "key", "value"), args)) | kwargs
            query, key, value = (given[name].detach().float() for name in ("query", "key", "value"))
            self.layer.kernels.append(_Kernel(query, key, value, given.get("scale")))
        return function(*args, **kwargs)


def check_start(config: XAttnConfig) -> None:
    """Raises a `ValueError`, before weights are read, for blocks that no self-attention can start."""
    block, count = config.cross_attention_config, text_num_hidden_layers(config.text_config)
    if count in config.cross_attention_layers:
        raise ValueError(
            f'`init="self_attention"` starts a block as the layer behind it, but index {count} of '
            f"`cross_attention_layers` is a block after the last layer. Leave it out. {REMEDY}"
        )
    if block.context_size != block.hidden_size:
        raise ValueError(
            '`init="self_attention"` needs image tokens of the width that the keys of a layer are made of: expected '
            f'`context_size` to be {block.hidden_size}, got {block.context_size}. Choose the connector "linear" or '
            f'"mlp", and leave `context_size` out. {REMEDY}'
        )


@torch.no_grad()
def read_self_attention(text_model: PreTrainedModel, layers: Sequence[int]) -> dict[int, SelfAttention]:
    """Reads the self-attention of layers. Runs the text model on three texts of one token, and changes nothing.

    Raises:
        ValueError: for a layer whose self-attention is not understood: the message names it and says why.
    """
    name = f"{type(text_model).__name__} (model_type {text_model.config.model_type!r})"
    _, stack = find_decoder(text_model)
    found = {index: _projections(stack[index], f"layer {index} of {name}") for index in sorted(set(layers))}
    seen = _record(text_model, name, {index: (stack[index], modules[0]) for index, modules in found.items()})
    return {
        index: _understood(stack[index], modules, seen[index], f"layer {index} of {name}", text_model.dtype)
        for index, modules in found.items()
    }


def with_fields_of(given: Any, starts: dict[int, SelfAttention]) -> Any:
    """Fields of blocks: those that a `dict` leaves out follow the self-attention. Any other value stays as it is."""
    first, *others = starts.items()
    for index, start in others:
        for field, value in start.fields.items():
            if value != first[1].fields[field]:
                raise ValueError(
                    f'`init="self_attention"` needs layers of one kind, because all blocks have one configuration: '
                    f"`{field}` of layer {first[0]} is {first[1].fields[field]!r}, that of layer {index} is {value!r}. "
                    f"Choose other `cross_attention_layers`. {REMEDY}"
                )
    if given is None or (isinstance(given, dict) and "model_type" not in given):
        return {**first[1].fields, **(given or {})}
    return given


def check_block(config: CrossAttentionConfig, starts: dict[int, SelfAttention]) -> None:
    """Raises a `ValueError` for blocks that do not have what they shall start with."""
    for index, start in starts.items():
        for field, value in start.fields.items():
            got = getattr(config, field)
            # A bias that the layer has not starts at zero, and a norm that it has not at one.
            more = field in ("attention_bias", "qk_norm") and got and not value
            if got != value and not more and not field.endswith("eps"):
                raise ValueError(
                    f'`init="self_attention"` copies layer {index}: expected `{field}` of `cross_attention` to be '
                    f"{value!r}, got {got!r}. Leave it out. {REMEDY}"
                )


def _refused(where: str, why: str) -> ValueError:
    return ValueError(f'`init="self_attention"` cannot start a block as {where}: {why}. Choose other layers. {REMEDY}')


def _projections(layer: nn.Module, where: str) -> list[nn.Module]:
    """The projections of queries, keys and values of a layer, or the one of all three."""
    found: dict[str, list[nn.Module]] = {}
    for path, part in layer.named_modules():
        if all(name in part._modules for name in SEPARATE):
            found[path] = [getattr(part, name) for name in SEPARATE]
        found |= {f"{path}.{name}".strip("."): [getattr(part, name)] for name in FUSED if name in part._modules}
    if len(found) != 1:
        names = f"{', '.join(SEPARATE)} or one of {', '.join(FUSED)}"
        raise _refused(where, f"expected one module with {names}, got {sorted(found) if found else 'none'}")
    (modules,) = found.values()
    for module in modules:
        weight = getattr(module, "weight", None)
        if is_packed(module) or (isinstance(weight, torch.Tensor) and is_quantized(weight)):
            raise _refused(where, "its weights are quantized. Load the text model without a quantization")
        if type(module) not in (nn.Linear, Conv1D) or weight is None:
            raise _refused(where, f"its projections are of type {type(module).__name__}, not nn.Linear")
        if weight.is_meta or hasattr(weight, "_local_tensor"):
            kind = "on the meta device" if weight.is_meta else "split among processes"
            raise _refused(where, f"its weights are {kind}. Load them whole")
    return modules


def _record(
    text_model: PreTrainedModel, name: str, watched: dict[int, tuple[nn.Module, nn.Module]]
) -> dict[int, _Seen]:
    """Runs the text model on single tokens. `watched`: layers, each with the projection of its queries."""
    seen = {index: _Seen() for index in watched}
    recorder, hooks = _Recorder(), []

    def begin(index: int) -> Any:
        def hook(_: Any, args: Any, kwargs: Any) -> None:
            recorder.layer = seen[index]
            seen[index].hidden_states = (args[0] if args else kwargs["hidden_states"]).detach()

        return hook

    def project(index: int) -> Any:
        def hook(_: Any, args: Any) -> None:
            seen[index].projected = args[0].detach()

        return hook

    def end(*_: Any) -> None:
        recorder.layer = None

    for index, (layer, query) in watched.items():
        hooks.append(layer.register_forward_pre_hook(begin(index), with_kwargs=True))
        hooks.append(query.register_forward_pre_hook(project(index)))
        hooks.append(layer.register_forward_hook(end, always_call=True))
    embedding: Any = text_model.get_input_embeddings()
    ids = torch.tensor([[int(embedding.weight.shape[0] * place)] for place in PLACES], device=embedding.weight.device)
    try:
        with _reading(text_model, name), recorder:
            text_model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


@contextmanager
def _reading(text_model: PreTrainedModel, name: str) -> Iterator[None]:
    """Puts a model into evaluation mode, with torch's attention kernel, and back."""
    training = {module: module.training for module in text_model.modules()}
    kernel = text_model.config._attn_implementation
    try:
        if kernel != "sdpa":
            try:
                text_model.set_attn_implementation("sdpa")
            except (ImportError, ValueError) as error:
                raise _refused(f"a layer of {name}", "its attention does not use torch's kernel (sdpa)") from error
        text_model.eval()
        yield
    finally:
        if kernel != "sdpa":
            text_model.set_attn_implementation(kernel)
        for module, was in training.items():
            module.training = was


def _understood(
    layer: nn.Module, modules: list[nn.Module], seen: _Seen, where: str, dtype: torch.dtype
) -> SelfAttention:
    """The self-attention of a layer, if its weights give what was recorded."""
    tolerance = TOLERANCES.get(dtype, 1e-3)
    if seen.hidden_states is None or seen.projected is None or len(seen.kernels) != 1:
        calls = f"torch's attention kernel was called {len(seen.kernels)} times"
        raise _refused(where, f"expected it to run its query projection and attention once, but {calls}")
    (kernel,) = seen.kernels
    heads, head_dim = kernel.query.shape[1], kernel.query.shape[-1]
    norm = _norm_of(layer, seen.hidden_states, seen.projected, tolerance)
    if norm is None:
        raise _refused(where, "its self-attention does not read the hidden states through a norm that a block has")
    for query, key, value in _cuts(modules, heads, head_dim):
        kv_heads = key.weight.shape[0] // head_dim
        sizes = (query.weight.shape[0], key.weight.shape[0], value.weight.shape[0])
        if sizes != (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim) or heads % max(kv_heads, 1):
            continue
        raw = [each(seen.projected[:, 0]).unflatten(-1, (-1, head_dim)) for each in (query, key, value)]
        repeats = kernel.key.shape[1] // kv_heads
        raw[1:] = [each.repeat_interleave(repeats, dim=1) for each in raw[1:]]
        if _ratio(kernel.value[:, :, 0], raw[2], tolerance) != 1.0:
            continue
        scores = _norms_of_heads(layer, kernel, raw, tolerance)
        if scores is None:
            continue
        head_norms, ratio = scores
        scale = _near_one(ratio * (head_dim**-0.5 if kernel.scale is None else kernel.scale) * head_dim**0.5, tolerance)
        fields = {
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "attention_bias": any(each.bias is not None for each in (query, key, value)),
            "norm_type": norm.kind,
            "norm_eps": norm.eps,
            "qk_norm": head_norms is not None,
        }
        if head_norms is not None:
            fields["qk_norm_eps"] = head_norms[0].eps
        return SelfAttention(query, key, value, norm, head_norms, scale, fields)
    raise _refused(where, "what its attention gets is not what its projections and norms give, as a block computes it")


def _cuts(modules: list[nn.Module], heads: int, head_dim: int) -> Iterator[list[Projection]]:
    """Queries, keys and values of a layer; of a fused projection one way to cut it after another."""
    whole = [
        Projection(module.weight.T if isinstance(module, Conv1D) else module.weight, module.bias)  # type: ignore
        for module in modules
    ]
    if len(whole) == 3:
        yield whole
        return
    weight, bias = whole[0]
    kv_heads, left = divmod(weight.shape[0] - heads * head_dim, 2 * head_dim)
    if left or kv_heads < 1 or heads % kv_heads:
        return
    sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    biases: Sequence[Any] = [None] * 3 if bias is None else bias.split(sizes)
    yield [Projection(*each) for each in zip(weight.split(sizes), biases)]  # all queries, all keys, all values

    def grouped(tensor: torch.Tensor) -> list[torch.Tensor]:
        """The queries of a K/V head, its key and its value, then those of the next one."""
        parts = tensor.unflatten(0, (kv_heads, heads // kv_heads + 2, head_dim))
        return [part.flatten(0, 2) for part in (parts[:, :-2], parts[:, -2:-1], parts[:, -1:])]

    biases = [None] * 3 if bias is None else grouped(bias)
    yield [Projection(*each) for each in zip(grouped(weight), biases)]


def _norm_of(layer: nn.Module, read: torch.Tensor, given: torch.Tensor, tolerance: float) -> Norm | None:
    """The norm through which a layer's self-attention reads its hidden states."""
    for norm in _norms(layer, read.shape[-1]):
        if _ratio(given, norm(read), tolerance) == 1.0:
            return norm
    return None


def _norms_of_heads(
    layer: nn.Module, kernel: _Kernel, raw: list[torch.Tensor], tolerance: float
) -> tuple[tuple[Norm, Norm] | None, float] | None:
    """The norms of queries and keys, or None if there are none, and how scores are scaled besides. None: neither."""
    pairs = [(found[:, :, 0], made) for found, made in zip((kernel.query, kernel.key), raw)]
    ratios = [_ratio(found, made, tolerance) for found, made in pairs]
    if all(ratios):
        return None, ratios[0] * ratios[1]
    candidates = [norm for norm in _norms(layer, raw[0].shape[-1]) if norm.kind == "rmsnorm"]
    norms = []
    for found, made in pairs:
        fitting = [(norm, ratio) for norm in candidates if (ratio := _ratio(found, norm(made), tolerance))]
        if not fitting:
            return None
        # Norms that differ by a factor alone fit too: the one that needs none is the layer's.
        norms.append(min(fitting, key=lambda fit: abs(fit[1] - 1)))
    return (norms[0][0], norms[1][0]), norms[0][1] * norms[1][1]


def _norms(layer: nn.Module, size: int) -> Iterator[Norm]:
    """What the norms of a width in a layer may compute; and norms without weights."""
    plain = torch.ones(size, device=next(layer.parameters()).device)
    for module in layer.modules():
        own, eps = dict(module.named_parameters(recurse=False)), _eps_of(module)
        if eps is None or set(own) - {"weight", "bias"} or any(tuple(each.shape) != (size,) for each in own.values()):
            continue
        bias = own["bias"].float() if "bias" in own else None
        weights = [own["weight"].float(), 1 + own["weight"].float()] if "weight" in own else [plain]
        for weight in weights:
            if bias is None:
                yield Norm("rmsnorm", weight, None, eps)
            yield Norm("layernorm", weight, bias, eps)


def _eps_of(module: nn.Module) -> float | None:
    return next((float(vars(module)[name]) for name in EPSILONS if isinstance(vars(module).get(name), float)), None)


def _ratio(found: torch.Tensor, made: torch.Tensor, tolerance: float) -> float:
    """The positive factor between two tensors, 1.0 if it is near it; 0.0 if they differ in more than a factor."""
    found, made = found.flatten().double(), made.flatten().double()
    if found.shape != made.shape or not found.norm() > 0 or not made.norm() > 0:
        return 0.0
    ratio = float(found @ made / (made @ made))
    if ratio <= 0 or (found - ratio * made).norm() > tolerance * found.norm():
        return 0.0
    return _near_one(ratio, tolerance)


def _near_one(factor: float, tolerance: float) -> float:
    return 1.0 if abs(factor - 1) <= tolerance else factor
