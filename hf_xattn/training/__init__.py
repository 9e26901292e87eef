"""Training a finished model: freezing, groups for an optimizer, the collator, stored features, `hf-xattn train`.

What belongs here: code that prepares data for a model, or that decides what of the model trains and how. Code that the
model itself needs while it trains belongs to `learning`.
Imports from: all subpackages above, and the model.
"""
