"""Exact, fast sparse attention over long sequences, on PyTorch's FlexAttention."""

from . import masks
from ._attend import attend
from ._kv_cache import KVCache
from .nn import DilatedAttention, LongNet, LongNetConfig, MultiheadDilatedAttention

__all__ = [
    "DilatedAttention",
    "KVCache",
    "LongNet",
    "LongNetConfig",
    "MultiheadDilatedAttention",
    "attend",
    "masks",
]
__version__ = "0.1.0"
