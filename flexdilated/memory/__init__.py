"""What a call holds in memory, predicted."""

from ._live_bytes import Hidden, LiveBytes, fake_tensors, nbytes
from ._memory import LARGEST_RUN, AttentionMemory, AttentionSize, attention_memory
