"""Helpers without a model: checks of arguments, reading and writing of files, what is used of transformers' private
API, sizes of published configurations.

What may come in: a helper that several rooms need and that knows no module of this package's models.
Imports from: none.
"""
