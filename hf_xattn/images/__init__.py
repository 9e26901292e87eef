"""Pixels to image tokens: arguments of a call, the vision tower, the connector, and the store of images that were
encoded before.

What may come in: what happens to an image before a block sees it.
Imports from: utils, cache, layers.
"""
