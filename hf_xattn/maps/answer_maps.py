"""The attention maps of an answer alone. The text before it may be a long conversation, whose maps nobody looks at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from ..cache.xattn_cache import XAttnCache
from ..modeling_xattn import XAttnForConditionalGeneration
from ..training.freezing import body_of
from .attention_maps import OF_IMAGES, AttentionMaps, described, inner_model


PIECE = 64  # tokens whose weights of all heads are held at the same time


@torch.no_grad()
def answer_maps(
    model: XAttnForConditionalGeneration, inputs: Mapping[str, torch.Tensor], answer: torch.Tensor
) -> AttentionMaps:
    """Computes the attention of the tokens of an answer, as the mean over heads. The text before it is only read.

    Args:
        inputs (`Mapping`): what the processor makes of one conversation: `input_ids` `(1, text_len)` and images.
        answer (`torch.LongTensor`): `(answer_len,)`, the tokens behind this text.

    Returns:
        [`AttentionMaps`]: of the last given token and the answer, `(1, 1, 1 + answer_len, num_image_tokens)` a block,
            in float32 on the CPU. `num_given` is 1.

    Raises:
        ValueError: without images.
    """
    if not any(name in inputs for name in OF_IMAGES):
        raise ValueError(f"`answer_maps` needs images, got `inputs` with {sorted(inputs)} only.")
    inner = inner_model(model)
    given = {name: value for name, value in inputs.items() if name != "attention_mask"}
    ids = given.pop("input_ids")
    text_config = inner.config.get_text_config(decoder=True)
    cache = XAttnCache.adopt(EncoderDecoderCache(DynamicCache(config=text_config), DynamicCache()))
    options: dict[str, Any] = {"cache": cache, "use_cache": True, "return_dict": True, "logits_to_keep": 1}
    if ids.shape[1] > 1:
        model(ids[:, :-1], **given, **options)
    of_images = {} if ids.shape[1] > 1 else given
    tokens = torch.cat([ids[:, -1:], answer.to(ids.device)[None]], dim=1)
    pieces: list[list[torch.Tensor]] = []
    for piece in tokens.split(1 if body_of(inner)._interface.forgets else PIECE, dim=1):
        outputs = model(piece, **of_images, **options, output_attentions=False, output_cross_attentions=True)
        pieces.append([weights.float().mean(dim=1, keepdim=True).cpu() for weights in outputs.cross_attentions])
        of_images = {}
    weights = [torch.cat(of_block, dim=2) for of_block in zip(*pieces)]
    return described(inner, given, weights, tokens, torch.ones_like(tokens, dtype=torch.bool), num_given=1)
