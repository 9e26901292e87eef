"""Converts checkpoints of other vision-language models with cross-attention to this package, and its models to
Mllama's format.
"""

from .checkpoints import convert_checkpoint, import_checkpoint
from .mllama import export_checkpoint


__all__ = ["convert_checkpoint", "export_checkpoint", "import_checkpoint"]
