"""The plug-in for vLLM, an engine that answers many requests at once. vLLM finds it by the entry point of the package.

This subpackage holds the code that vLLM calls, and that makes vLLM give the tokens of `generate`. No other subpackage
imports vLLM, and this one only does when vLLM runs. It imports from: all subpackages before it, except the commands.
"""
