"""What a call holds in memory, predicted; and what fits, found by steps that are run."""

from ._max_batch import MaxBatch, Trial, max_batch
from ._memory import (
    LARGEST_RUN,
    NOWHERE,
    AttentionMemory,
    AttentionSize,
    Hidden,
    LiveBytes,
    attention_memory,
    nbytes,
)
