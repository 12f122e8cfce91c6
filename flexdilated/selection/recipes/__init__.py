"""Named recipes: methods of data-dependent attention, most of them published.

Methods that only choose blocks are functions that return a `BlockSelector`. `LightningIndexer` is a module that chooses
single keys. Methods that compute more than attention over chosen blocks are modules, too: `NativeSparseAttention`,
`CoarseToFineAttention` and `VideoSparseAttention`.
"""

from ._cubes import VideoSparseAttention
from ._indexer import LightningIndexer
from ._modules import CoarseToFineAttention, NativeSparseAttention
from ._selectors import SeerGate, moba, quest, seer_attention, seer_attention_r, xattention

__all__ = [
    "CoarseToFineAttention",
    "LightningIndexer",
    "NativeSparseAttention",
    "SeerGate",
    "VideoSparseAttention",
    "moba",
    "quest",
    "seer_attention",
    "seer_attention_r",
    "xattention",
]
