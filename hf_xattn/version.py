__version__ = "0.1.0"

# Said in place of a bare `pip install`, which would install whatever somebody else put on an index under this name.
HOW_TO_INSTALL = (
    "hf_xattn is on no package index: ask those who gave you the model for its source or its wheel. `pip install .` in "
    "the folder of the source installs it, or `pip install hf_xattn-*.whl` in the folder of the wheel."
)
