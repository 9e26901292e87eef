"""Adapts to any decoder of transformers: inspects it, inserts blocks into its layers, checks its text arguments, and
computes its loss.

What belongs here: what depends on the text model, and not on an image.
Imports from: utils, cache, layers, images.
"""
