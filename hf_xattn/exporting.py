"""Reading exported programs back.

`torch.export` takes a forward as it is, and transformers' exporters take the model apart for `generate`:

    exported = DynamoExporter().export_for_generation(model, {"input_ids": ids, "pixel_values": pixels}, DynamoConfig(dynamic=True))
    step = exported.runners["decode"](input_ids=ids, position_ids=positions, past_key_values=cache)

`cache` is what a forward or `generate` returns, or `image_cache.fork(DynamicCache(config=model.config.text_config))`. Its images must have
the sizes that those of the export had. `step.past_key_values` goes on to the next call. It has lost what no graph reads: where markers or
masks decide what text sees, its text cannot be cropped, and nothing tells any more which weights made its images.
"""

from __future__ import annotations

from .cross_cache import CrossCache
from .image_cache import ImageCache
from .xattn_cache import XAttnCache


def register_caches() -> None:
    """Makes this package's caches inputs and outputs of exported programs.

    transformers' exporters do that while they export. Call it in a process that only loads a program, and before `torch.export.export` of
    a forward that takes or returns a cache.

    Raises:
        ImportError: where transformers' exporters are missing.
    """
    from transformers.exporters.exporter_dynamo import register_pytree_node

    for cache_class in (XAttnCache, ImageCache, CrossCache):
        register_pytree_node(cache_class)


__all__ = ["register_caches"]
