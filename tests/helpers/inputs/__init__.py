"""Tensors, rows, pictures and files that tests give, good ones and bad ones."""
