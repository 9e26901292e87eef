"""What a training run does with a model: freezing, groups for an optimizer, the collator, features, `hf-xattn train`.

What may come in: data and choices around a model, never inside it. That is in `learning`.
Imports from: all rooms above, and the model.
"""
