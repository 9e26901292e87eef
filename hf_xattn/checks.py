"""Measures on a loaded model whether it keeps the promises that depend on its decoder. `hf-xattn check` prints the
results.

There are two kinds of checks. Generation with each kind of cache is compared with generation without a cache, and a row
without an image in a batch with images is compared with the same row in a batch without images. Both results depend on
the code of the decoder, which may come with a checkpoint or with another version of transformers. What depends on this
package alone is covered by its tests. The checks leave the model as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .images.tower import blank_image
from .modeling_xattn import XAttnForConditionalGeneration
from .utils.transformers_api import CACHE


if TYPE_CHECKING:
    from transformers.generation import GenerateDecoderOnlyOutput

HOLDS, BROKEN, NOT_CHECKED = "holds", "BROKEN", "not checked"
STEPS = 8
ROWS, LENGTH = 2, 9
FEATURES = 6  # number of image tokens, for a model without a vision tower
SEED = 0
AWAKE = 0.1  # standard deviation of the random weights that a fresh block gets during a check
LONGEST_WINDOW = 1024  # sliding windows up to this length are checked: without a cache, a longer text costs too much
# With text in float8, logits may differ by this share of the largest logit.
FLOAT8, FLOAT8_OF_EXPERTS = 0.25, 0.5
QUANTIZED = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
KINDS: dict[str, dict[str, Any]] = {
    "cache-dynamic": {"cache_implementation": "dynamic"},
    "cache-static": {"cache_implementation": "static"},
    "cache-quantized": QUANTIZED,
    "cache-offloaded": {"cache_implementation": "offloaded"},
    "cache-encoded": {},
    "cache-continued": {},
    "cache-sliding": {},
}
# The largest difference that rounding may make, as a share of the largest logit. In half precision, rounding may change
# the choice of experts for a token, so models with experts have larger values.
ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
ROUNDING_OF_EXPERTS = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 0.2, torch.bfloat16: 0.2}
NAMES = ("image-less-rows", *KINDS)


@dataclass(frozen=True)
class Result:
    """The result of a check."""

    name: str
    status: str  # `HOLDS`, `BROKEN` or `NOT_CHECKED`
    line: str  # the measurement as a sentence
    measured: float | None = None
    allowed: float | None = None  # the largest value with which the check holds


def run_checks(model: XAttnForConditionalGeneration, skip: Collection[str] = ()) -> Iterator[Result]:
    """Runs all checks, in the order of `NAMES`.

    Args:
        model ([`XAttnForConditionalGeneration`]): a model in evaluation mode.
        skip (`Collection[str]`): names of checks to leave out. Their results are `NOT_CHECKED`.

    Returns:
        an iterator of [`Result`]. Each check runs when its result is asked for.

    Raises:
        ValueError: for an unknown name in `skip`, before anything is checked.

    Example:

    ```python
    >>> import hf_xattn
    >>> from transformers import AutoModelForImageTextToText

    >>> model = AutoModelForImageTextToText.from_pretrained("seeing", dtype="float32").eval()
    >>> for result in hf_xattn.run_checks(model, skip=["cache-quantized"]):
    ...     assert result.status != "BROKEN", result.line
    ```
    """
    if unknown := sorted(set(skip) - set(NAMES)):
        raise ValueError(f"Expected `--skip` to be one of {', '.join(NAMES)}, got {unknown[0]!r}.")
    return _results(model, skip)


def _results(model: Any, skip: Collection[str]) -> Iterator[Result]:
    caches = _CacheChecks(model)
    for name in NAMES:
        if name in skip:
            yield Result(name, NOT_CHECKED, "skipped")
        elif name in KINDS:
            yield _measured(name, lambda kind=name: caches.check(kind))  # type: ignore[misc]  # binds each kind
        else:
            yield _measured(name, lambda: check_rows_without_image(model))


def _measured(name: str, check: Callable[[], Result]) -> Result:
    """Runs a check. An error that the model raises is a broken check, too."""
    try:
        return check()
    except (torch.OutOfMemoryError, MemoryError) as error:
        return Result(name, NOT_CHECKED, f"out of memory: {_first_line(error)}")
    except Exception as error:  # the code of a decoder may raise anything
        return Result(name, BROKEN, f"raised {type(error).__name__}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


@torch.no_grad()
def check_rows_without_image(model: XAttnForConditionalGeneration) -> Result:
    """Compares a row without an image in a batch with an image with the same row in a batch without images."""
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


@contextlib.contextmanager
def awake_blocks(model: XAttnForConditionalGeneration) -> Iterator[bool]:
    """Context in which blocks that change nothing have random weights in place of their zeros.

    It yields whether the weights were changed.
    """
    ids, kept = mark_images(model, random_text(model)), []
    with torch.no_grad():
        seen = model(ids, **image_of_first_row(model), use_cache=False).logits
        if torch.equal(seen, model(ids, use_cache=False).logits):
            generator = torch.Generator().manual_seed(SEED + 2)
            for weight in (weight for block in model.blocks for weight in block.parameters()):
                if weight.is_floating_point() and not bool(weight.any()):
                    kept.append(weight)
                    weight.copy_(torch.randn(weight.shape, generator=generator) * AWAKE)
    try:
        yield bool(kept)
    finally:
        with torch.no_grad():
            for weight in kept:
                weight.zero_()


def woken(awake: bool) -> str:
    """Returns the end of a line, which says that blocks have got random weights."""
    return " (fresh blocks get random weights here)" if awake else ""


@torch.no_grad()
def generate(model: XAttnForConditionalGeneration, ids: torch.Tensor, **options: Any) -> GenerateDecoderOnlyOutput:
    """Generates `STEPS` tokens greedily with a cache, and returns their logits too.

    The arguments override the generation settings of the model.
    """
    fixed = {
        "max_new_tokens": STEPS,
        "min_new_tokens": STEPS,
        "do_sample": False,
        "num_beams": 1,
        "num_return_sequences": 1,
        "return_dict_in_generate": True,
        "output_logits": True,
        "disable_compile": True,
        "use_cache": True,
    }
    return model.generate(ids, attention_mask=torch.ones_like(ids), **{**fixed, **options})


class _CacheChecks:
    """Compares each kind of cache with no cache. The result without a cache is computed once for each text length."""

    def __init__(self, model: Any):
        self.model = model
        self._uncached: dict[int, Any] = {}

    def check(self, kind: str) -> Result:
        """Checks a kind of cache, a key of `KINDS`."""
        length, why_not = LENGTH, None
        if kind == "cache-offloaded" and self.model.device.type != "cuda":
            why_not = f"offloading needs a GPU, the model is on {self.model.device.type}"
        if kind == "cache-static":
            why_not = self.model.base_model._interface.not_static
        if kind == "cache-sliding":
            window = self._window()
            if window is None:
                why_not = "the decoder has no sliding window"
            elif window > LONGEST_WINDOW:
                why_not = f"its window of {window} tokens is longer than {LONGEST_WINDOW}"
            else:
                length = window + 3
        if why_not is not None:
            return Result(kind, NOT_CHECKED, why_not)
        with awake_blocks(self.model) as awake:
            return self._check(kind, length, awake)

    def _check(self, kind: str, length: int, awake: bool) -> Result:
        ids = mark_images(self.model, random_text(self.model, length))
        images = image_of_first_row(self.model)
        if length not in self._uncached:
            self._uncached[length] = self._without_cache(ids, images)
        expected = self._uncached[length]
        if kind == "cache-encoded":
            with torch.no_grad():
                images = {"cache": self.model.base_model.encode_images(**images)}
            generate(self.model, ids, **images)  # a first question must not change the answer to the second
        try:
            found = _answer(self.model, kind, ids, **images)
        except Exception as error:
            reason = self._refusal_of_decoder(kind)
            if reason is None:
                raise error
            return Result(kind, NOT_CHECKED, f"the decoder itself refuses this cache: {reason}")
        return self._compare(kind, length, expected, found, awake)

    @torch.no_grad()
    def _without_cache(self, ids: torch.Tensor, images: dict[str, Any]) -> Any:
        """Generates without a cache, and replaces the logits by those of one forward pass over all text and images.

        The logits of `generate` are not taken, because it keeps the keys and values of images even without a cache.
        """
        expected = generate(self.model, ids, **images, use_cache=False)
        text = expected.sequences[:, :-1]
        inputs = {"attention_mask": torch.ones_like(text), "position_ids": torch.arange(text.shape[1])[None].to(text)}
        logits = self.model(text, **inputs, use_cache=False, **images).logits  # numbered as `generate` numbers it
        expected.logits = tuple(logits[:, ids.shape[1] - 1 :].float().unbind(dim=1))
        return expected

    def _compare(self, kind: str, length: int, expected: Any, found: Any, awake: bool) -> Result:
        apart, steps = _apart(length, expected, found)
        allowed, why = rounding_of(self.model), "rounding"
        if kind == "cache-quantized":
            allowed = FLOAT8_OF_EXPERTS if has_experts(self.model.base_model.text_model) else FLOAT8
            why = "text in float8"
        words = f"{STEPS} equal tokens" if steps == STEPS else f"{steps} equal tokens of {STEPS}, then {why} decides"
        line = (
            f"largest difference of logits {number(apart)} of the largest logit, allowed {number(allowed)} ({why}): "
            f"{words}, after {length} of text{woken(awake)}"
        )
        if apart > allowed:
            whose, of_decoder = self._whose_fault(kind, length, allowed)
            line += whose
            if not of_decoder and self.model.dtype != torch.float32:
                line += ". With `--dtype float32`, rounding is smaller"
        return Result(kind, HOLDS if apart <= allowed else BROKEN, line, apart, allowed)

    def _refusal_of_decoder(self, kind: str) -> str | None:
        """Returns the error with which the text model alone, without images, refuses a cache. None if it does not."""
        try:
            generate(self.model.base_model.text_model, random_text(self.model), **KINDS[kind])
        except Exception as error:
            return str(error).partition("\n")[0]
        return None

    @torch.no_grad()
    def _whose_fault(self, kind: str, length: int, allowed: float) -> tuple[str, bool]:
        """Finds out whether the text model alone, without images, differs from generation without a cache, too.

        Returns:
            a sentence, and whether the text model differs.
        """
        text, ids = self.model.base_model.text_model, random_text(self.model, length)
        name = type(text).__name__
        try:
            apart, _ = _apart(length, generate(text, ids, use_cache=False), _answer(text, kind, ids))
        except Exception as error:  # transformers cannot continue text with the cache of a state-space decoder
            return f". {name} by itself cannot be asked: it raises {type(error).__name__}", False
        if apart > allowed:
            alone = f". The decoder alone, without an image, is {number(apart)} off, too"
            return f"{alone}: the fault is that of {name}", True
        return f". {name} by itself, without an image, is right: {number(apart)} off", False

    def _window(self) -> int | None:
        """Returns the largest sliding window among the layers of the text model. None if there is none."""
        cache = generate(self.model, random_text(self.model))[CACHE]
        layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", [])
        windows = [getattr(layer, "sliding_window", None) for layer in layers if getattr(layer, "is_sliding", False)]
        return max((window for window in windows if isinstance(window, int)), default=None)


def _answer(model: Any, kind: str, ids: torch.Tensor, **images: Any) -> Any:
    """Generates with a kind of cache. A cache of `"cache-continued"` holds the first half of the text already."""
    if kind == "cache-continued":
        first = generate(model, ids[:, : ids.shape[1] // 2], **images, max_new_tokens=1, min_new_tokens=1)
        images = {CACHE: first[CACHE]}
    return generate(model, ids, **images, **KINDS[kind])


def _apart(length: int, expected: Any, found: Any) -> tuple[float, int]:
    """Returns the largest difference of logits, as a share of the largest logit, and the number of equal tokens."""
    ours, theirs = torch.stack(found.logits, 1), torch.stack(expected.logits, 1)
    same = found.sequences[:, length:] == expected.sequences[:, length:]
    # Only steps up to the first different token are compared, because later steps read another text.
    counts = torch.cat([torch.ones_like(same[:, :1]), same[:, :-1].cumprod(1).bool()], dim=1)
    apart = largest_difference(ours[counts], theirs[counts]) / max(largest(theirs), 1e-30)
    return apart, int(same.all(0).cumprod(0).sum())


def largest_difference(first: torch.Tensor, second: torch.Tensor) -> float:
    """Returns the largest difference of two tensors of one shape. Equal infinities count as 0, and NaN as infinity."""
    first, second = first.detach().double().cpu(), second.detach().double().cpu()
    differences = torch.where(first == second, 0.0, (first - second).abs())
    return float(torch.nan_to_num(differences, nan=float("inf")).max()) if differences.numel() else 0.0


def largest(tensor: torch.Tensor) -> float:
    """Returns the largest finite absolute value."""
    tensor = tensor.detach().double().abs()
    return float(torch.where(tensor.isfinite(), tensor, 0.0).max())


def has_experts(model: nn.Module) -> bool:
    """Whether a decoder has a mixture of experts, whose layers multiply the tokens of all rows together."""
    return any("experts" in name.rpartition(".")[2].lower() for name, _ in model.named_modules())


def why_rows_mix(model: XAttnForConditionalGeneration) -> str | None:
    """Returns why rounding may depend on the other rows of a batch. None if it does not."""
    text = model.base_model.text_model
    if has_experts(text):
        return "its experts multiply the tokens of all rows together"
    if any(getattr(part, "is_loaded_in_8bit", False) for part in (model, text)):
        return "bitsandbytes chooses the 16-bit columns of 8-bit layers by the values of all rows"
    return None


def rounding_of(model: XAttnForConditionalGeneration) -> float:
    """Returns the share of the largest logit by which rounding may change the logits of a model."""
    text = model.base_model.text_model
    return (ROUNDING_OF_EXPERTS if has_experts(text) else ROUNDING).get(text.dtype, ROUNDING[torch.bfloat16])


def number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def random_text(model: XAttnForConditionalGeneration, length: int = LENGTH) -> torch.Tensor:
    """Returns random token ids `(ROWS, length)` of the text model's vocabulary, without special tokens and markers."""
    config = model.config.text_config
    embedding: Any = model.get_input_embeddings()
    size = min(config.vocab_size, embedding.weight.shape[0])
    special: set[int] = set()
    for source in (config, model.config, getattr(model, "generation_config", None)):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
            value = getattr(source, name, None)
            special.update([value] if isinstance(value, int) else value if isinstance(value, list) else [])
    words = torch.tensor([token for token in range(size) if token not in special] or [0])
    chosen = torch.randint(len(words), (ROWS, length), generator=torch.Generator().manual_seed(SEED))
    return words[chosen].to(embedding.weight.device)


def mark_images(model: XAttnForConditionalGeneration, ids: torch.Tensor) -> torch.Tensor:
    """Returns token ids with an image marker as the second token of the first row, if the model has a marker."""
    marker, ids = model.config.image_token_id, ids.clone()
    if marker is not None:
        ids[0, 1] = marker
    return ids


def image_of_first_row(model: XAttnForConditionalGeneration) -> dict[str, torch.Tensor]:
    """Returns arguments of `forward`, `generate` and `encode_images` with an image for the first row alone."""
    generator = torch.Generator().manual_seed(SEED + 1)
    vision = model.config.vision_config
    embedding: Any = model.get_input_embeddings()
    device = embedding.weight.device
    has_image = torch.tensor([[True], [False]], device=device)
    if vision is None:
        width = model.config.cross_attention_config.context_size
        states = torch.randn(ROWS, FEATURES, width, generator=generator).to(device)
        return {"cross_attention_states": states, "cross_attention_mask": has_image.expand(-1, FEATURES).clone()}
    blank, tiles = blank_image(vision, torch.device("cpu"), torch.float32)
    pixels = torch.randn(ROWS, *blank.shape[1:], generator=generator).to(device)
    images = {"pixel_values": pixels, "image_mask": has_image}
    if tiles is not None:
        images.update({name: value.repeat_interleave(ROWS, 0).to(device) for name, value in tiles._asdict().items()})
    return images


__all__ = ["BROKEN", "HOLDS", "NAMES", "NOT_CHECKED", "Result", "run_checks"]
