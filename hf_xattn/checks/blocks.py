"""What the blocks do: nothing to rows without an image, something to rows with one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..layers.block import GatedCrossAttentionBlock
from ..utils import parts
from .measures import (
    BROKEN,
    FRESH,
    HOLDS,
    SEED,
    Result,
    image_of_first_row,
    largest,
    largest_difference,
    listed,
    mark_images,
    number,
    random_text,
    rounding_of,
    why_rows_mix,
)


AWAKE = 0.1  # standard deviation of the weights that a fresh block gets for a check
GATES = ("attn_gate", "mlp_gate")
PROJECTIONS = "attn.q_proj attn.k_proj attn.v_proj attn.o_proj mlp.gate_proj mlp.up_proj mlp.down_proj".split()


@torch.no_grad()
def check_rows_without_image(model: Any) -> Result:
    """A row without an image, in a batch with one, has the logits of the same rows without any image."""
    ids = random_text(model)
    with awake_blocks(model) as awake:
        alone = model(ids, use_cache=False).logits[1]
        mixed = model(mark_images(model, ids), **image_of_first_row(model), use_cache=False).logits[1]
    apart = largest_difference(mixed, alone)
    mixing = why_rows_mix(model)
    allowed = 0.0 if mixing is None else rounding_of(model) * largest(alone)
    why = "" if mixing is None else f" (rounding: {mixing})"
    line = f"largest difference of logits {number(apart)}, allowed {number(allowed)}{why}"
    line += f": a row beside a row with an image{woken(awake)}"
    return Result("image-less-rows", HOLDS if apart <= allowed else BROKEN, line, apart, allowed)


@torch.no_grad()
def check_alive(model: Any) -> Result:
    """Every block changes text that sees an image: no gate, projection or update is zero, but those of fresh blocks."""
    blocks = model.blocks
    changes, seen = _changes(model)
    layers = model.config.cross_attention_layers
    if all(map(_is_fresh, blocks)):
        line = f"fresh: untrained, so images change nothing yet ({len(blocks)} blocks start at zero)"
        return Result("blocks-alive", FRESH, line, 0.0)
    dead = []
    for block in blocks:
        index = block.layer_idx
        infinite = (name for name, weight in block.named_parameters() if not bool(weight.isfinite().all()))
        what = [f"{name} is zero" for name in sorted(_zeros_of(block))] + [f"{name} is not finite" for name in infinite]
        change = changes.get(index, 0.0)
        if not what and not 0 < change < float("inf"):
            what = ["its update is not finite" if change else "it changes no hidden state"]
        if what:
            dead.append(f"block {index} (layer {layers[index]}): {', '.join(what)}")
    weakest = min(changes, key=lambda index: changes[index])
    gates = [float(gate.float().tanh().abs().max()) for block in blocks for gate in _gates_of(block).values()]
    if dead:
        return Result("blocks-alive", BROKEN, f"{len(dead)} of {len(blocks)} blocks dead: {listed(dead)}", len(dead), 0)
    gated = f", smallest |tanh(gate)| {number(min(gates))}" if gates else ""
    gated += f", gate {blocks[0].config.gate!r} of your own" if _own_gates_of(blocks[0]) else ""
    line = (
        f"{len(blocks)} of {len(blocks)} blocks, weakest update {number(changes[weakest])} of the hidden state (layer "
        f"{layers[weakest]}){gated}, an image changes logits by {number(seen)}"
    )
    return Result("blocks-alive", HOLDS, line, changes[weakest])


@contextlib.contextmanager
def awake_blocks(model: Any) -> Iterator[int]:
    """Inside, a fresh model's blocks have random weights where they start at zero. Yields how many were woken."""
    blocks = model.blocks if all(map(_is_fresh, model.blocks)) else []
    generator = torch.Generator().manual_seed(SEED + 2)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.no_grad():
        for block in blocks:
            modules, weights = dict(block.named_modules()), dict(block.named_parameters())
            for name in sorted(_start_of(block)):
                weight = weights[name] if name in weights else _weight_of(modules[name])
                kept.append((weight, weight.detach().clone()))
                weight.copy_(torch.randn(weight.shape, generator=generator) * AWAKE)
    try:
        yield len(blocks)
    finally:
        with torch.no_grad():
            for weight, zero in kept:
                weight.copy_(zero)


def woken(count: int) -> str:
    """What a line adds where blocks were woken."""
    return " (fresh blocks get random weights here)" if count else ""


def _is_fresh(block: GatedCrossAttentionBlock) -> bool:
    zeros = _zeros_of(block).union(*(_zeros_in(name, gate) for name, gate in _own_gates_of(block).items()))
    return block.config.starts_at_identity and zeros == _start_of(block)


def _gates_of(block: GatedCrossAttentionBlock) -> dict[str, torch.Tensor]:
    return {name: gate for name in GATES if isinstance(gate := getattr(block, name), torch.Tensor)}


def _own_gates_of(block: GatedCrossAttentionBlock) -> dict[str, nn.Module]:
    return {name: gate for name in GATES if isinstance(gate := getattr(block, name), nn.Module)}


def _zeros_in(name: str, gate: nn.Module) -> set[str]:
    return {f"{name}.{inner}" for inner, weight in gate.named_parameters() if not bool(weight.any())}


def _zeros_of(block: GatedCrossAttentionBlock) -> set[str]:
    """Names of the gates and projections of a block that are zero everywhere."""
    zeros = {name for name, gate in _gates_of(block).items() if not bool(gate.any())}
    modules = dict(block.named_modules())
    projections = {name: modules[name] for name in PROJECTIONS if isinstance(modules.get(name), nn.Module)}
    return zeros | {name for name, module in projections.items() if not bool(_weight_of(module).any())}


def _weight_of(module: Any) -> torch.Tensor:
    return getattr(module, "base_layer", module).weight  # PEFT keeps the projection there


def _start_of(block: GatedCrossAttentionBlock) -> set[str]:
    """What is zero in a fresh block."""
    config = block.config
    last = {"attn.o_proj"} if block.mlp is None else {"attn.o_proj", "mlp.down_proj"}
    start = last if config.zero_init else set()
    if not (own := _own_gates_of(block)):
        return start | ({*_gates_of(block)} if config.gate_init == 0 else set())
    fresh = parts.GATES.make(config.gate, config)
    return start.union(*(_zeros_in(name, fresh) for name in own))


def _changes(model: Any) -> tuple[dict[int, float], float]:
    """Returns each block's largest update as a share of the largest hidden state, and the largest change of a logit."""
    changes: dict[int, float] = {}

    def note(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> None:
        before = args[0] if args else kwargs["hidden_states"]
        changes[block.layer_idx] = largest_difference(output[0], before[0]) / max(largest(before[0]), 1e-30)

    ids = mark_images(model, random_text(model))
    hooks = [block.register_forward_hook(note, with_kwargs=True) for block in model.blocks]
    try:
        seen = model(ids, **image_of_first_row(model), use_cache=False).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    return changes, largest_difference(seen, model(ids, use_cache=False).logits[0])
