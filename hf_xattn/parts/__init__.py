"""Extras that are parts of a model, and that a field of its configuration chooses.

These parts register themselves when they are imported (see `utils/parts.py`): the connector `"perceiver"`, which makes
fewer image tokens; the connector `"mlp_2d"`, which adds a position encoding of the place in the image; T5's relative
position bias; and vision towers that read tiles. This subpackage also has packed rows, the tokens after the text
model's vocabulary, and the checks which models can be vision towers and what features these return.
"""
