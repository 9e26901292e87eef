"""What the model itself needs while it trains: its loss, frozen parts, sharding, ranks whose images differ.

What a training run does with a finished model is in `training`. Imports from: utils, cache, layers, images, decoders.
"""
