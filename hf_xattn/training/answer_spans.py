"""Finds the assistant's answers in what a chat template renders of a conversation.

Templates are programs: they trim texts, leave out earlier reasoning, write headers and end-of-turn tokens. So an answer
is found by comparison with the same conversation, rendered with a placeholder in its place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from os.path import commonprefix
from typing import Any, NamedTuple

from transformers.utils import logging

from ..data.rows import text_of, with_text
from ..processing_xattn import XAttnProcessor
from ..utils.tensor_checks import type_name


logger = logging.get_logger(__name__)

# A private-use character of Unicode, which has no meaning and should not occur in any text.
PLACEHOLDER = "\U000f8a1d"
REASONING = ("reasoning_content", "reasoning", "thinking")

Messages = list[dict[str, Any]]
Render = Callable[..., str]


def check_processor(processor: Any) -> None:
    """Raises a `TypeError` for another processor, and a `ValueError` for one that does not tell where words are."""
    if not isinstance(processor, XAttnProcessor):
        raise TypeError(f"Expected `processor` to be an XAttnProcessor, got {type_name(processor)}.")
    if not processor.tokenizer.is_fast:
        raise ValueError(
            f"Expected `processor` to have a fast tokenizer, got a slow one ({type_name(processor.tokenizer)}), which "
            "gives no offsets. Load the fast one with `AutoTokenizer`."
        )


class AnswerSpan(NamedTuple):
    message: int  # index of the assistant's message
    start: int  # of its characters in the rendered text
    end: int  # after its end-of-turn token
    prompted: bool  # whether it starts right behind the generation prompt


def find_answers(
    render: Render, messages: Messages, answers: Sequence[int], special_tokens: Sequence[str], image_token: str | None
) -> tuple[str, list[AnswerSpan]]:
    """Returns the rendered conversation, and where the answers (indices of messages) are.

    `render` takes messages and `add_generation_prompt`. The `special_tokens` may end a turn.

    Raises a `ValueError` if there is no answer, an answer is empty, or the template changes or omits it.
    """
    if not answers:
        raise ValueError("The conversation has no assistant message to train on.")
    for index in answers:
        message = messages[index]
        for name in ("tool_calls", "function_call"):
            if message.get(name):
                raise ValueError(
                    f"Message {index} has `{name}`, which are not part of the text of an answer. Train with "
                    "`train_on='all'`, or remove the calls."
                )
        if not text_of(message).strip():
            raise ValueError(f"Message {index}, an assistant message, is empty: there is nothing to learn from it.")
    text = render(messages)
    spans = [_find(render, messages, index, text, image_token) for index in answers]
    pictures = rf"(?:\s|{re.escape(image_token)})*" if image_token else r"\s*"  # behind the last text of an answer
    stop = end_of_turn(render, messages, answers[-1], special_tokens, pictures)
    if stop is None:
        logger.warning_once(
            "The chat template writes no special token after the assistant's turn: the model does not learn where an "
            "answer ends."
        )
    else:
        after = re.compile(pictures + re.escape(stop))
        spans = [
            span._replace(end=found.end()) if (found := after.match(text, span.end)) is not None else span
            for span in spans
        ]
    return text, spans


def ends_of_turns(generation: Any, processor: Any) -> list[int]:
    """The tokens that end an answer: those of a generation configuration, and behind them the special token with which
    the chat template ends one, if it writes a single one.
    """
    tokenizer = processor.tokenizer
    special = [str(token) for token in tokenizer.added_tokens_decoder.values()] + list(tokenizer.all_special_tokens)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

    def render(messages: Messages) -> str:
        return processor.apply_chat_template(messages, tokenize=False)

    ends, found = generation.eos_token_id, end_of_turn(render, chat, 1, special)
    known = list(ends) if isinstance(ends, list) else [] if ends is None else [ends]
    token = None if found is None else tokenizer.convert_tokens_to_ids(found)
    return known if token is None or token in known else [*known, token]


def end_of_turn(
    render: Render, messages: Messages, answer: int, special_tokens: Sequence[str], before: str = r"\s*"
) -> str | None:
    """The special token that ends an answer; None without one. `before`: a pattern of what may stand in between."""
    # The answer is rendered as the last message: a token that comes only with the next message belongs to that one.
    probe = render([*messages[:answer], with_text(messages[answer], PLACEHOLDER)])
    rest = re.sub(rf"\A{before}", "", probe.rpartition(PLACEHOLDER)[2])
    return max((token for token in special_tokens if token and rest.startswith(token)), key=len, default=None)


def squeezed(text: str) -> str:
    """Removes white space from a text, because templates and tokenizers change white space."""
    return "".join(text.split())


def _find(render: Render, messages: Messages, index: int, text: str, image_token: str | None) -> AnswerSpan:
    message = messages[index]
    window = _difference(text, _render_with(render, messages, index, with_text(message, PLACEHOLDER)))
    if window is None:
        raise ValueError(f"The chat template omits the answer of message {index}: there is nothing to learn from it.")
    start, end = window
    said, written = text_of(message).strip(), text[start:end]
    bare = written.replace(image_token, "") if image_token else written
    if not squeezed(bare) or squeezed(bare) not in squeezed(said):
        raise ValueError(
            f"The chat template changes the answer of message {index}: expected {_short(said)}, got {_short(written)}. "
            "Change the template, or train with `train_on='all'`."
        )
    # A template may add a tag such as <think> to the placeholder. If the answer begins with the same tag, the texts do
    # not differ there.
    if said.endswith(written.rstrip()) and text[:end].rstrip().endswith(said):
        start = len(text[:end].rstrip()) - len(said)
    reasoning = {
        name: PLACEHOLDER for name in REASONING if isinstance(message.get(name), str) and message[name].strip()
    }
    if reasoning:
        thought = _difference(text, _render_with(render, messages, index, {**message, **reasoning}))
        if thought is not None and thought[0] < start:
            start = thought[0]
    begin, prompted = _behind_the_prompt(render, messages, index, text, start)
    return AnswerSpan(index, begin, end, prompted)


def _render_with(render: Render, messages: Messages, index: int, message: dict[str, Any]) -> str:
    return render([*messages[:index], message, *messages[index + 1 :]])


def _difference(text: str, probe: str) -> tuple[int, int] | None:
    """Returns the range in which `text` differs from `probe`. None if `probe` has no placeholder."""
    if PLACEHOLDER not in probe:
        return None
    shorter = min(len(text), len(probe))
    start = next((index for index in range(shorter) if text[index] != probe[index]), shorter)
    left = shorter - start
    same = next((index for index in range(left) if text[-1 - index] != probe[-1 - index]), left)
    return start, len(text) - same


def _behind_the_prompt(render: Render, messages: Messages, index: int, text: str, start: int) -> tuple[int, bool]:
    """Where the model begins to write: behind the generation prompt, so in front of a tag such as <think>, also of an
    empty pair of them that the template adds. And whether that is where the prompt ends.
    """
    before = messages[:index]
    if all(message["role"] != "user" for message in before):  # some templates refuse such a chat
        return start, False
    prompt = render(before, add_generation_prompt=True)
    if not text.startswith(prompt.rstrip()):
        if index == len(messages) - 1:
            logger.warning_once(
                f"The chat template writes an answer behind other text than its generation prompt ({prompt[-40:]!r}): "
                "the model is not trained on what it is asked with."
            )
        return start, False
    begin = len(commonprefix([text, prompt]))
    if not text[begin:start].strip():  # white space behind the prompt, which the model must write too
        return (min(begin, start), begin <= start) if begin == len(prompt) else (start, False)
    if prompt == render(before):  # without a prompt it is the turn's header
        return start, False
    return begin, begin == len(prompt)


def _short(text: str, length: int = 60) -> str:
    return repr(text if len(text) <= length else text[:length] + "...")
