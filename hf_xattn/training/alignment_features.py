"""What an alignment reads of pictures: the features of their image tokens, from the tower or from a folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn

from ..images.connector import check_square
from ..images.tower import run_tower
from ..parts.tiles import Tiles
from ..processing_xattn import TILE_INPUTS, XAttnProcessor
from ..utils.projection import to_dtype_of
from .alignment_words import grouped
from .ridge import with_float64


KEPT = 2**30  # bytes of features that are kept from one pass to the next


class Pictures:
    """The inputs of the connector's last layer for all image tokens of a row's pictures, and the words of its text.

    Iterated several times. The first pictures, as many as fit into `KEPT` bytes, go through the tower only once.
    """

    def __init__(self, body: Any, processor: XAttnProcessor, rows: Sequence[Any], batch_size: int):
        self.body, self.processor, self.rows, self.batch_size = body, processor, rows, batch_size
        self._kept: list[tuple[torch.Tensor, set[str]]] = []
        self._room = KEPT

    def __iter__(self) -> Iterator[tuple[torch.Tensor, set[str]]]:
        for features, words in self._kept:
            yield features.float(), words
        waiting: list[tuple[list[Any], set[str]]] = []
        for pictures, words, _ in islice(grouped(self.rows), len(self._kept), None):
            waiting.append((pictures, words))
            if sum(len(each) for each, _ in waiting) >= self.batch_size:
                yield from self._encoded(waiting)
                waiting = []
        if waiting:
            yield from self._encoded(waiting)

    def _encoded(self, waiting: list[tuple[list[Any], set[str]]]) -> Iterator[tuple[torch.Tensor, set[str]]]:
        for features, words in _encoded(self.body, self.processor, waiting):
            half = features.to(torch.bfloat16)  # rounding is far below what tells words apart
            if (size := half.nbytes) <= self._room:
                self._room -= size
                self._kept.append((half, words))
            else:
                self._room = 0  # those that are kept come first
            yield half.float(), words


def _encoded(
    body: Any, processor: XAttnProcessor, waiting: list[tuple[list[Any], set[str]]]
) -> Iterator[tuple[torch.Tensor, set[str]]]:
    images = [[picture] for pictures, _ in waiting for picture in pictures]
    try:
        batches = [processor(images=images)]
    except ValueError:  # pictures of several sizes
        batches = [processor(images=[each]) for each in images]
    features = [each for batch in batches for each in _features(body, dict(batch))]
    for pictures, words in waiting:
        own, features = features[: len(pictures)], features[len(pictures) :]
        yield torch.cat(own), words


def _features(body: Any, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """For each picture of `(pictures, 1, ...)`: what the connector's last layer reads, `(tokens, width)`, float32."""
    connector = body.connector
    inputs = {name: value.to(body.vision_tower.device) for name, value in inputs.items()}
    tiles = Tiles(*(inputs[name] for name in TILE_INPUTS)) if TILE_INPUTS[0] in inputs else None
    output = _tower_output(body, inputs, tiles)
    if tiles is not None:  # no text sees padding tiles
        found = [each[mask != 0].flatten(0, 1) for each, mask in zip(output[:, 0], tiles.aspect_ratio_mask[:, 0])]
    else:
        drops = body.config.vision_feature_select_strategy == "default"
        found = list(output[:, 1:] if drops else output)
    read = []
    for features in found:
        features = to_dtype_of(connector.layers[0], features)
        for layer in connector.layers:
            if layer is solved_layer(body):
                break
            features = layer(features)
        if not bool(torch.isfinite(features).all()):
            raise ValueError("Expected finite features of the vision tower, got NaN or infinite values.")
        read.append(with_float64(features.float()))
    return read


def _tower_output(body: Any, inputs: dict[str, torch.Tensor], tiles: Tiles | None) -> torch.Tensor:
    """`(pictures, tokens, width)`, or `(pictures, 1, tiles, tokens, width)`."""
    if "vision_features" in inputs:  # of `VisionFeatures.reader`
        output = inputs["vision_features"]
        return output[:, 0] if tiles is None else output
    check_square(body.config, inputs["pixel_values"])
    output = run_tower(body.vision_tower, inputs["pixel_values"], tiles, body.config.vision_feature_layer)[0]
    return output.flatten(2).transpose(1, 2) if tiles is None and output.dim() == 4 else output


def solved_layer(body: Any) -> Any:
    """The layer that is solved: the last one with weights. A code of places behind it has none."""
    return [layer for layer in body.connector.layers if isinstance(layer, nn.Linear)][-1]
