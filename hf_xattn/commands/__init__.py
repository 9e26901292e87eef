"""The command line, `hf-xattn COMMAND`. Each command has two functions: one registers its parser, one runs it.

torch, transformers and the rest of this package are imported when a command runs: `--help` and wrong options answer at
once.
"""
