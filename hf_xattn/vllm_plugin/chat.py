"""Renders chats with the model's own processor, so that prompts equal those for `generate`.

vLLM itself renders a chat with the template of the tokenizer. It joins the parts of a message with line breaks, and a
template for texts loses the images.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from jinja2 import TemplateError
from vllm.renderers.chat_utils import parse_chat_messages, parse_chat_messages_async
from vllm.renderers.hf import HfRenderer
from vllm.utils.async_utils import make_async

from ..processing.chat_templates import template_variables
from ..processing_xattn import XAttnProcessor
from .mllama import is_mllama, processor_of, written_prompt
from .served import check_markers


# Arguments of `apply_chat_template` that are not variables of the template.
OF_PROCESSOR = {"tools", "documents", "add_generation_prompt", "continue_final_message"}


class XAttnRenderer(HfRenderer):
    """Turns chats into prompts, in the place of vLLM's renderer."""

    def __init__(self, config: Any, tokenizer: Any):
        super().__init__(config, tokenizer)
        self.render_async = make_async(self.render)

    @functools.cached_property
    def processor(self) -> XAttnProcessor:
        return processor_of(self.model_config)

    def render(self, conversation: list[Any], params: Any) -> list[int]:
        """Returns the tokens of a chat.

        Raises:
            ValueError: if the template refuses the chat, or if it loses a text or an image of the chat.
        """
        given = params.get_apply_chat_template_kwargs()
        named = given.get("chat_template")
        template = self.processor._template(named, given.get("tools"))
        # The engine passes more arguments than a template reads.
        known = template_variables(template) | OF_PROCESSOR
        options = {name: value for name, value in given.items() if name in known}
        try:
            text = self.processor.apply_chat_template(conversation, chat_template=named, tokenize=False, **options)
        except (TemplateError, TypeError) as error:
            raise ValueError(f"Expected a conversation that the chat template can render, got: {error}") from error
        tokens = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        contents = (message.get("content") for message in conversation)
        parts = [part for content in contents if isinstance(content, list) for part in content]
        check_markers(self.processor, tokens, sum(part.get("type") == "image" for part in parts))
        return tokens

    def _tokenize_singleton_prompt(self, prompt: Any, params: Any) -> Any:
        return super()._tokenize_singleton_prompt(*self._as_processor(prompt, params))

    async def _tokenize_singleton_prompt_async(self, prompt: Any, params: Any) -> Any:
        return await super()._tokenize_singleton_prompt_async(*self._as_processor(prompt, params))

    def _as_processor(self, prompt: Any, params: Any) -> tuple[Any, Any]:
        """Treats the BOS token as the processor does: a text that starts with the BOS token gets no second one."""
        text, bos = prompt.get("prompt"), self.processor.tokenizer.bos_token
        if not isinstance(text, str) or bos is None:
            return prompt, params
        if text.startswith(bos):
            return prompt, dataclasses.replace(params, add_special_tokens=False)
        if is_mllama(self.model_config.hf_config):
            prompt = {**prompt, "prompt": written_prompt(text, self.processor)}
        return prompt, params

    def get_dec_start_token_id(self) -> int:
        """Returns any token. The engine asks for one but does not use it (`skip_decoder_start_token`).

        The tokenizer may not have such a token.
        """
        return 0

    def process_for_engine(self, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        self._check(prompt)
        return super().process_for_engine(prompt, *args, **kwargs)

    async def process_for_engine_async(self, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        self._check(prompt)
        return await super().process_for_engine_async(prompt, *args, **kwargs)

    def _check(self, prompt: Any) -> None:
        """Checks a prompt. Requests without images do not reach the multi-modal processor, which checks the others.

        Raises:
            ValueError: for a marker without an image, and for a prompt with an encoder part and a decoder part.
        """
        if prompt.get("decoder_prompt") is not None:
            raise ValueError("Expected one prompt, got one for an encoder and one for a decoder.")
        given = prompt.get("encoder_prompt", prompt)
        if not given.get("multi_modal_data"):
            check_markers(self.processor, given.get("prompt_token_ids", []), 0)

    def render_messages(self, messages: list[Any], params: Any) -> tuple[list[Any], Any]:
        conversation, images, uuids = parse_chat_messages(messages, self.model_config, **_options(params))
        return conversation, _prompt(self.render(conversation, params), images, uuids)

    async def render_messages_async(self, messages: list[Any], params: Any) -> tuple[list[Any], Any]:
        conversation, images, uuids = await parse_chat_messages_async(messages, self.model_config, **_options(params))
        return conversation, _prompt(await self.render_async(conversation, params), images, uuids)


def _options(params: Any) -> dict[str, Any]:
    return {
        "content_format": "openai",  # lists of parts, in which images have their places
        "media_io_kwargs": params.media_io_kwargs,
        "mm_processor_kwargs": params.mm_processor_kwargs,
    }


def _prompt(tokens: list[int], images: Any, uuids: Any) -> dict[str, Any]:
    prompt = {"prompt_token_ids": tokens, "multi_modal_data": images, "multi_modal_uuids": uuids}
    return {name: value for name, value in prompt.items() if value is not None}
