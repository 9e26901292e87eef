"""Generation with each kind of cache against generation without one, and how often an image is projected meanwhile."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from ..utils.transformers_api import CACHE
from .blocks import awake_blocks, woken
from .measures import (
    BROKEN,
    HOLDS,
    LENGTH,
    NOT_CHECKED,
    Result,
    has_experts,
    image_of_first_row,
    largest,
    largest_difference,
    mark_images,
    number,
    random_text,
    rounding_of,
)


STEPS = 8
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


@torch.no_grad()
def check_projections(model: Any) -> Result:
    """One call of `k_proj` and `v_proj` in each block, and of the vision tower, while several tokens are generated."""
    calls: Counter[str] = Counter()
    modules = {
        f"{part} of block {b.layer_idx}": getattr(b.attn, part) for b in model.blocks for part in ("k_proj", "v_proj")
    }
    if model.base_model.vision_tower is not None:
        modules["vision tower"] = model.base_model.vision_tower
    hooks = [
        module.register_forward_hook(lambda *_, name=name: calls.update([name])) for name, module in modules.items()
    ]
    try:
        generate(model, mark_images(model, random_text(model)), **image_of_first_row(model))
    finally:
        for hook in hooks:
            hook.remove()
    wrong = {name: calls[name] for name in modules if calls[name] != 1}
    if wrong:
        name, count = max(wrong.items(), key=lambda item: item[1])
        line = f"{name} ran {count} times in {STEPS} steps, expected 1"
        line += f" ({len(wrong)} of {len(modules)} modules did not run once)"
        return Result("projected-once", BROKEN, line, count, 1)
    tower = " and the vision tower" if model.base_model.vision_tower is not None else ""
    line = f"1 call in {STEPS} steps: k_proj and v_proj of {len(model.blocks)} blocks{tower}"
    return Result("projected-once", HOLDS, line, 1, 1)


class CacheChecks:
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

    def _check(self, kind: str, length: int, awake: int) -> Result:
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

    def _compare(self, kind: str, length: int, expected: Any, found: Any, awake: int) -> Result:
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
