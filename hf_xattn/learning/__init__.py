"""What the model itself needs while it trains: frozen parts, recomputed layers, sharding, ranks whose images differ.

What a training run does with a finished model is in `training`. Imports from: utils, cache, layers, images, decoders.
"""
