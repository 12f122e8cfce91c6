"""Models of transformers: attention and masks as patterns, for models that use its registry of attention functions."""

from ._attention import register, set_pattern
from ._cache import FlexdilatedCache
from ._layers import attention_layers

__all__ = ["FlexdilatedCache", "attention_layers", "register", "set_pattern"]
