"""Starts blocks so that text attends to the image tokens of the words that it reads.

Usually queries and keys start as random projections. In these, a word and the image token that shows it are no nearer
to each other than to others. `align_connector` has moved the image tokens to the hidden states of words, and this file
makes the projections fit:

- **Keys** are the image tokens, projected to directions in which words differ most.
- **Queries** are a regression, in the same directions, from the hidden states in front of the block to the words that
  the text has just read. Heads take turns in what they look for: the last word; the sum of the last two words, so that
  `red heart` finds what is both; the sum of the two words before these. The regression is fitted at all tokens behind a
  word, so it also works at the colon of `red heart: left`.
- **Values** are the principal components of the words' states.
- **Positions.** If the image tokens have a position encoding, some dimensions of keys and values are reserved for it.
  In the dimensions of words, a position would be lost among the content at this position. Queries start at zero in
  these dimensions, and learn what `on the left` means.

The output projection stays zero, so the model still gives the text model's answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..configuration_xattn import CrossAttentionConfig
from ..data.rows import read_row, text_of
from ..layers.block import GatedCrossAttentionBlock
from ..modeling_xattn import XAttnModel
from ..parts.grid_code import GridCode, code_directions
from ..processing_xattn import XAttnProcessor
from ..utils.architectures import text_num_hidden_layers
from .alignment_words import WORD, CannotAlign, RidgeSums, rendered, states_in_front


MATCH = 32.0  # attention score of a query and a key with the same direction
VALUES = 4.0  # size of a word in values. Larger values move the output projection, which starts at zero, faster
PLACES = 0.35  # size of a position in values, where a word has 1. With more, the blocks learn positions before words
KEY_PLACES = 4.0  # size of a position in keys. With more, queries learn sooner to look at a position
MOST_TEXTS = 512  # at most this many rows are read, evenly spaced
# Heads take turns in what they look for: the sum of these words, counted back from the one that was read last.
SOUGHT = ((0,), (0, 1), (2, 3))
LAST_WORDS = 1 + max(map(max, SOUGHT))
SMALLEST = 0.03  # directions with a smaller share of the largest variance are not scaled up to the size of the others
TEXTS_AT_ONCE = 16
MOST_TOKENS = 512  # a longer text is cut
NO_WORD = -1


def check_fresh(body: XAttnModel) -> None:
    """Raises [`CannotAlign`] for blocks with a position encoding, and for trained blocks, which would be lost."""
    for block in body.blocks:
        if block.config.position != "none":
            raise CannotAlign(
                f"Expected `model` without a position encoding in its blocks, which cannot be started with one, got "
                f"`position={block.config.position!r}`. Pass `blocks=False` to align only the connector."
            )
        if block.config.zero_init and bool(block.attn.o_proj.weight.detach().any()):
            raise CannotAlign(
                "Expected `model` with fresh blocks, whose output projections are zero, got trained ones. Retrofit the "
                "text model again, or pass `blocks=False` to align only the connector."
            )


@torch.no_grad()
def start_blocks(
    body: XAttnModel,
    processor: XAttnProcessor,
    rows: Sequence[Any],
    words: Sequence[str],
    states: torch.Tensor,
    shares: torch.Tensor,
) -> None:
    """Writes the projections of queries, keys and values. A block behind the last layer is left as it is.

    Args:
        body ([`XAttnModel`]): a fresh model with an aligned connector.
        processor ([`XAttnProcessor`]): renders the texts of the rows.
        words (`Sequence[str]`), states (`torch.Tensor`): the words, and their states `(words, hidden_size)`, to which
            image tokens are aligned.
        shares (`torch.Tensor`): `(words,)`, the share of the images that have each word.
    """
    depth = text_num_hidden_layers(body.config.text_config)
    blocks = [pair for pair in zip(body.blocks, body.config.cross_attention_layers) if pair[1] < depth]
    config = body.config.cross_attention_config
    assert body.connector is not None
    has_places = any(isinstance(layer, GridCode) for layer in body.connector.layers)
    code = code_directions(config.context_size, config.head_dim) if has_places else states[:0]
    components = torch.linalg.eigh(states.double().T @ states.double()).eigenvectors.T.flip(0).float()
    # Positions use only directions that words do not use, and are scaled up to their size before this. The states of n
    # words, whose mean is zero, span n - 1 directions.
    of_words = components[: min(len(states) - 1, len(components) // 2)]
    alone = code - code @ of_words.T @ of_words
    places = alone * (code.square().sum(1) / (alone * code).sum(1))[:, None]
    looked_for = _telling_apart(states, shares, config.head_dim - len(code))
    keys = torch.cat([looked_for, KEY_PLACES * places])
    values = _values(config, states, components, PLACES * places)
    sums = {block: RidgeSums(block.attn.q_proj.bias is not None) for block, _ in blocks}
    targets = torch.cat([states, states.new_zeros(1, states.shape[1])])  # the last row is the target of `NO_WORD`
    for ids, behind_words, read in _texts(processor, rows, words):
        sought = torch.stack([targets[read[:, list(which)]].sum(1) for which in SOUGHT], dim=1)
        wanted = nn.functional.pad(sought @ looked_for.T, (0, len(code))).flatten(1)  # (places of texts, sought * D)
        hidden = states_in_front(body.text_model, [layer for _, layer in blocks], ids)
        for block, layer in blocks:
            behind = torch.cat([text[place] for text, place in zip(hidden[layer], behind_words)])
            sums[block].add(block.attn_norm(behind).float(), wanted.to(behind.device))
    for block, _ in blocks:
        if sums[block].count:
            _write(block, keys, values, sums[block].solve())


def _telling_apart(states: torch.Tensor, shares: torch.Tensor, width: int) -> torch.Tensor:
    """Returns directions `(width, hidden_size)` in which words differ. Words of many images count most.

    The states of words such as `red` and `blue` are near each other. The directions that tell them apart are small, so
    all principal components of the words are scaled to the same size (whitened). Each word counts as often as there are
    images with it. The mean size of a word is 1.
    """
    weights = shares.double() / shares.sum()
    variances, components = torch.linalg.eigh((states.double().T * weights) @ states.double())
    first = variances.flip(0).clamp(min=SMALLEST * variances[-1])[:, None] ** -0.5 * components.T.flip(0)
    first = first[torch.arange(width) % len(first)].float()
    return first / ((states @ first.T).square().mean(-1) @ weights.float()).sqrt()


def _values(
    config: CrossAttentionConfig, states: torch.Tensor, components: torch.Tensor, places: torch.Tensor
) -> torch.Tensor:
    """Returns the rows of the values' projection: the first components of words (mean size 1), then the positions."""
    first = components[torch.arange(config.num_key_value_heads * config.head_dim) % len(components)]
    first = first / (states @ first[: config.head_dim].T).square().mean().sqrt()
    return torch.cat([first[: len(first) - len(places)], places])


def _texts(
    processor: Any, rows: Sequence[Any], words: Sequence[str]
) -> Iterator[tuple[list[list[int]], list[torch.Tensor], torch.Tensor]]:
    """Yields, for several texts at a time, their tokens, the places behind a word, and the last words at these places.

    The last words are indices `(places of all texts, LAST_WORDS)`; the latest word comes first.
    """
    number = {word: index for index, word in enumerate(words)}
    chosen = range(0, len(rows), max(1, -(-len(rows) // MOST_TEXTS)))
    for start in range(0, len(chosen), TEXTS_AT_ONCE):
        texts = [_rendered(processor, rows, index) for index in chosen[start : start + TEXTS_AT_ONCE]]
        encoded = processor.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        places, read = [], []
        for text, offsets in zip(texts, encoded["offset_mapping"]):
            ends = [(found.end(), number[found.group()]) for found in WORD.finditer(text) if found.group() in number]
            last, own = [NO_WORD] * LAST_WORDS, []
            for token, (begin, end) in enumerate(offsets[:MOST_TOKENS]):
                while ends and ends[0][0] <= end:
                    last = [ends.pop(0)[1], *last[:-1]]
                if end > begin and last[0] != NO_WORD:
                    own.append(token)
                    read.append(last)
            places.append(torch.tensor(own, dtype=torch.long))
        if read:
            yield [ids[:MOST_TOKENS] for ids in encoded["input_ids"]], places, torch.tensor(read)


def _rendered(processor: Any, rows: Any, index: int) -> str:
    messages = [{"role": each["role"], "content": text_of(each)} for each in read_row(rows[index]).messages]
    return rendered(processor, messages, rows.where(index) if hasattr(rows, "where") else f"`rows[{index}]`")


def _write(block: GatedCrossAttentionBlock, keys: torch.Tensor, values: torch.Tensor, solved: torch.Tensor) -> None:
    """Writes the projections of a block.

    Args:
        solved (`torch.Tensor`): `(hidden_size, SOUGHT * head_dim)`, the regression for queries. If queries have a bias,
            it is one more row at the end.
    """
    attn, config = block.attn, block.config
    width = config.head_dim
    attn.k_proj.weight.copy_(keys.repeat(config.num_key_value_heads, 1))
    attn.v_proj.weight.copy_(VALUES * values)
    sharper = MATCH / width**0.5  # without it, the score of two vectors of size 1 is at most the root of their width
    queries = solved.unflatten(1, (len(SOUGHT), width))
    heads = queries[:, torch.arange(config.num_attention_heads) % len(SOUGHT)].flatten(1).T  # (heads * D, inputs)
    if attn.q_norm is not None:
        attn.q_norm.weight.fill_(sharper)
    else:
        heads = heads * sharper
    attn.q_proj.weight.copy_(heads[:, : config.hidden_size])
    if attn.q_proj.bias is not None:
        attn.q_proj.bias.copy_(heads[:, -1])
