"""Several samples in one text row: an extra, which finds them and tells which images belong to which sample.

The core asks it by `XAttnImagesMixin.find_samples`, and works with what it gets as `Samples` (`cache/visibility.py`).
"""
