"""Where rows to train on and to ask about come from: files and data sets in several forms, and the order of reading.

What may come in: kinds of files, forms of examples, orders of rows. What becomes of a row is in `training`.
Imports from: all rooms above, and the processor.
"""
