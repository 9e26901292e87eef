"""Starts blocks so that text attends to the image tokens of the words it reads.

Queries and keys meet through two random projections, in which a word and the image token for it are no nearer than
others. Here keys have the image tokens, which `align_connector` has put at the states of words, in directions in which
words are told apart. Queries have there the regression from the text's hidden states in front of the block to the word
that was read last, in other heads to the sum of it and the word before it, so that `red heart` finds what is both, and
to the sum of the two before these: at each token behind a word, so also at the colon of `red heart: left`. Values are
of the principal components of words.

Where image tokens have a code of places, keys and values have it too, in dimensions of its own: in those of words a
place is lost among what is at it. Queries start with nothing there, and learn what `on the left` means. The output
projection stays zero, so the text model stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..configuration_xattn import CrossAttentionConfig
from ..data.rows import read_row, text_of
from ..layers.block import GatedCrossAttentionBlock
from ..parts.grid_code import GridCode, code_directions
from ..utils.architectures import text_num_hidden_layers
from .alignment_words import WORD, CannotAlign, RidgeSums, rendered, states_in_front


MATCH = 32.0  # score of a query and a key in the same direction
VALUES = 4.0  # size of a word in values: the larger it is, the sooner the output projection, which is zero, gets there
PLACES = 0.35  # size of a place in values, where a word has 1: larger ones drown the words in what is learned first
KEY_PLACES = 4.0  # size of a place in keys: the larger it is, the sooner a query learns to look somewhere
MOST_TEXTS = 512  # rows that are read, evenly spaced
# What a head looks for, by turns: the sum of words, counted back from the one that was read last.
SOUGHT = ((0,), (0, 1), (2, 3))
LAST_WORDS = 1 + max(map(max, SOUGHT))
SMALLEST = 0.03  # variance of a direction, as a share of the largest: smaller ones are not made as large as the others
TEXTS_AT_ONCE = 16
MOST_TOKENS = 512  # of a text
NO_WORD = -1


def check_fresh(body: Any) -> None:
    """Raises [`CannotAlign`] for blocks with positions, or that have learned: they would be written over."""
    for block in body.blocks:
        if block.config.position != "none":
            raise CannotAlign(
                f"Expected `model` without a code of positions, which queries and keys are not started for, got "
                f"`position={block.config.position!r}`. Pass `blocks=False` to align the connector alone."
            )
        if block.config.zero_init and bool(block.attn.o_proj.weight.detach().any()):
            raise CannotAlign(
                "Expected `model` with fresh blocks, whose output projections are zero, got trained ones. Retrofit the "
                "text model again, or pass `blocks=False` to align the connector alone."
            )


@torch.no_grad()
def start_blocks(
    body: Any, processor: Any, rows: Sequence[Any], words: Sequence[str], states: torch.Tensor, shares: torch.Tensor
) -> None:
    """Writes the projections of queries, keys and values of all blocks in front of a layer.

    Args:
        body ([`XAttnModel`]): fresh, with an aligned connector.
        processor ([`XAttnProcessor`]): renders the texts of the rows.
        words (`Sequence[str]`), states (`torch.Tensor`): `(words, hidden_size)`, to which image tokens are aligned.
        shares (`torch.Tensor`): `(words,)`, how many of the images have each.
    """
    depth = text_num_hidden_layers(body.config.text_config)
    blocks = [pair for pair in zip(body.blocks, body.config.cross_attention_layers) if pair[1] < depth]
    config = body.config.cross_attention_config
    has_places = any(isinstance(layer, GridCode) for layer in body.connector.layers)
    code = code_directions(config.context_size, config.head_dim) if has_places else states[:0]
    components = torch.linalg.eigh(states.double().T @ states.double()).eigenvectors.T.flip(0).float()
    # Places go where words are not, and have the size there that they had. Words span one direction less than they are.
    of_words = components[: min(len(states) - 1, len(components) // 2)]
    alone = code - code @ of_words.T @ of_words
    places = alone * (code.square().sum(1) / (alone * code).sum(1))[:, None]
    looked_for = _telling_apart(states, shares, config.head_dim - len(code))
    keys = torch.cat([looked_for, KEY_PLACES * places])
    values = _values(config, states, components, PLACES * places)
    sums = {block: RidgeSums(block.attn.q_proj.bias is not None) for block, _ in blocks}
    targets = torch.cat([states, states.new_zeros(1, states.shape[1])])  # the last one is of `NO_WORD`
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
    """Directions `(width, hidden_size)` in which words are told apart, those of many images above all.

    `red` and `blue` have states near each other. So the principal components of the words, each counted as often as
    there are images with it, are divided by their size (whitened). A word has size 1 in the mean.
    """
    weights = shares.double() / shares.sum()
    variances, components = torch.linalg.eigh((states.double().T * weights) @ states.double())
    first = variances.flip(0).clamp(min=SMALLEST * variances[-1])[:, None] ** -0.5 * components.T.flip(0)
    first = first[torch.arange(width) % len(first)].float()
    return first / ((states @ first.T).square().mean(-1) @ weights.float()).sqrt()


def _values(
    config: CrossAttentionConfig, states: torch.Tensor, components: torch.Tensor, places: torch.Tensor
) -> torch.Tensor:
    """Rows of values: words' first components, of which a word has size 1 in the mean, and at last those of places."""
    first = components[torch.arange(config.num_key_value_heads * config.head_dim) % len(components)]
    first = first / (states @ first[: config.head_dim].T).square().mean().sqrt()
    return torch.cat([first[: len(first) - len(places)], places])


def _texts(
    processor: Any, rows: Sequence[Any], words: Sequence[str]
) -> Iterator[tuple[list[list[int]], list[torch.Tensor], torch.Tensor]]:
    """Tokens of texts, the places behind a word, and there the last words `(places of all texts, LAST_WORDS)`."""
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
    """`solved`: `(hidden_size, SOUGHT * head_dim)`, with the bias as a last row if queries have one."""
    attn, config = block.attn, block.config
    width = config.head_dim
    attn.k_proj.weight.copy_(keys.repeat(config.num_key_value_heads, 1))
    attn.v_proj.weight.copy_(VALUES * values)
    sharper = MATCH / width**0.5  # two vectors of size 1 have a score of at most the root of their width
    queries = solved.unflatten(1, (len(SOUGHT), width))
    heads = queries[:, torch.arange(config.num_attention_heads) % len(SOUGHT)].flatten(1).T  # (heads * D, inputs)
    if attn.q_norm is not None:
        attn.q_norm.weight.fill_(sharper)
    else:
        heads = heads * sharper
    attn.q_proj.weight.copy_(heads[:, : config.hidden_size])
    if attn.q_proj.bias is not None:
        attn.q_proj.bias.copy_(heads[:, -1])
