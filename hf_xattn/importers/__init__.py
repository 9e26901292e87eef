"""Checkpoints of other vision-language models with cross-attention, as models of this package, and back."""

from .checkpoints import convert_checkpoint, export_checkpoint, import_checkpoint


__all__ = ["convert_checkpoint", "export_checkpoint", "import_checkpoint"]
