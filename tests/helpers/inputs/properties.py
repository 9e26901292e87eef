"""Random cases for the property tests, drawn by hypothesis, and how the tests run them.

The default run draws the same cases as long as the package stays as it is: hypothesis also tries numbers that it finds
in the source. A slow run draws others: it prints its seed, and `PROPERTY_SEED=... pytest -m slow -k NAME` draws them
again. A case that fails is printed with the sizes shrunk as far as it still fails.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from helpers.conversations.bank import BLOCKS, RULES, bank, draw_text
from hf_xattn import CrossAttentionConfig, XAttnForConditionalGeneration


DENSE = ("llama", "mistral", "gemma3", "gpt2", "qwen3", "opt", "mixtral")


def run(
    check: Callable[[Any], None],
    cases: st.SearchStrategy[Any],
    count: int,
    seed: int | None = None,
    shrinks: bool = True,
) -> None:
    """Draws `count` cases and checks each.

    Args:
        shrinks (`bool`): look for a smaller case where one has failed. Takes minutes where a case takes a tenth of a
            second.
    """
    test = settings(
        max_examples=count,
        derandomize=seed is None,
        database=None,
        deadline=None,
        print_blob=True,
        phases=(Phase.explicit, Phase.generate, *((Phase.shrink,) if shrinks else ())),
        suppress_health_check=list(HealthCheck),
    )(hypothesis.given(cases)(check))
    if seed is not None:
        print(f"PROPERTY_SEED={seed}")
        test = hypothesis.seed(seed)(test)
    with torch.no_grad():
        test()


def slow_seed() -> int:
    given = os.environ.get("PROPERTY_SEED")
    return random.SystemRandom().randrange(2**32) if given is None else int(given)


def tensor(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


SEEDS = st.integers(0, 2**16)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])


@dataclass(frozen=True)
class LayerCase:
    """A block on its own, and what it reads.

    Attributes:
        config (`dict`): fields of the configuration.
        dtype (`torch.dtype`): of weights and states.
        rows, repeats, text_len, tokens (`int`): image rows, text rows for each of them, and lengths.
        mask (`str`): `"none"`, `"padding"` or `"each"` text token.
        scale (`float`): of the image tokens.
        seed (`int`): of weights, states and mask.
    """

    config: dict[str, Any]
    dtype: torch.dtype
    rows: int
    repeats: int
    text_len: int
    tokens: int
    mask: str
    kernel: str
    scale: float
    seed: int

    @property
    def text(self) -> torch.Tensor:
        return tensor(self.seed, self.rows * self.repeats, self.text_len, self.config["hidden_size"], dtype=self.dtype)

    @property
    def states(self) -> torch.Tensor:
        shape = (self.rows, self.tokens, self.config["context_size"])
        return tensor(self.seed + 1, *shape, dtype=self.dtype) * self.scale

    @property
    def visible(self) -> torch.Tensor | None:
        """`(rows * repeats or rows, text_len or 1, tokens)`, True = attend."""
        if self.mask == "none":
            return None
        rows, length = (self.rows, 1) if self.mask == "padding" else (self.rows * self.repeats, self.text_len)
        drawn = tensor(self.seed + 2, rows, length, self.tokens) > 0.2
        drawn[tensor(self.seed + 3, rows, length) > 1] = False  # rows that see nothing
        return drawn


@st.composite
def layer_cases(draw: Any, dtypes: st.SearchStrategy[torch.dtype] = DTYPES, repeats: int = 3) -> LayerCase:
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    config = {
        "hidden_size": draw(st.integers(1, 12)),
        "context_size": draw(st.integers(1, 12)),
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.integers(1, 6)),
        "intermediate_size": draw(st.integers(1, 12)),
        "norm_type": draw(st.sampled_from(["rmsnorm", "layernorm"])),
        "norm_eps": draw(st.sampled_from([1e-6, 1e-3])),
        "mlp_type": draw(st.sampled_from(["gated", "plain", "none"])),
        "gate": draw(st.sampled_from(["tanh", "token", "none"])),
        "gate_granularity": draw(st.sampled_from(["scalar", "channel"])),
        **{
            name: draw(st.booleans())
            for name in ("qk_norm", "context_norm", "quiet_softmax", "position_bias", "attention_bias", "mlp_bias")
        },
    }
    config["mlp_bias"] &= config["mlp_type"] != "none"
    return LayerCase(
        config,
        draw(dtypes),
        draw(st.integers(1, 3)),
        draw(st.integers(1, repeats)),
        draw(st.integers(1, 5)),
        draw(st.integers(1, 7)),
        draw(st.sampled_from(["none", "padding", "each"])),
        draw(st.sampled_from(["sdpa", "eager"])),
        draw(st.sampled_from([1.0, 1e-3, 30.0])),
        draw(SEEDS),
    )


@dataclass(frozen=True)
class BatchCase:
    """A model and a batch of text with images.

    Attributes:
        decoder, rule, block (`str`): keys of the tables above.
        kind (`str`): `"pixels"` or `"states"`.
        images (`tuple[int, ...]`): images of each row.
        lengths (`tuple[int, ...]`): text tokens of each row.
        side (`str`): of the text's padding.
        seed (`int`): of texts and images.
    """

    decoder: str
    rule: str
    block: str
    kind: str
    images: tuple[int, ...]
    lengths: tuple[int, ...]
    side: str
    seed: int

    @property
    def model(self) -> XAttnForConditionalGeneration:
        return bank(self.decoder, self.rule, self.block).model

    @property
    def width(self) -> int:
        return max(self.lengths)

    def row_ids(self, row: int) -> torch.Tensor:
        draw = random.Random(self.seed * 31 + row)
        return torch.tensor(draw_text(draw, self.lengths[row], self.images[row]))

    @property
    def text(self) -> dict[str, torch.Tensor]:
        """Ids, mask and positions of the padded rows."""
        ids = torch.zeros(len(self.lengths), self.width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, length in enumerate(self.lengths):
            where = slice(self.width - length, None) if self.side == "left" else slice(length)
            ids[row, where], mask[row, where] = self.row_ids(row), 1
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}

    def real(self, row: int) -> slice:
        length = self.lengths[row]
        return slice(self.width - length, None) if self.side == "left" else slice(length)

    @property
    def pictures(self) -> torch.Tensor | None:
        """All images, those that pad a row included, `(rows, most images, ...)`."""
        most = max(self.images)
        if not most:
            return None
        shape = (3, 32, 32) if self.kind == "pixels" else (4, 32)
        return tensor(self.seed, len(self.images), most, *shape)

    @property
    def given(self) -> dict[str, torch.Tensor]:
        """The image arguments of the batch."""
        if (pictures := self.pictures) is None:
            return {}
        mask = torch.arange(pictures.shape[1]) < torch.tensor(self.images)[:, None]
        return {self.argument: pictures, "image_mask": mask}

    @property
    def argument(self) -> str:
        return "pixel_values" if self.kind == "pixels" else "cross_attention_states"

    def alone(self, row: int) -> dict[str, torch.Tensor]:
        """The image arguments of a row by itself."""
        if not self.images[row] or self.pictures is None:
            return {}
        return {self.argument: self.pictures[row : row + 1, : self.images[row]]}


@st.composite
def batch_cases(draw: Any, rows: int = 3, side: str | None = None, least: int = 0) -> BatchCase:
    count = draw(st.integers(1, rows))
    images = tuple(draw(st.integers(least, 3)) for _ in range(count))
    return BatchCase(
        draw(st.sampled_from(DENSE)),
        draw(st.sampled_from(RULES)),
        draw(st.sampled_from(list(BLOCKS))),
        draw(st.sampled_from(["states", "pixels"])),
        images,
        tuple(draw(st.integers(number + 1, number + 6)) for number in images),
        draw(st.sampled_from(["left", "right"])) if side is None else side,
        draw(SEEDS),
    )


def block_config(case: LayerCase) -> CrossAttentionConfig:
    config = CrossAttentionConfig(**case.config, zero_init=False)
    config._attn_implementation = case.kernel
    return config
