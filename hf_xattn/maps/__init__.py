"""Attention maps: where a trained model looks in an image, with plots, and with the words of an answer.

This subpackage imports from: all subpackages before it, and the model.
"""
