"""Renders messages with images with the chat templates of text models.

Such a template expects that the content of a message is a text. For a list of parts, it may write nothing, write the
list itself, or fail. So several forms of the messages are tried, and the first form is used in which the template shows
every text and the marker of every image. A template that writes the marker itself gets lists of parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from jinja2 import TemplateError, meta

from .chat_messages import IMAGE, Message


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

# What renders chats: a processor, or a tokenizer for a model without images.
Processor: TypeAlias = "ProcessorMixin | PreTrainedTokenizerBase"


# The template for models that have none: `User: ...`, `Assistant: ...`, with one message per line. An answer ends with
# the end-of-sequence token.
DEFAULT_CHAT_TEMPLATE = """{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- 'Assistant:' -}}
{%- generation -%}{{- ' ' ~ (message.content or '') ~ eos_token -}}{%- endgeneration -%}
{{- '\\n' -}}
{%- else -%}
{{- message.role | capitalize ~ ': ' ~ (message.content or '') ~ '\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}"""

# A key that no template reads. If its value is in the text, the template has written a whole list of parts.
CANARY = "xattncanary"

# The tag with which templates of transformers mark the text of the assistant.
GENERATION = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")

Dicts = list[dict[str, Any]]
Form = Callable[[Message], Any]  # Returns the content of a message in the form that the template gets.


def default_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns `DEFAULT_CHAT_TEMPLATE`. If the tokenizer adds a BOS token to texts, the template begins with it."""
    first = tokenizer("a")["input_ids"][:1]
    begins = tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]
    return ("{{- bos_token -}}" if begins else "") + DEFAULT_CHAT_TEMPLATE


def template_variables(*templates: str | None) -> set[str]:
    """Returns the names of the variables that chat templates read: `messages`, `tools`, and those of the caller."""
    return set().union(*(_variables_of(template) for template in templates if template is not None))


@lru_cache(maxsize=16)  # A collator renders each row several times, and parsing takes longer than rendering.
def _variables_of(template: str) -> frozenset[str]:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    return frozenset(meta.find_undeclared_variables(environment.parse(GENERATION.sub("", template))))


def check_template(processor: Processor) -> None:
    """Raises a `ValueError` if a processor or a tokenizer cannot render a question with its chat template."""
    question: Any = [{"type": "text", "text": "?"}] if hasattr(processor, "tokenizer") else "?"
    try:
        processor.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=True, return_dict=True
        )
    except (ValueError, TemplateError) as error:
        why = "Expected a chat template that can render a question, but this one fails"
        raise ValueError(f"{why}: {error}") from error


def to_template(messages: list[Message], marker: str | None, render: Callable[[Dicts], str]) -> Dicts:
    """Returns messages in a form in which the template shows all of their texts and images.

    Each form is first tried with invented words in the place of the texts, because a template may change a real text on
    purpose. For example, it may leave out the reasoning of earlier answers. If no form works, the forms that are plain
    strings are tried with the real texts, because some templates only accept certain texts.

    Args:
        messages (`list` of [`Message`]): the messages.
        marker (`str`, *optional*): the image marker. None if the model uses no markers.
        render (`Callable`): renders a list of dicts with the template.

    Raises:
        jinja2.TemplateError, ValueError: if the template refuses every form, or loses a text or an image of it.
    """
    tried: list[tuple[list[Form], Dicts]] = []
    for form in _forms(messages, marker):
        made = _dicts(messages, form)
        if all(made != earlier for _, earlier in tried):
            tried.append((form, made))
    probes = [_probed(message, index) for index, message in enumerate(messages)]
    lost = []
    for form, made in tried:
        lost.append(_lost(probes, _dicts(probes, form), marker, render))
        if lost[-1] == []:
            return made
    for _, made in tried:
        is_plain = all(isinstance(message.get("content", ""), str) for message in made)
        if is_plain and _lost(messages, made, marker, render) == []:
            return made
    errors = [each for each in lost if isinstance(each, Exception)]
    for error in errors:
        if type(error) is TemplateError:  # The template itself has raised it, with `raise_exception`.
            raise error
    losses = sorted((each for each in lost if isinstance(each, list)), key=len)
    if not losses:
        raise ValueError(f"The chat template fails for this conversation: {errors[0]}") from errors[0]
    raise ValueError(
        f"The chat template does not show {'; '.join(losses[0])}. Pass another template "
        "(`chat_template=`), or change the messages."
    )


def _forms(messages: list[Message], marker: str | None) -> list[list[Form]]:
    """Returns the forms to try, the best one first. A form has one function for each message, which makes the content
    of the message.
    """

    def flat(message: Message) -> str | None:
        texts = [(marker or "") if part is IMAGE else str(part) for part in message.parts]
        return None if message.content is None else "".join(texts)

    def one_part(message: Message) -> list[dict[str, Any]] | None:
        text = flat(message)
        return None if text is None else [{"type": "text", "text": text}]

    def parts(message: Message) -> str | list[dict[str, Any]] | None:
        return None if message.content is None else Message({}, message.parts).as_parts()

    def by_role(system: Form, other: Form) -> list[Form]:
        return [system if message.role == "system" else other for message in messages]

    text_forms = [by_role(flat, flat), by_role(one_part, one_part), by_role(flat, one_part)]
    if marker is None:
        return text_forms
    where_needed: list[Form] = [parts if message.num_images else flat for message in messages]
    return [
        by_role(Message.as_parts, Message.as_parts),
        by_role(parts, parts),
        where_needed,
        by_role(flat, parts),
        *text_forms,
    ]


def _dicts(messages: list[Message], form: list[Form]) -> Dicts:
    contents = [make(message) for make, message in zip(form, messages)]
    return [
        message.fields if content is None else {**message.fields, "content": content}
        for message, content in zip(messages, contents)
    ]


def _probed(message: Message, index: int) -> Message:
    """Returns the message with an invented word in the place of each text."""
    if message.content is None:
        return message
    words = [
        part if not isinstance(part, str) or not part.strip() else f"xattn{index}x{place}word"
        for place, part in enumerate(message.parts)
    ]
    return Message(message.fields, str(words[0]) if isinstance(message.content, str) else words)


def _lost(
    messages: list[Message], made: Dicts, marker: str | None, render: Callable[[Dicts], str]
) -> Exception | list[str]:
    """Returns descriptions of what a template does not show of messages, or the error that it raises.

    `made` are the dicts of the messages that the template gets.
    """
    marked = [
        {**each, "content": [{**part, CANARY: CANARY} for part in each["content"]]}
        if isinstance(each.get("content"), list)
        else each
        for each in made
    ]
    try:
        text = render(marked)
    except Exception as error:  # A template may raise any error.
        return error
    texts = [[part.strip().lower() for part in each.parts if isinstance(part, str)] for each in messages]
    every, low = [part for parts in texts for part in parts], text.lower()
    lost = [
        f"the text of message {index} (role {message.role!r})"
        for index, (message, parts) in enumerate(zip(messages, texts))
        # A template may write a tool call in the place of the text of the same message. A text that occurs several
        # times, also within another text, must be shown as often.
        if not message.fields.get("tool_calls")
        and any(part and low.count(part) < sum(other.count(part) for other in every) for part in parts)
    ]
    if marker is not None:
        parts = (part for message in messages for part in message.parts)
        images = sum(1 if part is IMAGE else str(part).count(marker) for part in parts)
        if (found := text.count(marker)) != images:
            lost.append(f"one marker for each of {images} images, but {found}")
    if CANARY in text:
        lost.append("the texts alone, but whole lists of parts")
    return lost
