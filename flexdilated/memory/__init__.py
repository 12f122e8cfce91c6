"""What a call holds in memory, predicted."""

from ._memory import (
    LARGEST_RUN,
    AttentionMemory,
    AttentionSize,
    Hidden,
    LiveBytes,
    attention_memory,
    fake_tensors,
    nbytes,
)
