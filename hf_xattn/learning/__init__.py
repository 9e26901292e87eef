"""What a model does on its own while it trains: gradients, parts that stay frozen, several ranks.

What may come in: behaviour inside the model. What a user calls to train is in `training`.
Imports from: utils, cache, layers, images, decoders.
"""
