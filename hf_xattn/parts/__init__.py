"""Parts of a model that a name or a field of its configuration chooses, beside those of the core, and packed rows:
extras.

Each registers itself when it is imported (`utils/parts.py`): the connectors `"perceiver"`, which gives fewer image
tokens and may read the place of each image in its row, and `"mlp_2d"`, which adds a code of places in the picture; T5's
relative position bias; and towers that read tiles. Beside them stand tokens behind the decoder's vocabulary, and what
tells which models can be vision towers, and what these give.
"""
