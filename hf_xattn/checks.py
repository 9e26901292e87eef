"""Measures on a loaded model whether its decoder keeps what `generate` promises: `hf-xattn check` prints the results.

Each kind of cache is compared with no cache, and a row without an image beside one with an image with the row alone.
Both depend on the decoder's code, which comes with a checkpoint or with another version of transformers; what depends
on this package alone is tested with it. A check changes nothing in the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .images.tower import blank_image
from .utils.transformers_api import CACHE


HOLDS, BROKEN, NOT_CHECKED = "holds", "BROKEN", "not checked"
STEPS = 8
ROWS, LENGTH = 2, 9
FEATURES = 6  # tokens of an image, without a vision tower
SEED = 0
AWAKE = 0.1  # standard deviation of the weights that a fresh block gets for a check
LONGEST_WINDOW = 1024  # a longer text costs too much without a cache
FLOAT8, FLOAT8_OF_EXPERTS = 0.25, 0.5  # share of the largest logit by which text in float8 may be off
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
# Largest difference that rounding makes, as a share of the largest logit. In half precision a mixture of experts may
# choose other experts for a token after rounding.
ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
ROUNDING_OF_EXPERTS = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 0.2, torch.bfloat16: 0.2}
NAMES = ("image-less-rows", *KINDS)


@dataclass(frozen=True)
class Result:
    """What a check has found."""

    name: str
    status: str  # `HOLDS`, `BROKEN` or `NOT_CHECKED`
    line: str  # what was measured, in words
    measured: float | None = None
    allowed: float | None = None  # the largest with which the promise holds


def run_checks(model: Any, skip: Collection[str] = ()) -> Iterator[Result]:
    """Makes all checks, in the order of `NAMES`.

    Args:
        model ([`XAttnForConditionalGeneration`]): in evaluation mode.
        skip (`Collection[str]`): names of checks to leave out.

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
    """The result of a check. An error in the model breaks a promise, too."""
    try:
        return check()
    except (torch.OutOfMemoryError, MemoryError) as error:
        return Result(name, NOT_CHECKED, f"out of memory: {_first_line(error)}")
    except Exception as error:  # whatever a model raises is what was found
        return Result(name, BROKEN, f"raised {type(error).__name__}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


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


@contextlib.contextmanager
def awake_blocks(model: Any) -> Iterator[bool]:
    """Inside, the blocks have random weights in place of zeros if images change nothing. Yields whether they have."""
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
    """What a line adds where blocks were woken."""
    return " (fresh blocks get random weights here)" if awake else ""


@torch.no_grad()
def generate(model: Any, ids: torch.Tensor, **options: Any) -> Any:
    """Greedy, `STEPS` tokens, with the logits of each step and a cache, whatever the configuration wants."""
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
    """Compares each kind of cache with no cache. What is generated without one is kept for the next kind."""

    def __init__(self, model: Any):
        self.model = model
        self._uncached: dict[int, Any] = {}

    def check(self, kind: str) -> Result:
        """`kind` is a key of `KINDS`."""
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
        """What is generated without a cache, with the logits of one forward of all its text and images: also without a
        cache `generate` keeps the keys and values of images.
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
        """The error with which the text half refuses a cache by itself, without images."""
        try:
            generate(self.model.base_model.text_model, random_text(self.model), **KINDS[kind])
        except Exception as error:
            return str(error).partition("\n")[0]
        return None

    @torch.no_grad()
    def _whose_fault(self, kind: str, length: int, allowed: float) -> tuple[str, bool]:
        """Whether the text half alone, without images, differs from no cache, too: in words, and as a value."""
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
        """The largest sliding window among the layers of the text half."""
        cache = generate(self.model, random_text(self.model))[CACHE]
        layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", [])
        windows = [getattr(layer, "sliding_window", None) for layer in layers if getattr(layer, "is_sliding", False)]
        return max((window for window in windows if isinstance(window, int)), default=None)


def _answer(model: Any, kind: str, ids: torch.Tensor, **images: Any) -> Any:
    """What `generate` gives with this kind of cache. `"cache-continued"` has read the first half of the text before."""
    if kind == "cache-continued":
        first = generate(model, ids[:, : ids.shape[1] // 2], **images, max_new_tokens=1, min_new_tokens=1)
        images = {CACHE: first[CACHE]}
    return generate(model, ids, **images, **KINDS[kind])


def _apart(length: int, expected: Any, found: Any) -> tuple[float, int]:
    """Returns the largest difference of logits as a share of the largest logit, and the number of equal tokens."""
    ours, theirs = torch.stack(found.logits, 1), torch.stack(expected.logits, 1)
    same = found.sequences[:, length:] == expected.sequences[:, length:]
    # Up to the first step that chose another word: later steps read another text.
    counts = torch.cat([torch.ones_like(same[:, :1]), same[:, :-1].cumprod(1).bool()], dim=1)
    apart = largest_difference(ours[counts], theirs[counts]) / max(largest(theirs), 1e-30)
    return apart, int(same.all(0).cumprod(0).sum())


def largest_difference(first: torch.Tensor, second: torch.Tensor) -> float:
    """Largest difference of two tensors of one shape: 0 for equal infinities, and infinity for NaN."""
    first, second = first.detach().double().cpu(), second.detach().double().cpu()
    differences = torch.where(first == second, 0.0, (first - second).abs())
    return float(torch.nan_to_num(differences, nan=float("inf")).max()) if differences.numel() else 0.0


def largest(tensor: torch.Tensor) -> float:
    """Largest absolute value that is finite."""
    tensor = tensor.detach().double().abs()
    return float(torch.where(tensor.isfinite(), tensor, 0.0).max())


def has_experts(model: nn.Module) -> bool:
    """Whether a decoder has a mixture of experts, whose layers multiply the tokens of all rows together."""
    return any("experts" in name.rpartition(".")[2].lower() for name, _ in model.named_modules())


def why_rows_mix(model: Any) -> str | None:
    """Why rounding may depend on the other rows of a batch; None where each row is computed alone."""
    text = model.base_model.text_model
    if has_experts(text):
        return "its experts multiply the tokens of all rows together"
    if any(getattr(part, "is_loaded_in_8bit", False) for part in (model, text)):
        return "bitsandbytes chooses the 16-bit columns of 8-bit layers by the values of all rows"
    return None


def rounding_of(model: Any) -> float:
    """Share of the largest logit by which rounding may change the logits of a model."""
    text = model.base_model.text_model
    return (ROUNDING_OF_EXPERTS if has_experts(text) else ROUNDING).get(text.dtype, ROUNDING[torch.bfloat16])


def number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def random_text(model: Any, length: int = LENGTH) -> torch.Tensor:
    """Ids of the base's vocabulary, `(ROWS, length)`, without special tokens and image markers."""
    config = model.config.text_config
    size = min(config.vocab_size, model.get_input_embeddings().weight.shape[0])
    special: set[int] = set()
    for source in (config, model.config, getattr(model, "generation_config", None)):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
            value = getattr(source, name, None)
            special.update([value] if isinstance(value, int) else value if isinstance(value, list) else [])
    words = torch.tensor([token for token in range(size) if token not in special] or [0])
    chosen = torch.randint(len(words), (ROWS, length), generator=torch.Generator().manual_seed(SEED))
    return words[chosen].to(model.get_input_embeddings().weight.device)


def mark_images(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The text with an image marker at the second token of the first row, where the model knows one."""
    marker, ids = model.config.image_token_id, ids.clone()
    if marker is not None:
        ids[0, 1] = marker
    return ids


def image_of_first_row(model: Any) -> dict[str, torch.Tensor]:
    """Arguments of `forward`, `generate` and `encode_images`: an image for the first row, none for the second."""
    generator = torch.Generator().manual_seed(SEED + 1)
    vision = model.config.vision_config
    device = model.get_input_embeddings().weight.device
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
