"""Registers this package's caches as inputs and outputs of exported programs.

`torch.export` exports one call of `forward`. transformers' exporters export the parts of the model that `generate`
needs:

    config = DynamoConfig(dynamic=True)
    exported = DynamoExporter().export_for_generation(model, {"input_ids": ids, "pixel_values": pixels}, config)
    step = exported.runners["decode"](input_ids=ids, position_ids=positions, cache=cache)

`cache` is the cache that `forward` or `generate` returns, or
`image_cache.fork(DynamicCache(config=model.config.text_config))`. Its images must have the sizes of the images of the
exported example. Pass `step.cache` to the next call.

A cache that a program returns has lost the values that no graph reads. Its text cannot be cropped if markers or masks
decide what the text sees, and it does not know which weights encoded its images. A program uses the names of the
transformers version that exported it: before 5.24, `cache` is called `past_key_values`.
"""

from __future__ import annotations

from .cross_cache import CrossCache
from .image_cache import ImageCache
from .xattn_cache import XAttnCache


def register_caches() -> None:
    """Registers this package's caches as inputs and outputs of exported programs.

    transformers' exporters do this themselves. Call this function in a process that only loads a program, and before
    `torch.export.export` of a forward that takes or returns a cache.

    Raises:
        ImportError: if this version of transformers has no exporters.
    """
    from transformers.exporters.exporter_dynamo import register_pytree_node

    for cache_class in (XAttnCache, ImageCache, CrossCache):
        register_pytree_node(cache_class)


__all__ = ["register_caches"]
