__version__ = "0.1.0"

# A bare `pip install` of this name would install whatever somebody else put on an index: cards, stubs and the README
# say this instead.
HOW_TO_INSTALL = (
    "hf_xattn is on no package index: ask those who gave you the model for its source or its wheel. `pip install .` in "
    "the folder of the source installs it, or `pip install hf_xattn-*.whl` in the folder of the wheel."
)
