"""What a block computes: the attention, the gated block, gates, norms, masks, position parts, and the context that one
call passes to all blocks.

What belongs here: code that computes tensors from tensors. A layer knows no decoder and reads no file.
Imports from: utils, cache.
"""
