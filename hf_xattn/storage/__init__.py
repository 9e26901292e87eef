"""Encoded images that outlive a call: an extra, which stores them by their content, in files and in int8.

The core (`images_xattn.py`) works without it, and asks it for images by `XAttnImagesMixin.find_source`.
"""
