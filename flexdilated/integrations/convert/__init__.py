"""Models of torch, timm and x-transformers: the attention of existing modules replaced in place, and given back.

One file a library, `_torch`, `_timm` and `_x_transformers`, says which of its modules are served and how, and why
others are not. None imports its library: a model of it has done so.
"""

from ._convert import convert
from ._found import Left, Replaced, Report

__all__ = ["Left", "Replaced", "Report", "convert"]
