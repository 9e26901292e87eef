"""What the model itself needs while it trains: its loss, gradients, frozen parts, ranks whose images differ.

`modeling_xattn` and `checkpoints` import this room. What a training run does with a finished model is in `training`.
Imports from: utils, cache, layers, images, decoders.
"""
