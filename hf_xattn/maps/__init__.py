"""Where the model looks: attention maps, their plots, and the words of an answer.

What may come in: what explains a trained model.
Imports from: all rooms above, and the model.
"""
