"""Models with blocks on vLLM, an engine for many requests at once. vLLM finds this room by its entry point.

What may come in: what vLLM calls, and what it needs to give the tokens that `generate` gives. Only this room imports
vLLM, and only when vLLM runs.
Imports from: all rooms above but the commands.
"""
