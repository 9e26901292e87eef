"""The table of `XAttnProcessor`. See `surface.py`."""

import torch

from helpers.inputs.surface import Fine, Surface, Wrong, needs, value
from hf_xattn import XAttnProcessor


def processor_surfaces(parts):
    """The surfaces, of which `parts()` gives a tokenizer and an image processor."""

    def call_processor(**given):
        made = XAttnProcessor(**parts())
        return made(**needs(given, text="a dog"))

    def call_chat(**given):
        """With an answer at the end, so that it can be continued."""
        chat = [{"role": "user", "content": "a dog"}, {"role": "assistant", "content": "a cat"}]
        return XAttnProcessor(**parts()).apply_chat_template(**needs(given, conversation=chat, tokenize=True))

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
            },
            fields={"images", "videos", "text"},
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
            },
            fields={"conversation"},
        ),
    }
