"""Any text decoder of transformers: what is learned by looking at it, where blocks go, its vocabulary, packed rows,
checkpointing.

What may come in: what depends on the base, and on no image.
Imports from: utils, cache, layers, images.
"""
