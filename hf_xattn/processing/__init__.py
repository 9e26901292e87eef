"""Chat messages to token ids and pixels: chat templates, reading of images and its limits.

What may come in: what prepares inputs and needs no weights. `processing_xattn.py` is the processor.
Imports from: utils, checkpoints.
"""
