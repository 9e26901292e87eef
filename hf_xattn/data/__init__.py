"""Rows to train on and to ask about: the files and data sets that they come from, their forms, and their order.

What belongs here: kinds of files, forms of examples, and orders of rows. What is done with a row is in `training`.
Imports from: all subpackages above, and the processor.
"""
