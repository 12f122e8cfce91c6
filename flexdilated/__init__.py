"""Exact, fast sparse attention over long sequences, on PyTorch's FlexAttention."""

from . import masks
from ._attend import attend

__all__ = ["attend", "masks"]
__version__ = "0.1.0"
