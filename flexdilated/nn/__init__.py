"""Modules: attention by a pattern, dilated attention, a drop-in for `nn.MultiheadAttention`, and the LongNet model."""

from ._attention import BlockSparseAttention, DilatedAttention, HeadParallelDilatedAttention, RingDilatedAttention
from ._backbone import LongNetBackbone
from ._call_masks import require_causal_mask, without_padding
from ._longnet import LongNet, LongNetClassifier, LongNetEncoderDecoder
from ._longnet_block import skip_entries
from ._longnet_config import LongNetConfig, SelectedLayers
from ._model_memory import ModelMemory, ModelSize, attention_size, model_memory
from ._multihead import MultiheadDilatedAttention, MultiheadProjections, refuse_weights

__all__ = [
    "BlockSparseAttention",
    "DilatedAttention",
    "HeadParallelDilatedAttention",
    "LongNet",
    "LongNetBackbone",
    "LongNetClassifier",
    "LongNetConfig",
    "LongNetEncoderDecoder",
    "MultiheadDilatedAttention",
    "RingDilatedAttention",
    "SelectedLayers",
]
