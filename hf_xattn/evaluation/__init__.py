"""Measures what a model has learned: asks it the questions of a data set, with and without their images.

What belongs here: questions, ways to ask them, and how answers are compared and counted. Training is in `training`.
Imports from: the subpackages above, and the model.
"""
