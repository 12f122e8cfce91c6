"""Named recipes: published methods of data-dependent attention, with their defaults.

Methods that only choose blocks are functions that return a `BlockSelector`. Methods that compute more than attention
over chosen blocks are modules: `NativeSparseAttention` and `CoarseToFineAttention`.
"""

from ._modules import CoarseToFineAttention, NativeSparseAttention
from ._selectors import SeerGate, moba, quest, seer_attention, seer_attention_r, xattention

__all__ = [
    "CoarseToFineAttention",
    "NativeSparseAttention",
    "SeerGate",
    "moba",
    "quest",
    "seer_attention",
    "seer_attention_r",
    "xattention",
]
