"""Modules: attention by a pattern, dilated attention, a drop-in for `nn.MultiheadAttention`, and the LongNet model."""

from ._block_sparse import BlockSparseAttention
from ._dilated_attention import DilatedAttention
from ._dilated_over_ranks import HeadParallelDilatedAttention, RingDilatedAttention
from ._longnet import LongNet
from ._longnet_config import LongNetConfig
from ._multihead import MultiheadDilatedAttention

__all__ = [
    "BlockSparseAttention",
    "DilatedAttention",
    "HeadParallelDilatedAttention",
    "LongNet",
    "LongNetConfig",
    "MultiheadDilatedAttention",
    "RingDilatedAttention",
]
