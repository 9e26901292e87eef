"""The command line, `hf-xattn COMMAND`: one file a command, which registers its parser and runs it.

What is not of the standard library is imported where a command runs: `--help` and a wrong option need none of it.
"""
