"""Encoded images as values: put together, taken apart, written to a file and read back.

A file is safetensors, with a fingerprint of the weights that made it. Keys and values of another model, or of the same one
before more training, would be read as noise and fail silently, so they are refused.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.cache_utils import DynamicCache

from .cache import CrossAttentionLayer, ImageCache, encoded_images
from .visibility import ImageTokens


if TYPE_CHECKING:
    from .modeling_xattn import XAttnForConditionalGeneration, XAttnModel

FORMAT = "hf_xattn image cache 2"
# What of `ImageTokens` goes into a file; markers and per-text masks belong to a text, not to the images.
TENSORS = ("image_of_token", "token_mask", "image_mask", "digest")


def select_images(cache: ImageCache, rows: list[int] | torch.Tensor) -> ImageCache:
    """The image rows `rows` of a cache, in that order; a row may come more than once.

    Raises:
        IndexError: for a row that the cache does not have.
    """
    count = _filled(cache).keys.shape[0]
    rows = torch.as_tensor(rows, dtype=torch.long)
    if rows.dim() != 1 or rows.numel() == 0 or rows.min() < 0 or rows.max() >= count:
        raise IndexError(f"`rows` must be a non-empty list of rows from 0 to {count - 1}, got {rows.tolist()}.")
    layers = []
    for layer in cache.cross_attention_cache.layers:
        images = layer.images.select(rows)
        layers.append(
            _layer(layer.keys[rows.to(layer.keys.device)], layer.values[rows.to(layer.values.device)], images)
        )
    return _cache_of(layers)


def combine_images(caches: list[ImageCache]) -> ImageCache:
    """Image caches of several calls as one batch, the rows of the first cache first. Shorter rows are padded and masked.

    Raises:
        ValueError: for no caches, or caches of different models.
    """
    if not caches:
        raise ValueError("`caches` is empty.")
    first = [_filled(cache) for cache in caches]
    shapes = {(len(cache.cross_attention_cache.layers), *layer.keys.shape[1::2]) for cache, layer in zip(caches, first)}
    if len(shapes) > 1:
        raise ValueError(
            f"`caches` come from different models: (blocks, K/V heads, head width) are {sorted(shapes)}; they must be equal."
        )
    length = max(layer.keys.shape[2] for layer in first)
    images = _combine_tokens([layer.images for layer in first], [layer.keys.shape[0] for layer in first], length)
    layers = []
    for index in range(len(caches[0].cross_attention_cache.layers)):
        rows = [cache.cross_attention_cache.layers[index] for cache in caches]
        keys = torch.cat([_padded(layer.keys, length) for layer in rows])
        values = torch.cat([_padded(layer.values, length) for layer in rows])
        layers.append(_layer(keys, values, images))
    return _cache_of(layers)


def save_image_cache(cache: ImageCache, path: str | Path, model: XAttnForConditionalGeneration | XAttnModel) -> None:
    """Writes encoded images to a safetensors file.

    Args:
        cache ([`ImageCache`]): from `encode_images`.
        path (`str` or `Path`): the file.
        model: the model that encoded them; its fingerprint goes into the file.
    """
    layer = _filled(cache)
    tensors = {name: getattr(layer.images, name) for name in TENSORS}
    tensors = {f"images.{name}": tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    for index, layer in enumerate(cache.cross_attention_cache.layers):
        tensors[f"layers.{index}.keys"] = layer.keys.contiguous()
        tensors[f"layers.{index}.values"] = layer.values.contiguous()
    facts = {"num_images": layer.images.num_images, "digest_of": layer.images.digest_of}
    save_file(tensors, str(path), {"format": FORMAT, "fingerprint": fingerprint(model), "images": json.dumps(facts)})


def load_image_cache(path: str | Path, model: XAttnForConditionalGeneration | XAttnModel) -> ImageCache:
    """Reads encoded images, onto the device of the model.

    Raises:
        ValueError: where the file is no image cache, or was written with other weights.
    """
    try:
        with safe_open(str(path), framework="pt", device=str(model.device)) as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(
                    f"{path} is not an image cache: its format is {metadata.get('format')!r}, not {FORMAT!r}."
                )
            expected = fingerprint(model)
            if metadata["fingerprint"] != expected:
                raise ValueError(
                    f"{path} was written by another model, or by other weights of this one: its fingerprint is "
                    f"{metadata['fingerprint'][:12]}, this model's is {expected[:12]}. Encode the images again."
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except FileNotFoundError:
        raise
    except (OSError, ValueError):
        raise
    except Exception as error:  # safetensors' own error is no subclass of anything more telling
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
    facts = json.loads(metadata["images"])
    images = ImageTokens(**facts, **{name: tensors.get(f"images.{name}") for name in TENSORS})
    count = len(model.config.cross_attention_layers)
    layers = [_layer(tensors[f"layers.{i}.keys"], tensors[f"layers.{i}.values"], images) for i in range(count)]
    return _cache_of(layers)


def fingerprint(model: XAttnForConditionalGeneration | XAttnModel) -> str:
    """SHA-256 over all weights that images pass on their way to keys and values, their names and dtypes."""
    digest = hashlib.sha256()
    core = getattr(model, "model", model)
    core = core if hasattr(core, "text_model") else model
    parts = [(f"blocks.{block.layer_idx}.", block.attn) for block in core.blocks]
    parts += [(name, part) for name in ("vision_tower", "connector") if (part := getattr(core, name)) is not None]
    for prefix, part in parts:
        for name, tensor in sorted(part.state_dict().items()):
            if prefix.startswith("blocks.") and not name.startswith(("k_", "v_")):
                continue
            digest.update(f"{prefix}{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _filled(cache: ImageCache) -> CrossAttentionLayer:
    if encoded_images(getattr(cache, "cross_attention_cache", None)) is None:
        raise ValueError("The cache holds no images: make it with `encode_images`.")
    return cache.cross_attention_cache.layers[0]


def _layer(keys: torch.Tensor, values: torch.Tensor, images: ImageTokens) -> CrossAttentionLayer:
    layer = CrossAttentionLayer()
    layer.update(keys, values)
    layer.images = images
    return layer


def _cache_of(layers: list[CrossAttentionLayer]) -> ImageCache:
    cross = DynamicCache()
    cross.layers = layers
    return ImageCache(DynamicCache(), cross)


def _padded(states: torch.Tensor, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(states, (0, 0, 0, length - states.shape[2]))


def _combine_tokens(parts: list[ImageTokens], rows: list[int], length: int) -> ImageTokens:
    """Rows may differ in their images, so only what is the same for all stays known; padding is masked."""
    widest = max(parts, key=lambda part: part.num_tokens)
    if any(not torch.equal(part.image_of_token, widest.image_of_token[: part.num_tokens]) for part in parts):
        raise ValueError("`caches` hold images of different numbers of tokens: combine caches of equally large images.")
    device = widest.image_of_token.device
    token_masks: list[torch.Tensor] = []
    image_masks: list[torch.Tensor] = []
    for part, count in zip(parts, rows):
        for size, full, mask, masks in (
            (part.num_tokens, length, part.token_mask, token_masks),
            (part.num_images, widest.num_images, part.image_mask, image_masks),
        ):
            mask = torch.ones(count, size, dtype=torch.bool, device=device) if mask is None else mask
            masks.append(torch.nn.functional.pad(mask, (0, full - size)))
    uniform = all(part.num_tokens == length and part.token_mask is None for part in parts)
    return ImageTokens(
        num_images=widest.num_images,
        image_of_token=widest.image_of_token,
        token_mask=None if uniform else torch.cat(token_masks),
        image_mask=None if uniform else torch.cat(image_masks),
    )


__all__ = ["combine_images", "fingerprint", "load_image_cache", "save_image_cache", "select_images"]
