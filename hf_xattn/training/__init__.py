"""What a user calls to train: freezing and its schedule, parameter groups, the collator, rows of data, features encoded once, a run.

What may come in: data and choices around a model, never inside it.
Imports from: all rooms above, and the model.
"""
