"""What the model itself needs while it trains: its loss, gradients, frozen parts, ranks whose images differ.

`modeling_xattn` and `checkpoints` import this room; nobody else needs to call it. What a training run does with a
finished model (data, freezing, groups for an optimizer, checkpoints) is in `training`, which imports the model.
Imports from: utils, cache, layers, images, decoders.
"""
