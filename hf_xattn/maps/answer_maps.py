"""Shows where the model looked when it generated a word: splits an answer into words, and draws their attention.

[`attention_maps`] covers the whole text. The text before an answer may be a long conversation, whose maps nobody needs.
So [`answer_maps`] only covers the answer. [`looks`] returns images for a web page; [`AttentionMaps.plot`] draws figures
with a scale.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from ..cache.xattn_cache import XAttnCache
from ..modeling_xattn import XAttnForConditionalGeneration
from ..training.freezing import body_of
from .attention_maps import OF_IMAGES, AttentionMaps, described, inner_model


if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

PIECE = 64  # number of tokens for which the weights of all heads are in memory at the same time
COLOUR = "darkorange"
OPACITY = 165  # opacity of the colour where the attention is largest, of 255
SIDE = 320  # pixels to which a small image is enlarged


class Word(NamedTuple):
    """A word of a text."""

    text: str  # the word with its punctuation
    start: int  # index of its first character in the text
    tokens: range  # indices of its tokens


def words_of(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[Word]:
    """Splits a text at white space, and finds the tokens of each word. Special tokens belong to no word.

    The characters of a token are those that it adds to the text of the tokens before it. They cannot be read from the
    token alone: some tokenizers have the space in the token, some write it between tokens, and some need several tokens
    for one character.

    Args:
        ids (`list[int]`): the tokens of the text.
        tokenizer: the tokenizer that decodes them.
    """
    decode: Any = tokenizer.decode  # its annotation also has lists of texts
    text = decode(ids, skip_special_tokens=True)
    ends: list[int] = []
    for index in range(len(ids)):
        # An incomplete character is decoded to a replacement character. It counts for the token that completes it.
        known = decode(ids[: index + 1], skip_special_tokens=True).rstrip("\ufffd")
        ends.append(max(len(os.path.commonprefix([known, text])), ends[-1] if ends else 0))
    special = set(getattr(tokenizer, "all_special_ids", ()))
    words = []
    for match in re.finditer(r"\S+", text):
        before = max((end for end in ends if end <= match.start()), default=0)
        # A token that adds no character begins a character, and belongs to the word of that character.
        first = ends.index(before) + 1 if before else 0
        last = next((index for index, end in enumerate(ends) if end >= match.end()), len(ids) - 1)
        while first < last and ids[first] in special:
            first += 1
        words.append(Word(match.group(), match.start(), range(first, last + 1)))
    return words


@torch.no_grad()
def answer_maps(
    model: XAttnForConditionalGeneration, inputs: Mapping[str, torch.Tensor], answer: torch.Tensor
) -> AttentionMaps:
    """Computes the attention of the tokens of an answer, as the mean over heads.

    No maps are computed for the text before the answer.

    Args:
        model ([`XAttnForConditionalGeneration`]): the model.
        inputs (`Mapping`): output of the processor for one conversation: `input_ids` `(1, text_len)` and images.
        answer (`torch.LongTensor`): `(answer_len,)`, the tokens that follow this text.

    Returns:
        [`AttentionMaps`]: maps of the last given token and of the answer. The weights of a block are
            `(1, 1, 1 + answer_len, num_image_tokens)`, in float32 on the CPU. `num_given` is 1.

    Raises:
        ValueError: if `inputs` has no images.
    """
    if not any(name in inputs for name in OF_IMAGES):
        raise ValueError(f"`answer_maps` needs images, got `inputs` with {sorted(inputs)} only. Pass `pixel_values`.")
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


def lit(picture: Image, heat: torch.Tensor, covered: tuple[float, float] = (1.0, 1.0)) -> Image:
    """Lays an orange colour over an image. The more attention, the stronger the colour.

    Args:
        picture (`PIL.Image.Image`): the image, in RGB.
        heat (`torch.Tensor`): `(patch rows, patch columns)`, the attention of each patch, from 0 to 1.
        covered (`tuple[float, float]`): share of the height and of the width of the image that the patches cover.
    """
    from PIL import Image

    # The power makes weak attention stronger. On a dark image, it could not be seen otherwise.
    patches = Image.fromarray((heat.clamp(0, 1) ** 0.7 * OPACITY).round().to(torch.uint8).numpy())
    cover = Image.new("L", picture.size)
    size = round(picture.width * covered[1]), round(picture.height * covered[0])
    cover.paste(patches.resize(size, Image.Resampling.NEAREST))
    return Image.composite(Image.new("RGB", picture.size, COLOUR), picture, cover)


def looks(maps: AttentionMaps, tokens: range, layer: int | str = "mean") -> list[tuple[Image, float]]:
    """Shows where the model looked when it generated `tokens`.

    Args:
        maps ([`AttentionMaps`]): maps of an answer, with one row and with pixels.
        tokens (`range`): indices into the generated tokens. The mean of their attention is shown.
        layer (`int` or `"mean"`): as in [`AttentionMaps.grid`].

    Returns:
        For each image: the image with its attention laid over it, and its share of the attention. The colour has the
        same scale for all tokens and images of an answer.

    Raises:
        ValueError: as [`AttentionMaps.grid`].
    """
    from PIL import Image

    # The weights for the choice of a token are at the position before the token.
    grids = [maps.grid(image, layer=layer, head="mean")[maps.num_given - 1 : -1] for image in range(maps.num_images)]
    most = max(max(float(grid.max()) for grid in grids), 1e-6)
    shown = []
    for image, grid in enumerate(grids):
        picture = Image.fromarray((maps.pixels(image) * 255).round().byte().numpy())
        scale = max(1, SIDE // max(picture.size))
        picture = picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)
        heat = grid[tokens.start : tokens.stop].mean(dim=0)
        shown.append((lit(picture, heat / most, maps.covered(image)), float(heat.sum())))
    return shown
