"""The command line, `hf-xattn COMMAND`. Each command has one file, which registers the command's parser and runs it.

torch, transformers and the rest of this package are imported when a command runs: `--help` and wrong options answer at
once.
"""
