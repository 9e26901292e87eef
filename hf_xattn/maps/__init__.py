"""Where the model looks: attention maps, their plots, the words of an answer, and a check that images matter.

What may come in: what explains a trained model.
Imports from: all rooms above, and the model.
"""
