"""Chat templates of text models, for messages with images.

A text model's template knows texts only. Of a list of parts it prints nothing, or the list itself, or fails. So this tries out in
which form it shows every text, and puts the marker of an image where the image stands. A template that knows images and writes the
same marker itself is used as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .chat_messages import IMAGE, Message


# For models without a template: `User: ...`, `Assistant: ...`, one message a line. An answer ends with the end-of-sequence token.
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

# A key that no template reads: where its value is printed, a whole list is.
CANARY = "xattncanary"

Dicts = list[dict[str, Any]]
Form = Callable[[Message], Any]  # to the content that a template gets


def default_template(tokenizer: Any) -> str:
    """`DEFAULT_CHAT_TEMPLATE`, with the token in front that the tokenizer puts there."""
    first = tokenizer("a")["input_ids"][:1]
    begins = tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]
    return ("{{- bos_token -}}" if begins else "") + DEFAULT_CHAT_TEMPLATE


def to_template(messages: list[Message], marker: str | None, render: Callable[[Dicts], str]) -> Dicts:
    """Messages in the form in which a template shows all that they say.

    The forms are tried with made-up words in place of the texts, so that what a template makes of a text (it may leave out the
    reasoning of earlier answers) is its own affair, and what it makes of a list is seen.

    Args:
        messages (`list[Message]`): one conversation.
        marker (`str`, *optional*): what stands for an image in the text; without one, nothing does.
        render (`Callable`): from messages to the rendered text.

    Raises:
        jinja2.TemplateError: where the template refuses the conversation in every form.
        ValueError: where it loses the text of a message in every form.
    """
    tried: list[tuple[Dicts, Exception | list[str]]] = []
    for form in _forms(messages, marker):
        made = [_dict(message, form[index](message)) for index, message in enumerate(messages)]
        if any(made == earlier for earlier, _ in tried):
            continue
        lost = _lost(messages, form, marker, render)
        if lost == []:
            return made
        tried.append((made, lost))
    return _last_resort(messages, marker, render, tried)


def _forms(messages: list[Message], marker: str | None) -> list[list[Form]]:
    """The forms to try, best first; each says for every message what its content becomes."""

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


def _dict(message: Message, content: Any) -> dict[str, Any]:
    return message.fields if content is None else {**message.fields, "content": content}


def _lost(
    messages: list[Message], form: list[Form], marker: str | None, render: Callable[[Dicts], str]
) -> Exception | list[str]:
    """What a template does not show of messages in a form, in words; or the error that it raises."""
    probes = [_probed(message, index) for index, message in enumerate(messages)]
    made = [_dict(probe, _with_canary(form[index](probe))) for index, probe in enumerate(probes)]
    try:
        text = render(made)
    except Exception as error:  # a template may raise anything
        return error
    said = text.lower()
    lost = [
        f"the text of message {index} (role {probe.role!r})"
        for index, probe in enumerate(probes)
        # Templates may write a call of a tool in place of the text beside it.
        if not probe.fields.get("tool_calls") and any(word not in said for word in _words(probe))
    ]
    images = sum(message.num_images for message in messages)
    if marker is not None and (found := text.count(marker)) != images:
        lost.append(f"one marker for each of {images} images, but {found}")
    if CANARY in text:
        lost.append("the texts alone: it prints lists of parts as they are")
    return lost


def _probed(message: Message, index: int) -> Message:
    """The message with a made-up word for each text that is not blank."""
    words = [
        part if not isinstance(part, str) or not part.strip() else f"xattn{index}x{place}word"
        for place, part in enumerate(message.parts)
    ]
    if message.content is None:
        return message
    return Message(message.fields, str(words[0]) if isinstance(message.content, str) else words)


def _words(probe: Message) -> list[str]:
    return [part for part in probe.parts if isinstance(part, str) and part.strip()]


def _with_canary(content: Any) -> Any:
    return [{**part, CANARY: CANARY} for part in content] if isinstance(content, list) else content


def _last_resort(
    messages: list[Message],
    marker: str | None,
    render: Callable[[Dicts], str],
    tried: list[tuple[Dicts, Exception | list[str]]],
) -> Dicts:
    """No form passed with made-up words. A template may want certain texts: then the true ones as plain strings may pass."""
    from jinja2.exceptions import TemplateError

    for made, _ in tried:
        if all(isinstance(message.get("content", ""), str) for message in made):
            try:
                text = render(made)
            except Exception:
                continue
            said = [
                part.strip()
                for message in messages
                for part in message.parts
                if isinstance(part, str) and not message.fields.get("tool_calls")
            ]
            images = sum(message.num_images for message in messages)
            # A text that is said twice, or within another, must be there as often.
            shown = all(text.count(part) >= sum(other.count(part) for other in said) for part in said if part)
            if shown and (marker is None or text.count(marker) >= images):
                return made
    errors = [lost for _, lost in tried if isinstance(lost, Exception)]
    for error in errors:
        if type(error) is TemplateError:  # the template's own words, by `raise_exception`
            raise error
    losses: list[list[str]] = [lost for _, lost in tried if isinstance(lost, list)]
    if not losses:
        raise ValueError(f"The chat template fails for this conversation: {errors[0]}") from errors[0]
    fewest = min(losses, key=len)
    raise ValueError(
        f"The chat template does not show {'; '.join(fewest)}. Use a template that does (`chat_template=`), or "
        "messages that it knows."
    )
