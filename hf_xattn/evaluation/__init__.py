"""Measures what a model has learned: asks it the questions of a data set, with and without their images.

What may come in: questions, ways to ask them, and how answers are compared and counted. Training is in `training`.
Imports from: the rooms above, and the model.
"""
