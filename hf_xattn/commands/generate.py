"""`hf-xattn generate`: answers a prompt about images, or about a file of encoded images."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .loading import add_model_and_images, load_model_and_images
from .options import check_least


if TYPE_CHECKING:
    import torch
    from PIL.Image import Image


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("generate", help="answer a prompt about images")
    add_model_and_images(parser)
    parser.add_argument(
        "--prompt",
        required=True,
        metavar="TEXT",
        help="a question, which goes into the model's chat template if it has one",
    )
    parser.add_argument("--raw", action="store_true", help="take the prompt as it is, without a chat template")
    parser.add_argument(
        "--image-cache", type=Path, metavar="FILE", help="encoded images, a file that `hf-xattn encode` wrote"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-beams", type=int, default=1)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    if arguments.image and arguments.image_cache:
        raise ValueError("Expected --image or --image-cache, got both.")
    check_least(arguments, 1, "max_new_tokens", "num_beams")
    if arguments.image_cache is not None and not arguments.image_cache.is_file():
        raise ValueError(f"`--image-cache` ({arguments.image_cache}) is not a file.")
    model, processor, images = load_model_and_images(arguments)
    cache = None
    if arguments.image_cache is not None:
        from ..cache.image_cache import load_image_cache

        cache = load_image_cache(arguments.image_cache, model)
    layout = None if cache is None else cache.cross_attention_cache.layout
    num_images = 0 if layout is None else layout.num_images
    if _has_template(processor) and not arguments.raw:
        made = _chat(processor, arguments.prompt, images, num_images)
    elif images:
        made = processor(text=arguments.prompt, images=images, return_tensors="pt")
    else:
        made = _inputs_without_pixels(processor, arguments.prompt, num_images)
    # Drop token types: some tokenizers return them, but decoders do not take them.
    inputs: dict[str, Any] = {name: value.to(model.device) for name, value in made.items() if name != "token_type_ids"}
    prompt_length = inputs["input_ids"].shape[1]
    if cache is not None:
        inputs["past_key_values"] = cache
    tokens = model.generate(
        **inputs, max_new_tokens=arguments.max_new_tokens, num_beams=arguments.num_beams, do_sample=False
    )
    tokenizer = getattr(processor, "tokenizer", processor)
    print(tokenizer.decode(tokens[0, prompt_length:], skip_special_tokens=True))


def _has_template(processor: Any) -> bool:
    """Whether a processor or a tokenizer renders chats. An [`XAttnProcessor`] has a default template."""
    from ..processing_xattn import XAttnProcessor

    tokenizer = getattr(processor, "tokenizer", processor)
    named = getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None)
    return isinstance(processor, XAttnProcessor) or bool(named)


def _chat(processor: Any, prompt: str, images: list[Image], num_cached: int) -> Mapping[str, torch.Tensor]:
    """Renders a chat with one question. For `num_cached` encoded images it makes the ids alone, and no pixels."""
    marker = getattr(processor, "image_token", None)
    if marker and marker in prompt:
        raise ValueError(f"`--prompt` contains {marker}, which the chat template writes. Leave it out, or add `--raw`.")
    shown = images or [_blank()] * num_cached
    parts = [*({"type": "image", "image": image} for image in shown), {"type": "text", "text": prompt}]
    made = processor.apply_chat_template(
        [{"role": "user", "content": parts if hasattr(processor, "tokenizer") else prompt}],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    return made if images else {name: made[name] for name in ("input_ids", "attention_mask")}


def _blank() -> Image:
    """An image in the place of one that is encoded already: processors make text according to their images."""
    from PIL import Image

    return Image.new("RGB", (32, 32))


def _inputs_without_pixels(processor: Any, prompt: str, num_images: int) -> Mapping[str, torch.Tensor]:
    """Tokenizes a prompt without pixels. The ids are those that the processor would make for `num_images` images."""
    from ..processing_xattn import XAttnProcessor

    if isinstance(processor, XAttnProcessor) or not hasattr(processor, "image_processor"):
        return getattr(processor, "tokenizer", processor)(prompt, return_tensors="pt")
    made = processor(text=prompt, images=[_blank()] * num_images or None, return_tensors="pt")
    return {name: made[name] for name in ("input_ids", "attention_mask")}
