"""Prediction of an attention call's memory; and `max_batch`, the largest size that fits, found by running steps."""

from ._max_batch import MaxBatch, Trial, max_batch
from ._memory import (
    LARGEST_RUN,
    META,
    AttentionMemory,
    AttentionSize,
    KernelBytes,
    LiveBytes,
    allowed_by,
    attention_memory,
    nbytes,
)
