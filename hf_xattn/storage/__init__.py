"""Storage of encoded images beyond one call: by their content in memory, in files, and in int8.

This subpackage is optional. The core (`images_xattn.py`) works without it, and asks it for stored images through
`XAttnImagesMixin.find_source`.
"""
