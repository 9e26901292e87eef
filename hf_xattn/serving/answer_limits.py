"""What a client of `hf-xattn serve` may ask of an answer, before it is generated.

Transformers' server builds a `GenerationConfig` of a request, and anything that stands in it is done: a thousand
beams, another cache, a file of the server as an assistant model. So a field passes only if it stands in a table here,
with a value within bounds, or if it is what the model has anyway.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException
from transformers import GenerationConfig

from ..utils.checkpoint_files import short


MOST_STOPS, LONGEST_STOP = 16, 256  # strings, and characters of each
MOST_BIASES = 300
OF_NOTHING = ("transformers_version", "_from_model_config")  # in the JSON of a `GenerationConfig`, without an effect
# Fields of a `GenerationConfig` that transformers' server sets from the checked fields of a request.
SET_BY_SERVER = set("max_new_tokens temperature do_sample top_p repetition_penalty sequence_bias stop_strings".split())


@dataclass(frozen=True)
class AnswerLimits:
    """Bounds that the operator of a server sets."""

    max_new_tokens: int = 4096  # of an answer
    max_beams: int = 8  # of beam search; each takes the memory of an answer


# Tells what is expected of a value, if it is not that.
Check = Callable[[Any], "str | None"]


@dataclass(frozen=True)
class _Number:
    low: float
    high: float
    whole: bool = False

    def __call__(self, value: Any) -> str | None:
        fits = isinstance(value, int if self.whole else (int, float)) and not isinstance(value, bool)
        if fits and self.low <= value <= self.high:
            return None
        return f"{'an integer' if self.whole else 'a number'} from {self.low} to {self.high}"


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def _early_stopping(value: Any) -> str | None:
    return None if value == "never" else _flag(value) and 'true, false or "never"'


def _stops(value: Any) -> str | None:
    texts = [value] if isinstance(value, str) else value
    fits = isinstance(texts, list) and len(texts) <= MOST_STOPS
    if fits and all(isinstance(text, str) and 0 < len(text) <= LONGEST_STOP for text in texts):
        return None
    return f"a text or a list of at most {MOST_STOPS} texts, each of 1 to {LONGEST_STOP} characters"


def _biases(vocab_size: int) -> Check:
    def check(value: Any) -> str | None:
        fits = isinstance(value, dict) and len(value) <= MOST_BIASES
        known = fits and all(key.isascii() and key.isdigit() and int(key[:20]) < vocab_size for key in value)
        if known and not any(_Number(-100, 100)(bias) for bias in value.values()):
            return None
        return f"an object of at most {MOST_BIASES} token ids below {vocab_size} and numbers from -100 to 100"

    return check


def _config_fields(limits: AnswerLimits) -> dict[str, Check]:
    """Fields of `generation_config`."""
    share = _Number(0, 1)
    return {
        "max_new_tokens": _Number(1, limits.max_new_tokens, whole=True),
        "min_new_tokens": _Number(0, limits.max_new_tokens, whole=True),
        "num_beams": _Number(1, limits.max_beams, whole=True),
        "do_sample": _flag,
        "early_stopping": _early_stopping,
        "length_penalty": _Number(-10, 10),
        "temperature": _Number(0, 2),
        "top_k": _Number(0, 10**6, whole=True),
        "top_p": share,
        "min_p": share,
        "typical_p": _Number(0.001, 1),
        "epsilon_cutoff": share,
        "eta_cutoff": share,
        "repetition_penalty": _Number(0.01, 10),
        "no_repeat_ngram_size": _Number(0, 100, whole=True),
        "stop_strings": _stops,
    }


def _body_fields(limits: AnswerLimits, vocab_size: int) -> dict[str, Check]:
    """Fields of a request, beside `generation_config`."""
    tokens = _Number(1, limits.max_new_tokens, whole=True)
    return {
        "max_tokens": tokens,
        "max_completion_tokens": tokens,
        "max_output_tokens": tokens,
        "temperature": _Number(0, 2),
        "top_p": _Number(0, 1),
        "frequency_penalty": _Number(-0.99, 2),  # transformers makes 1 + x of it, a factor
        "seed": _Number(-(2**63), 2**63 - 1, whole=True),
        "stop": _stops,
        "logit_bias": _biases(vocab_size),
        "stream": _flag,
    }


def check_answer(body: dict, limits: AnswerLimits, model: Any) -> dict:
    """Returns a request whose fields for `generate` are all within bounds. Does not change `body`.

    Raises:
        HTTPException: (400) for a field that is not allowed, or a value out of bounds.
    """
    body = {name: value for name, value in body.items() if value is not None}
    _check(body, _body_fields(limits, model.config.get_text_config().vocab_size), "")
    for name in ("stop", "logit_bias"):
        if not body.get(name, True):  # an empty one asks for nothing, and transformers fails for it
            del body[name]
    if "logit_bias" in body:
        body["logit_bias"] = {key: float(bias) for key, bias in body["logit_bias"].items()}
    if "generation_config" in body:
        given = _given_config(body["generation_config"], limits, model.generation_config)
        if given.get("temperature") == 0:
            given["do_sample"] = False
        body["generation_config"] = json.dumps(given)
        if given.get("num_beams", 1) > 1 and body.get("stream"):
            raise HTTPException(400, "Expected `num_beams` of 1 with `stream`: beams have no answer before the end.")
    return body


def _given_config(text: Any, limits: AnswerLimits, own: GenerationConfig) -> dict[str, Any]:
    """The fields of `generation_config` that are not the model's own."""
    try:
        given = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise HTTPException(400, f"Expected `generation_config` to be an object as JSON, got {short(text)}.")
    theirs = own.to_dict()
    asked = {
        name: value
        for name, value in given.items()
        if value is not None and name not in OF_NOTHING and not (name in theirs and theirs[name] == value)
    }
    known = _config_fields(limits)
    if unknown := sorted(asked.keys() - known.keys()):
        raise HTTPException(
            400, f"`generation_config`: expected fields among {', '.join(known)}, got {', '.join(map(short, unknown))}."
        )
    _check(asked, known, "generation_config.")
    if asked.get("stop_strings") == []:
        del asked["stop_strings"]
    # Some of transformers' processors of logits refuse the integer 1 where they want 1.0.
    for name, check in known.items():
        if name in asked and isinstance(check, _Number) and not check.whole:
            asked[name] = float(asked[name])
    return asked


def _check(given: dict, known: dict[str, Check], where: str) -> None:
    for name, check in known.items():
        if name in given and (expected := check(given[name])) is not None:
            raise HTTPException(400, f"Expected `{where}{name}` to be {expected}, got {short(given[name])}.")


def check_config(config: GenerationConfig, body: dict, limits: AnswerLimits, own: GenerationConfig) -> None:
    """Bounds the length in what transformers' server has made of a request, and refuses (400) unknown settings."""
    given = json.loads(body.get("generation_config", "{}"))
    before = GenerationConfig(**given).to_dict() if "generation_config" in body else own.to_dict()
    changed = {name for name, value in config.to_dict().items() if name not in before or before[name] != value}
    if unknown := sorted(changed - SET_BY_SERVER):
        raise HTTPException(400, f"The request sets {', '.join(unknown)}, which this server does not allow.")
    if config.max_new_tokens is None:
        config.max_new_tokens = max(own.max_new_tokens or 0, 1024)  # as transformers' server by default
    config.max_new_tokens = min(config.max_new_tokens, limits.max_new_tokens)
