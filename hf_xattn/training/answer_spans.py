"""Finds the assistant's answers in the text that a chat template renders.

Usually a collator searches for fixed strings of one template. Here any template works. Templates are programs: they
trim texts, leave out earlier reasoning, and write headers and end-of-turn tokens. So an answer is found by comparison:
the conversation is rendered a second time with a placeholder instead of the answer, and the two texts differ where the
answer is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers.utils import logging

from ..data.rows import text_of, with_text
from ..processing_xattn import XAttnProcessor
from ..utils.tensor_checks import type_name


if TYPE_CHECKING:
    from transformers import GenerationConfig

logger = logging.get_logger(__name__)

# A private-use character of Unicode, which has no meaning and should not occur in any text.
PLACEHOLDER = "\U000f8a1d"
REASONING = ("reasoning_content", "reasoning", "thinking")

Messages = list[dict[str, Any]]
Render = Callable[..., str]


def check_processor(processor: object) -> None:
    """Raises a `TypeError` for another kind of processor, and a `ValueError` for a tokenizer that gives no offsets."""
    if not isinstance(processor, XAttnProcessor):
        raise TypeError(f"Expected `processor` to be an XAttnProcessor, got {type_name(processor)}.")
    if not processor.tokenizer.is_fast:
        raise ValueError(
            f"Expected `processor` to have a fast tokenizer, got a slow one ({type_name(processor.tokenizer)}), which "
            "gives no offsets. Load the fast one with `AutoTokenizer`."
        )


class AnswerSpan(NamedTuple):
    """Where an answer stands in the rendered text, in characters."""

    message: int  # index of the assistant's message
    start: int  # first character
    end: int  # behind the token that ends the turn
    prompted: bool  # whether the answer starts right behind the generation prompt


def find_answers(
    render: Render, messages: Messages, answers: Sequence[int], special_tokens: Sequence[str], image_token: str | None
) -> tuple[str, list[AnswerSpan]]:
    """Renders a conversation and finds its answers.

    Args:
        render (`Callable`): renders messages. It also takes `add_generation_prompt`.
        messages (`list[dict]`): the conversation.
        answers (`Sequence[int]`): indices of the messages that are answers.
        special_tokens (`Sequence[str]`): tokens that may end a turn.
        image_token (`str`, *optional*): the marker.

    Returns:
        The rendered text, and an [`AnswerSpan`] for each answer.

    Raises:
        ValueError: if there is no answer, if an answer is empty or has tool calls, or if the template changes or omits
            an answer.
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
    # Images of the answer may stand between its text and the token that ends the turn.
    pictures = rf"(?:\s|{re.escape(image_token)})*" if image_token else r"\s*"
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


def ends_of_turns(generation: GenerationConfig, processor: XAttnProcessor) -> list[int]:
    """Returns the tokens that end an answer of `generate`.

    These are the tokens of the generation configuration and, if the chat template ends an answer with a special token,
    this token.
    """
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

    def render(messages: Messages) -> str:
        return processor.apply_chat_template(messages, tokenize=False)

    ends, found = generation.eos_token_id, end_of_turn(render, chat, 1, special_tokens(processor))
    known = list(ends) if isinstance(ends, list) else [] if ends is None else [ends]
    token = None if found is None else processor.tokenizer.convert_tokens_to_ids(found)
    return known if token is None or token in known else [*known, token]


def special_tokens(processor: XAttnProcessor) -> list[str]:
    """Returns the tokens that may end a turn."""
    tokenizer = processor.tokenizer
    tokens = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
    return sorted(tokens - {processor.image_token})


def end_of_turn(
    render: Render, messages: Messages, answer: int, special_tokens: Sequence[str], before: str = r"\s*"
) -> str | None:
    """Returns the special token that ends an answer, or None. The pattern `before` matches what may precede it."""
    # The answer is rendered as the last message: a token that appears only with a next message belongs to that one.
    probe = render([*messages[:answer], with_text(messages[answer], PLACEHOLDER)])
    rest = re.sub(rf"\A{before}", "", probe.rpartition(PLACEHOLDER)[2])
    return max((token for token in special_tokens if token and rest.startswith(token)), key=len, default=None)


def squeezed(text: str) -> str:
    """Removes all white space from a text. Templates and tokenizers change white space, so comparisons ignore it."""
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
    # A template may add a tag such as <think> in front of the placeholder. If the answer begins with the same tag, the
    # two texts do not differ there, and the answer starts earlier than they show.
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
    """Returns the range of `text` that differs from `probe`, or None if `probe` has no placeholder."""
    if PLACEHOLDER not in probe:
        return None
    shorter = min(len(text), len(probe))
    start = next((index for index in range(shorter) if text[index] != probe[index]), shorter)
    left = shorter - start
    same = next((index for index in range(left) if text[-1 - index] != probe[-1 - index]), left)
    return start, len(text) - same


def _behind_the_prompt(render: Render, messages: Messages, index: int, text: str, start: int) -> tuple[int, bool]:
    """Returns where the model begins to write an answer, and whether the generation prompt ends exactly there.

    The model begins behind the generation prompt. A tag such as <think>, or an empty pair of tags that the template
    adds, is therefore a part of the answer.
    """
    before = messages[:index]
    if all(message["role"] != "user" for message in before):  # some templates refuse such a chat
        return start, False
    prompt = render(before, add_generation_prompt=True)
    if not text.startswith(prompt.rstrip()):
        if index == len(messages) - 1:
            logger.warning_once(
                f"The chat template writes an answer behind other text than its generation prompt ({prompt[-40:]!r}): "
                "the model is trained on another prompt than it is asked with."
            )
        return start, False
    begin = len(commonprefix([text, prompt]))
    if not text[begin:start].strip():  # the model must also write white space behind the prompt
        return (min(begin, start), begin <= start) if begin == len(prompt) else (start, False)
    if prompt == render(before):  # the template has no generation prompt: the text in front is the turn's header
        return start, False
    return begin, begin == len(prompt)


def _short(text: str, length: int = 60) -> str:
    return repr(text if len(text) <= length else text[:length] + "...")
