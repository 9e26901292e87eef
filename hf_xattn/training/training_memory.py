"""Tells how much memory a training run needs, from a model's shapes: no weight is loaded, and nothing is computed.

Weights, gradients and AdamW's averages are counted. What a forward holds for the backward is not derived from a formula, which would
hold for one decoder and one choice of what trains: a forward runs on fake tensors (`torch._subclasses.fake_tensor`), which have shapes
and no values, and `saved_tensors_hooks` see every tensor that autograd keeps. So a frozen layer in front of the first block counts
nothing, and gradient checkpointing counts what it keeps.

What trains is in float32, and computes in the dtype of the frozen weights: as `hf-xattn train` does it, and accelerate with FSDP2 and
`mixed_precision`.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import nn

from ..checkpoints.inspection import key_value_bytes_per_token, tokens_per_image
from ..images.vision import blank_image
from ..utils.transformers_api import checkpoint_activations
from .activation_trace import Held, held_activations, with_fake_weights
from .freezing import freeze


@dataclasses.dataclass(frozen=True)
class WeightBytes:
    """Bytes of what stays between two steps, of one rank or of all together.

    Attributes:
        frozen (`int`): weights that do not train, in their dtype.
        trained (`int`): weights that train, in float32.
        gradients (`int`): in float32.
        optimizer (`int`): AdamW's two averages, in float32.
    """

    frozen: int
    trained: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class ActivationBytes:
    """Bytes that the forward of one rank's batch holds for the backward.

    Attributes:
        batch (`int`): of the whole batch.
        text_token, image (`int`): the share of one text token, and of one image.
    """

    batch: int
    text_token: int
    image: int


@dataclasses.dataclass(frozen=True)
class Activations:
    """What a forward holds, see [`ActivationBytes`].

    Attributes:
        plain ([`ActivationBytes`]): without gradient checkpointing.
        checkpointed ([`ActivationBytes`], *optional*): with gradient checkpointing; None for a decoder that has none.
        recomputed (`int`): with gradient checkpointing: bytes of the layer that holds the most, which the backward computes again.
        copies (`int`): bytes of copies of the weights that train, in the dtype of the computation, which autocast keeps in a forward.
    """

    plain: ActivationBytes
    checkpointed: ActivationBytes | None
    recomputed: int
    copies: int


@dataclasses.dataclass(frozen=True)
class TrainingMemory:
    """What a training run needs.

    Attributes:
        frozen_parameters, trained_parameters (`int`): their numbers.
        dtype (`torch.dtype`): of the computation.
        whole, rank ([`WeightBytes`]): of all ranks together, and of the rank with the most.
        gathered (`int`): with several ranks: weights that FSDP2 holds in full at a time, in the dtype of the computation: the root unit,
            which stays whole from forward to backward, and two layers, one of which is fetched while the other computes.
        activations ([`Activations`] or `str`): of one rank; or why they are not known: a forward may depend on values, not on shapes
            alone.
        image_tokens (`int`, *optional*): tokens of an image; None without a vision tower.
        image_token (`int`): bytes of the keys and values of one image token, in all blocks.
    """

    frozen_parameters: int
    trained_parameters: int
    dtype: torch.dtype
    whole: WeightBytes
    rank: WeightBytes
    gathered: int
    activations: Activations | str
    image_tokens: int | None
    image_token: int


def training_memory(
    model: Any,
    *,
    batch: int = 1,
    text_length: int = 2048,
    images: int = 1,
    ranks: int = 1,
    train_text: bool = False,
    train_vision: bool = False,
) -> TrainingMemory:
    """Tells what training a model with AdamW needs.

    Args:
        model ([`XAttnForConditionalGeneration`]): on the meta device. It is used up: its weights become fake tensors.
        batch (`int`): text rows of one forward of one rank.
        text_length (`int`): text tokens of a row. Rows without padding: a padding mask is not counted.
        images (`int`): images of a row; without a vision tower, feature tokens of a row.
        ranks (`int`): processes that share parameters, gradients and optimizer (FSDP2). Each has activations of its own.
        train_text, train_vision (`bool`): what trains beside blocks and connector, as for `hf-xattn train`.

    Raises:
        ValueError: for a number below 1.
    """
    for name, value in (("batch", batch), ("text_length", text_length), ("images", images), ("ranks", ranks)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")
    config, dtype = model.config, model.dtype
    tokens = tokens_per_image(model)
    freeze(model, text=not train_text, vision=not train_vision)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()
    weights = list(model.parameters())
    whole, rank, gathered = _weight_bytes(weights, 1), _weight_bytes(weights, ranks), _gathered(model, dtype)
    return TrainingMemory(
        frozen_parameters=sum(weight.numel() for weight in weights if not weight.requires_grad),
        trained_parameters=sum(weight.numel() for weight in weights if weight.requires_grad),
        dtype=dtype,
        whole=whole,
        rank=rank,
        gathered=gathered if ranks > 1 else 0,
        activations=_activations(model.train(), dtype, batch, text_length, images),
        image_tokens=tokens,
        image_token=key_value_bytes_per_token(config.cross_attention_config, len(config.cross_attention_layers), dtype),
    )


def _activations(model: Any, dtype: torch.dtype, batch: int, text_length: int, images: int) -> Activations | str:
    mode = with_fake_weights(model)

    def held(count: int) -> Held:
        return held_activations(partial(_forward, model, batch, text_length, count), model, mode, dtype)

    try:
        plain, plain_and_one = held(images), held(images + 1)
        checkpointed = None
        if _checkpoints(model):
            checkpointed = _shares(held(images), held(images + 1), batch, text_length, images)
    except RuntimeError as error:  # of fake tensors, which lack values and some operations
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return Activations(
        plain=_shares(plain, plain_and_one, batch, text_length, images),
        checkpointed=checkpointed,
        recomputed=plain.largest_layer,
        copies=plain.copies,
    )


def _checkpoints(model: Any) -> bool:
    """Turns gradient checkpointing on. Returns whether the model has it."""
    try:
        # Fake tensors have no random state, and it is no activation.
        checkpoint_activations(model, {"use_reentrant": False, "preserve_rng_state": False})
    except ValueError:
        return False
    return True


def _weight_bytes(weights: list[nn.Parameter], ranks: int) -> WeightBytes:
    """FSDP2 splits each weight by rows; where they do not divide evenly, the first rank has the most."""
    frozen = trained = 0
    for weight in weights:
        rows = weight.shape[0] if weight.ndim else 1
        size = -(-rows // ranks) * (weight.numel() // rows) * weight.element_size()
        if weight.requires_grad:
            trained += size
        else:
            frozen += size
    return WeightBytes(frozen, trained, gradients=trained, optimizer=2 * trained)


def _gathered(model: Any, dtype: torch.dtype) -> int:
    """See [`TrainingMemory`]. The units are those of accelerate: the modules that are not split, and the embedding, if it is not tied."""
    names, head = set(model._no_split_modules), model.get_output_embeddings()
    apart = [module for module in model.modules() if type(module).__name__ in names]
    if head is None or model.get_input_embeddings().weight is not head.weight:
        apart.append(model.get_input_embeddings())
    units: list[int] = []
    inside: set[int] = set()
    for module in apart:
        own = [weight for weight in module.parameters() if id(weight) not in inside]
        units.append(sum(weight.numel() for weight in own))
        inside.update(id(weight) for weight in own)
    root = sum(weight.numel() for weight in model.parameters() if id(weight) not in inside)
    return (root + sum(sorted(units)[-2:])) * dtype.itemsize


def _forward(model: Any, batch: int, text_length: int, images: int) -> Any:
    """A forward with a loss. Values do not matter, shapes do."""
    config = model.config
    ids = torch.zeros(batch, text_length, dtype=torch.long)
    if model.base_model.vision_tower is None:
        width = config.cross_attention_config.context_size
        given = {"cross_attention_states": torch.zeros(batch, images, width)}
    else:
        pixels, tiles = blank_image(config.vision_config, torch.device("cpu"), torch.float32)
        named = {"pixel_values": pixels, **({} if tiles is None else tiles._asdict())}
        given = {name: value.expand(batch, images, *value.shape[2:]) for name, value in named.items()}
    return model(input_ids=ids, labels=ids, use_cache=False, **given)


def _shares(of_batch: Held, with_one_more: Held, batch: int, text_length: int, images: int) -> ActivationBytes:
    image = (with_one_more.activations - of_batch.activations) // batch
    text = of_batch.activations - image * batch * images
    return ActivationBytes(of_batch.activations, text // (batch * text_length), image)


def training_memory_table(memory: TrainingMemory, ranks: int = 1) -> str:
    """Returns a table for people: a row for each need, with a column for all ranks together if there are several."""
    computes = str(memory.dtype).removeprefix("torch.")
    whole, rank = memory.whole, memory.rank
    rows: list[tuple[str, int | None, int]] = []
    if whole.frozen:
        rows.append((f"frozen weights ({computes})", whole.frozen, rank.frozen))
    rows += [
        ("weights that train (float32)", whole.trained, rank.trained),
        ("gradients (float32)", whole.gradients, rank.gradients),
        ("AdamW, two averages (float32)", whole.optimizer, rank.optimizer),
    ]
    if memory.gathered:
        rows.append((f"gathered by FSDP2 at a time ({computes})", None, memory.gathered))
    image = "an image" if memory.image_tokens is not None else "an image token"
    shares: list[tuple[str, int]] = []
    if isinstance(memory.activations, Activations):
        plain, kept = memory.activations.plain, memory.activations.checkpointed
        copies = 0 if memory.gathered else memory.activations.copies
        if copies:
            rows.append((f"copies of trained weights ({computes})", None, copies))
        stays, again = rank.total + memory.gathered + copies, memory.activations.recomputed
        with_kept = "  with gradient checkpointing"
        for name, before in (("activations of a step", 0), ("in all, at most", stays)):
            rows.append((name, None, before + plain.batch))
            if kept is not None:
                rows.append((with_kept, None, before + kept.batch + again))
        for name, field in (("activations a text token", "text_token"), (f"activations {image}", "image")):
            shares.append((name, getattr(plain, field)))
            if kept is not None:
                shares.append((with_kept, getattr(kept, field)))
    shares.append((f"K/V {image}, in {computes}", memory.image_token * (memory.image_tokens or 1)))
    cells = [["", "all ranks", f"each of {ranks} ranks"]]
    cells += [
        ["parameters, frozen", f"{memory.frozen_parameters:,}", ""],
        ["parameters that train", f"{memory.trained_parameters:,}", ""],
        *([name, "" if all_ is None else shown(all_), shown(each)] for name, all_, each in rows),
        *([name, "", shown(size)] for name, size in shares),
    ]
    if ranks == 1:
        cells = [[name, each or all_] for name, all_, each in cells[1:]]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = [
        "  ".join([first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:]))]).rstrip()
        for first, *others in cells
    ]
    if isinstance(memory.activations, str):
        lines.append(f"The activations are not known ({memory.activations}).")
    return "\n".join(lines)


def shown(size: int) -> str:
    """A number of bytes in the largest unit that leaves it at 1 or more."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 2**power:
            return f"{size / 2**power:,.1f} {unit}"
    return f"{size} B"
