"""The table of `XAttnProcessor`. See `surface.py`."""

import torch
from surface import Fine, Surface, Wrong, needs, switch, value

from hf_xattn import XAttnProcessor
from hf_xattn.utils.transformers_api import has


def processor_surfaces(parts):
    """The surfaces, of which `parts()` gives a tokenizer and an image processor."""

    def call_processor(**given):
        made = XAttnProcessor(**parts())
        return made(**needs(given, text="a dog"))

    def call_chat(**given):
        """With an answer at the end, so that it can be continued."""
        chat = [{"role": "user", "content": "a dog"}, {"role": "assistant", "content": "a cat"}]
        return XAttnProcessor(**parts()).apply_chat_template(**needs(given, conversation=chat, tokenize=True))

    def call_init(**given):
        return XAttnProcessor(**needs(given, **parts()))

    return {
        "processor": Surface(
            XAttnProcessor.__call__,
            call_processor,
            {
                "images": value(none=Fine(None), kind=3, rank=torch.zeros(3), dtype=Wrong([3], "got int")),
                "videos": value(none=Fine(None), kind=3, rank=torch.zeros(2, 3, 3), size=Wrong([[]], "no frames")),
                "text": value(
                    none=Wrong(None, "`images` or both"),
                    kind=3,
                    rank=Wrong([["a"]], "list with list"),
                    size=Wrong([], "empty"),
                    dtype=Wrong([3], "list with int"),
                ),
                "return_tensors": value(none=Fine(None), kind=3, size="tf"),
            },
        ),
        "chat": Surface(
            XAttnProcessor.apply_chat_template,
            call_chat,
            {
                "conversation": value(
                    none=None,
                    kind="a dog",
                    rank=Wrong([3], "message 0.*int"),
                    size=Wrong([], "empty"),
                    dtype=Wrong([[3]], "message 0"),
                ),
                "chat_template": value(none=Fine(None), kind=3),
                "tools": value(none=Fine(None), kind=3),
                "documents": value(none=Fine(None), kind=3),
                "add_generation_prompt": switch(),
                "continue_final_message": value(none=Fine(None), kind=Wrong("yes", "no .yes. to continue")),
                "return_assistant_tokens_mask": switch(),
                "tokenize": switch(),
                "return_tensors": value(none=Fine(None), kind=3, size="tf"),
                "return_dict": switch(),
                "load_audio_from_video": switch(),
                "processor_kwargs": value(none=Fine(None), kind=3),
                "sanitize_control_tokens": switch() if has("_mark_chat_inputs") else value(none=Fine(None), kind=True),
            },
        ),
        "processor_parts": Surface(
            XAttnProcessor.__init__,
            call_init,
            {
                "image_processor": value(none=Wrong(None, "required"), kind=Wrong(3, "int.*was expected")),
                "tokenizer": value(none=Wrong(None, "required"), kind=Wrong(3, "int.*was expected")),
                "chat_template": value(none=Fine(None), kind=3),
                "image_token": value(none=Fine(None), kind=3, size="<image>"),
            },
        ),
    }
