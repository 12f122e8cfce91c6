"""Hypothesis strategies for attention: patterns, lengths at the edges, sizes, tensors, packings, shards.

Values shrink towards simple ones: a causal pattern, one token, one head. Arguments `max_...` are upper bounds.
Needs hypothesis: pip install "flexdilated[testing]".
"""

try:
    import hypothesis as _hypothesis
except ImportError as error:
    raise ImportError(
        'flexdilated.testing.strategies needs hypothesis, which is not installed: pip install "flexdilated[testing]"'
    ) from error

from ._drawn_inputs import (
    AttentionSizes,
    attention_inputs,
    attention_sizes,
    document_ids,
    document_lengths,
    lengths,
    shardings,
    tensors,
)
from ._drawn_patterns import longnets, mixtures, neighborhoods, patterns, set_patterns
from ._drawn_run_time import run_time_patterns
from ._inputs import edges_of

__all__ = [
    "AttentionSizes",
    "attention_inputs",
    "attention_sizes",
    "document_ids",
    "document_lengths",
    "edges_of",
    "lengths",
    "longnets",
    "mixtures",
    "neighborhoods",
    "patterns",
    "run_time_patterns",
    "set_patterns",
    "shardings",
    "tensors",
]
del _hypothesis
