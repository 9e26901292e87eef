"""Loading and saving: whole models, small checkpoints, quantized, GGUF and PEFT bases, the model card.

What belongs here: what reads or writes the files of a model.
Imports from: utils, cache, layers, images, decoders, learning.
"""
