"""What a block computes: attention, the gated block, norms, masks, position bias, and the context that one call passes
to all blocks.

What may come in: tensors in, tensors out. A layer knows no decoder and no file.
Imports from: utils, cache.
"""
