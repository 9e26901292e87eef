"""Turns pixels into image tokens: the image arguments of a call, the vision tower, the connector, and the comparison of
images with those of a cache.

What belongs here: what happens to an image before a block reads it.
Imports from: utils, cache, layers.
"""
