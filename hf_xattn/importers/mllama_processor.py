"""Writes the processor of an exported model: Mllama's own, which code without this package loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers.utils import PROCESSOR_NAME, logging


logger = logging.get_logger(__name__)

IMAGE_TOKEN = "<|image|>"  # Mllama's, where the tokenizer names no other
# Of the source's processor; Mllama's writes its own.
REPLACED = (PROCESSOR_NAME, "preprocessor_config.json", "video_preprocessor_config.json")


def write_processor(source: Path, target: Path, image_token_id: int) -> None:
    """Replaces an `XAttnProcessor` among the copied files of `source` by a `MllamaProcessor` with the same parts.

    Without a start token the tokenizer does not work in a `MllamaProcessor`. Then a warning says so.

    Args:
        source (`Path`), target (`Path`): folders.
        image_token_id (`int`): the model's image marker.
    """
    file = source / PROCESSOR_NAME
    if not file.is_file() or json.loads(file.read_text()).get("processor_class") != "XAttnProcessor":
        return
    from transformers import AutoProcessor, AutoTokenizer, MllamaProcessor

    processor: Any = AutoProcessor.from_pretrained(source)
    for name in REPLACED:
        (target / name).unlink(missing_ok=True)
    tokenizer, image_processor = processor.tokenizer, processor.image_processor
    problems = []
    if not hasattr(image_processor, "max_image_tiles"):
        problems.append(f"an image processor that makes tiles, found {type(image_processor).__name__}")
    if tokenizer.bos_token is None:
        problems.append("a tokenizer with a start token (`bos_token`), found none")
    if problems:
        logger.warning(f"No processor was written. Mllama's needs {'; and '.join(problems)}.")
        return
    marker = tokenizer.convert_ids_to_tokens(image_token_id)
    if marker != IMAGE_TOKEN:
        tokenizer = AutoTokenizer.from_pretrained(
            source, image_token=marker
        )  # a `MllamaProcessor` reads this attribute
    MllamaProcessor(image_processor, tokenizer, chat_template=processor.chat_template).save_pretrained(target)
