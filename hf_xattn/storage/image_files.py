"""Combines encoded images of several calls into one batch, and saves them to files.

Keys and values of another model, or of this model before further training, would be noise. They are refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.cache_utils import DynamicCache

from ..cache import image_cache
from ..cache.cross_cache import CrossCache
from ..cache.digests import Digests
from ..cache.image_cache import ImageCache, empty_like, images_of
from ..cache.image_layout import ImageLayout, rows_to
from ..cache.states import States, concatenate, map_states
from ..cache.xattn_cache import XAttnCache
from ..checkpoints.folders import name_of_dtype
from ..images.image_encoder import ModelWithBlocks
from ..utils.checkpoint_files import Stored, read_headers, short
from ..utils.distributed import is_split
from ..utils.whole_folder import whole_file
from .int8_states import INT8, Int8States


FORMAT = "hf_xattn image cache 4"
FORMATS = ("hf_xattn image cache 3", FORMAT)  # Files of format 3 only hold floats, and have no `cache_dtype`.
FLOATS = ("F64", "F32", "F16", "BF16")
KEYS_VALUES = ("keys", "key_scales", "values", "value_scales")  # Tensors of a layer. Only int8 has scales.
KINDS_OF_DIGESTS = ("pixel_values", "vision_features", "cross_attention_states")


def combine_images(caches: Sequence[XAttnCache]) -> ImageCache:
    """Combines image caches of several calls into one batch. Rows with fewer images are padded and masked.

    Args:
        caches (`list` of [`ImageCache`]): caches of the same model, weights and `cache_dtype`.

    Returns:
        [`ImageCache`]: the image rows of all caches, in order.

    Raises:
        TypeError: if `caches` is not a list of one cache or more.
        ValueError: if a cache holds no images, or if the caches come from different models, differ in `cache_dtype`, or
            hold images with different numbers of tokens.

    Example:

    ```python
    >>> import hf_xattn
    >>> import torch
    >>> from transformers import AutoModelForImageTextToText

    >>> model = AutoModelForImageTextToText.from_pretrained("seeing")
    >>> with torch.no_grad():
    ...     one = model.encode_images(pixel_values=torch.rand(1, 1, 3, 224, 224))
    ...     two = model.encode_images(pixel_values=torch.rand(1, 2, 3, 224, 224))  # two images in one row
    >>> both = hf_xattn.combine_images([one, two])  # a batch of two rows
    ```
    """
    if not isinstance(caches, Sequence) or not caches:
        raise TypeError(f"Expected `caches` to be a list of one image cache or more, got {caches!r:.60}.")
    parts = [images_of(f"caches[{index}]", cache) for index, cache in enumerate(caches)]
    makers = {cross.made_by for cross, _ in parts}
    for what, found in (
        ("model: (blocks, K/V heads, head width)", {(len(c.layers), *c.layers[0].keys.shape[1::2]) for c, _ in parts}),
        ("model and one state of its weights: identity", makers),
        ("`cache_dtype`", {cross.cache_dtype for cross, _ in parts}),
    ):
        if len(found) > 1:
            raise ValueError(f"Expected `caches` of one {what}, got {sorted(map(str, found))}.")
    layout = _combine_layouts([layout for _, layout in parts], [cross.rows for cross, _ in parts])
    length = max(cross.layers[0].keys.shape[2] for cross, _ in parts)
    keys_values = []
    for index in range(len(parts[0][0].layers)):
        pairs = [cross.layers[index].stored() for cross, _ in parts]
        key = concatenate([_padded(key, length) for key, _ in pairs], dim=0)
        value = concatenate([_padded(value, length) for _, value in pairs], dim=0)
        keys_values.append((key, value))
    combined = CrossCache()
    combined.fill(layout, keys_values, makers.pop())
    return ImageCache(empty_like(caches[0].self_attention_cache), combined)


def _check_model(model: ModelWithBlocks) -> None:
    heads, attn = model.config.cross_attention_config.num_key_value_heads, model.blocks[0].attn
    if attn.num_key_value_heads != heads or is_split(attn.k_proj.weight):
        raise ValueError(
            "Expected `model` to hold its whole weights, got one that is split over ranks (tensor parallelism, FSDP). "
            "A file holds all heads, and records to which weights it belongs. Save and load image caches with a model "
            "that is not split."
        )


def save_image_cache(cache: XAttnCache, path: str | Path, model: ModelWithBlocks) -> None:
    """Writes encoded images to a safetensors file. The file is written completely or not at all.

    Args:
        cache ([`ImageCache`]): encoded images, from `encode_images`.
        path (`str` or `Path`): the file.
        model: the model that encoded the images. Its identity is saved in the file.

    Raises:
        TypeError: if an argument is not a cache, a path or a model of this package.
        ValueError: if the cache holds no images, if another model or other weights encoded them, or if they were
            encoded in a conversation.
        OSError: if the file cannot be written, for example because its folder does not exist or the disk is full. A
            file that was at `path` before then stays as it was.

    Example:

    ```python
    >>> import hf_xattn
    >>> import torch
    >>> from transformers import AutoModelForImageTextToText

    >>> model = AutoModelForImageTextToText.from_pretrained("seeing")
    >>> with torch.no_grad():
    ...     images = model.encode_images(pixel_values=torch.rand(2, 3, 224, 224))  # two images, one a row
    >>> hf_xattn.save_image_cache(images, "images.safetensors", model)
    >>> images = hf_xattn.load_image_cache("images.safetensors", model)
    ```
    """
    cross, layout = images_of("cache", cache)
    _check_model(model)
    identity = model.image_identity()
    if cross.made_by != identity:
        raise ValueError(
            "Expected `cache` to come from `encode_images` of `model`. But another model or other weights encoded it, "
            "or `forward` or `generate` did, which do not record the weights. Encode the images with `encode_images`."
        )
    digests = layout.digests or ()
    kinds = [{"of": part.of, "dtype": name_of_dtype(part.dtype), "sizes": part.sizes} for part in digests]
    facts = {
        "sizes": layout.sizes,
        "cache_dtype": cross.cache_dtype,
        "dtype": name_of_dtype(cross.layers[0].dtype),
        "digests": kinds or None,
    }
    tensors = {"images.token_mask": layout.token_mask, "images.image_mask": layout.image_mask}
    for index, part in enumerate(digests):
        tensors |= {f"digests.{index}.{name}": getattr(part, name) for name in ("values", "real")}
    for index, layer in enumerate(cross.layers):
        tensors |= {f"layers.{index}.{name}": getattr(layer, name) for name in KEYS_VALUES}
    contiguous = {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
        if tensor is not None
    }
    with whole_file(path) as file:
        save_file(contiguous, str(file), {"format": FORMAT, "identity": identity, "images": json.dumps(facts)})


def load_image_cache(path: str | Path, model: ModelWithBlocks) -> ImageCache:
    """Loads encoded images from a file, to the devices of the blocks. Images that were saved in int8 stay in int8.

    This function reads all weights that turn pixels into keys and values, and compares them with the weights that
    encoded the images. `checkpoints/model_identity.py` says how long this takes.

    Args:
        path (`str` or `Path`): a file of [`save_image_cache`].
        model: the model that encoded the images.

    Returns:
        [`ImageCache`]: the encoded images, without text.

    Raises:
        TypeError: if an argument is not a path or a model of this package.
        FileNotFoundError: if there is no such file.
        ValueError: if the file is not an image cache, is damaged, or was written with other weights.

    Example:

    ```python
    >>> import hf_xattn
    >>> import torch
    >>> from transformers import AutoModelForImageTextToText

    >>> model = AutoModelForImageTextToText.from_pretrained("seeing")
    >>> with torch.no_grad():
    ...     images = model.encode_images(pixel_values=torch.rand(2, 3, 224, 224))  # two images, one a row
    >>> hf_xattn.save_image_cache(images, "images.safetensors", model)
    >>> loaded = hf_xattn.load_image_cache("images.safetensors", model)
    >>> loaded.nbytes == images.nbytes
    True
    ```
    """
    _check_model(model)
    if not Path(path).is_file():
        raise FileNotFoundError(f"Expected `path` to be a file, got {path}, which does not exist.")
    headers = read_headers([Path(path)], {}, where=str(Path(path).parent))  # raises an error for a damaged file
    with safe_open(str(path), framework="pt") as file:
        metadata, identity = file.metadata() or {}, model.image_identity()
        if metadata.get("format") not in FORMATS:
            raise ValueError(
                f"{path} is not an image cache: its format is {metadata.get('format')!r}, not one of {FORMATS}."
            )
        if metadata.get("identity") != identity:
            raise ValueError(
                f"{path} was written by another model, or by other weights of this one: its identity is "
                f"{str(metadata.get('identity'))[:12]}, this model's is {identity[:12]}. Encode the images again."
            )
        try:
            cross = _cross_of_file(file, headers, json.loads(metadata["images"]), model, identity)
        except KeyError as error:
            raise ValueError(f"{path} is damaged: it has no {error.args[0]}.") from error
        except (TypeError, ValueError, AttributeError, OverflowError, RecursionError, SafetensorError) as error:
            raise ValueError(f"{path} is damaged: {error}.") from error
    return ImageCache(DynamicCache(config=model.config.get_text_config(decoder=True)), cross)


def _cross_of_file(
    file: Any, headers: dict[str, Stored], facts: dict[str, Any], model: ModelWithBlocks, identity: str
) -> CrossCache:
    """Checks and converts the content of a file. Shape and dtype of a tensor are checked before it is read."""
    block, sizes, unread = model.config.cross_attention_config, _sizes(facts["sizes"]), dict(headers)
    dtype = None
    if facts.get("cache_dtype") is not None:
        if facts["cache_dtype"] != INT8:
            raise ValueError(f'expected `cache_dtype` to be "{INT8}", got {short(facts["cache_dtype"])}')
        dtype = _dtype_of(facts)
    rows = (*headers["layers.0.keys"].shape, 0)[0]

    def read(name: str, *shape: int, codes: tuple[str, ...] = ("BOOL",)) -> torch.Tensor:
        stored = unread.pop(name)
        found = (*stored.shape, 0)[0]
        of_text = name.startswith("images.") and rows and found % rows == 0  # A mask may have one row per text row.
        expected = (found if of_text else rows, *shape)
        if tuple(stored.shape) != expected or 0 in expected or stored.dtype not in codes:
            raise ValueError(f"expected {name} of shape {expected}, got {stored.shape} of {stored.dtype}")
        return file.get_tensor(name)

    keys_values: list[tuple[States, States]] = []
    for index, layer in enumerate(model.blocks):
        device, codes = device_of(layer.attn.k_proj), FLOATS if dtype is None else ("I8",)
        pair: list[States] = []
        for name in (f"layers.{index}.key", f"layers.{index}.value"):
            shape = (block.num_key_value_heads, sum(sizes) + block.quiet_softmax)
            states = read(f"{name}s", *shape, block.head_dim, codes=codes).to(device)
            codes = (headers[f"{name}s"].dtype,)  # The values must have the dtype of the keys.
            if dtype is None:
                pair.append(states)
            else:
                scales = read(f"{name}_scales", *shape, 1, codes=("F32",)).to(device)
                pair.append(Int8States(states, scales, dtype))
        keys_values.append((pair[0], pair[1]))
    device = keys_values[0][0].device
    masks = {
        name: read(f"images.{name}", width).to(device)
        for name, width in (("token_mask", sum(sizes)), ("image_mask", len(sizes)))
        if f"images.{name}" in headers
    }
    digests = []
    for index, part in enumerate(facts["digests"] or ()):
        name, widths = f"digests.{index}", _sizes(part["sizes"])
        if part["of"] not in KINDS_OF_DIGESTS:
            raise ValueError(f"expected digests of images, got {short(part)}")
        values = read(f"{name}.values", sum(widths), codes=("I64",)).to(device)
        real = read(f"{name}.real", sum(widths)).to(device) if f"{name}.real" in headers else None
        digests.append(Digests(part["of"], _dtype_of(part), values, real, widths))
    if unread:
        raise ValueError(f"it holds {short(min(unread))}, which an image cache of this model does not have")
    cross = CrossCache()
    cross.fill(ImageLayout.of(sizes, device, **masks, digests=tuple(digests) or None), keys_values, identity)
    return cross


def _dtype_of(facts: dict[str, Any]) -> torch.dtype:
    dtype = getattr(torch, facts["dtype"])
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"expected `dtype` to be a dtype of floats, got {short(facts['dtype'])}")
    return dtype


def _sizes(sizes: Any) -> tuple[int, ...]:
    """Checks the numbers of tokens of the images."""
    if not isinstance(sizes, list) or not sizes or not all(type(size) is int and 0 < size < 2**31 for size in sizes):
        raise ValueError(f"expected `sizes` to be the number of tokens of each image, got {short(sizes)}")
    return tuple(sizes)


def device_of(module: torch.nn.Module) -> torch.device:
    """Returns the device on which a layer computes, even if accelerate has offloaded its weights."""
    weight = next(module.parameters())
    if not weight.is_meta:
        return weight.device
    # The layer inside an adapter has the hook, and the adapter around it has none.
    hooks: list[Any] = [getattr(inner, "_hf_hook", None) for inner in module.modules()]
    devices = [getattr(hook, "execution_device", None) for hook in hooks]
    return torch.device(next(device for device in devices if device is not None))


def _padded(states: States, length: int) -> States:
    return map_states(states, lambda part: torch.nn.functional.pad(part, (0, 0, 0, length - part.shape[2])))


def _combine_layouts(parts: list[ImageLayout], rows: list[int]) -> ImageLayout:
    """Builds one layout for the rows of all parts. Padding is masked."""
    widest = max(parts, key=lambda part: part.num_tokens)
    if any(part.sizes != widest.sizes[: part.num_images] for part in parts):
        raise ValueError("Expected `caches` with equally large images, got images with different numbers of tokens.")
    device = widest.image_of_token.device
    token_masks: list[torch.Tensor] = []
    image_masks: list[torch.Tensor] = []
    for part, count in zip(parts, rows):
        for size, full, mask, masks in (
            (part.num_tokens, widest.num_tokens, part.token_mask, token_masks),
            (part.num_images, widest.num_images, part.image_mask, image_masks),
        ):
            mask = torch.ones(count, size, dtype=torch.bool, device=device) if mask is None else rows_to(mask, count)
            masks.append(torch.nn.functional.pad(mask, (0, full - size)))
    uniform = all(part.num_tokens == widest.num_tokens and part.token_mask is None for part in parts)
    return ImageLayout(
        sizes=widest.sizes,
        image_of_token=widest.image_of_token,
        token_mask=None if uniform else torch.cat(token_masks),
        image_mask=None if uniform else torch.cat(image_masks),
        digests=_combine_digests([part.digests for part in parts]),
    )


def _combine_digests(parts: list[tuple[Digests, ...] | None]) -> tuple[Digests, ...] | None:
    """Combines the digests of all rows. None means unknown content: the digests are not all of the same kind."""
    found = [part[0] for part in parts if part is not None and len(part) == 1]
    if len(found) < len(parts) or len({(part.of, part.dtype) for part in found}) > 1:
        return None
    widest = max(found, key=lambda part: part.values.shape[1])
    width = widest.values.shape[1]
    values = [torch.nn.functional.pad(part.values, (0, width - part.values.shape[1])) for part in found]
    real = [torch.nn.functional.pad(part.real_or_all(), (0, width - part.values.shape[1])) for part in found]
    return (Digests(widest.of, widest.dtype, torch.cat(values), torch.cat(real), widest.sizes),)


__all__ = ["combine_images", "load_image_cache", "save_image_cache"]

# Scripts that were written for earlier versions import these functions from `cache/image_cache.py`.
vars(image_cache).update({name: globals()[name] for name in __all__})
