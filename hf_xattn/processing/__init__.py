"""Turns chat messages into token ids and pixels: chat templates, the reading of images, and its limits.

This subpackage prepares inputs and needs no weights. `processing_xattn.py` is the processor that uses it. It imports
from: utils, checkpoints.
"""
