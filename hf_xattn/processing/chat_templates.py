"""Chat templates of text models, for messages with images.

A template for texts may print nothing for a list of parts, print the list itself, or fail. So several forms of the
messages are tried, and one is taken in which the template shows every text and the marker of every image. A template
that writes the same marker itself gets the lists of parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from jinja2 import TemplateError, meta

from .chat_messages import IMAGE, Message


# For models without a template: `User: ...`, `Assistant: ...`, one message per line. An answer ends with the
# end-of-sequence token.
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

# A key that no template reads. If its value is in the text, the template has printed a whole list of parts.
CANARY = "xattncanary"

# A tag of transformers' own, around what the model says.
GENERATION = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")

Dicts = list[dict[str, Any]]
Form = Callable[[Message], Any]  # returns the content that the template gets


def default_template(tokenizer: Any) -> str:
    """Returns `DEFAULT_CHAT_TEMPLATE`, with the BOS token in front if the tokenizer adds one to texts."""
    first = tokenizer("a")["input_ids"][:1]
    begins = tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]
    return ("{{- bos_token -}}" if begins else "") + DEFAULT_CHAT_TEMPLATE


def template_variables(*templates: str | None) -> set[str]:
    """The names that chat templates read and do not set: messages, tools, and what a caller may add."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    parsed = [environment.parse(GENERATION.sub("", template)) for template in templates if template is not None]
    return set().union(*map(meta.find_undeclared_variables, parsed))


def check_template(processor: Any) -> None:
    """Raises a `ValueError` if a processor, or a tokenizer, cannot render a question with its chat template."""
    question: Any = [{"type": "text", "text": "?"}] if hasattr(processor, "tokenizer") else "?"
    try:
        processor.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=True, return_dict=True
        )
    except (ValueError, TemplateError) as error:
        why = "A chat needs a chat template that renders a question, but this one fails"
        raise ValueError(f"{why}: {error}") from error


def to_template(messages: list[Message], marker: str | None, render: Callable[[Dicts], str]) -> Dicts:
    """Returns messages in a form in which the template shows all of their texts and images.

    Each form is tried with made-up words in place of the texts: a template may change a real text on purpose, for
    example leave out the reasoning of earlier answers. Then each is tried with the real texts as plain strings: some
    templates accept only certain texts.

    Raises a `jinja2.TemplateError` or a `ValueError` if the template refuses, or loses a text of, every form. Without
    a `marker` of images, the text has none.
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
        if type(error) is TemplateError:  # the template's own message, from `raise_exception`
            raise error
    losses = sorted((each for each in lost if isinstance(each, list)), key=len)
    if not losses:
        raise ValueError(f"The chat template fails for this conversation: {errors[0]}") from errors[0]
    raise ValueError(
        f"The chat template does not show {'; '.join(losses[0])}. Pass another template "
        "(`chat_template=`), or change the messages."
    )


def _forms(messages: list[Message], marker: str | None) -> list[list[Form]]:
    """Returns the forms to try, best first. Each holds one function per message, which makes the message's content."""

    def flat(message: Message) -> str | None:
        return None if message.content is None else "".join(_text(part, marker) for part in message.parts)

    def one_part(message: Message) -> list[dict[str, Any]] | None:
        text = flat(message)
        return None if text is None else [{"type": "text", "text": text}]

    def parts(message: Message) -> list[dict[str, Any]] | None:
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


def _text(part: Any, marker: str | None) -> str:
    return (marker or "") if part is IMAGE else part


def _dicts(messages: list[Message], form: list[Form]) -> Dicts:
    contents = [make(message) for make, message in zip(form, messages)]
    return [
        message.fields if content is None else {**message.fields, "content": content}
        for message, content in zip(messages, contents)
    ]


def _probed(message: Message, index: int) -> Message:
    """The message with a made-up word in the place of each text."""
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
    """What a template does not show of messages, which were `made` dicts, in words, or the error that it raises."""
    try:
        text = render(
            [{**each, "content": _with_canary(each["content"])} if "content" in each else each for each in made]
        )
    except Exception as error:  # a template may raise anything
        return error
    texts = [[part.strip().lower() for part in each.parts if isinstance(part, str)] for each in messages]
    every, low = [part for parts in texts for part in parts], text.lower()
    lost = [
        f"the text of message {index} (role {message.role!r})"
        for index, (message, parts) in enumerate(zip(messages, texts))
        # A template may write a tool call in place of the text of the same message. A text that is said twice, or
        # within another, must be there as often.
        if not message.fields.get("tool_calls")
        and any(part and low.count(part) < sum(other.count(part) for other in every) for part in parts)
    ]
    if marker is not None:
        images = sum(_text(part, marker).count(marker) for message in messages for part in message.parts)
        if (found := text.count(marker)) != images:
            lost.append(f"one marker for each of {images} images, but {found}")
    if CANARY in text:
        lost.append("the texts alone, but whole lists of parts")
    return lost


def _with_canary(content: Any) -> Any:
    return [{**part, CANARY: CANARY} for part in content] if isinstance(content, list) else content
