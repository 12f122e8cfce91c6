"""Models of torch, timm, x-transformers, diffusers: replace the attention of existing modules in place, and restore it.

One file per library, `_torch`, `_timm`, `_x_transformers` and `_diffusers`, defines which of its modules are supported
and how, with a reason for unsupported ones. These files do not import their library: if a model of it exists, it is
imported already.
"""

from ._convert import convert
from ._rule import Replaced, Report, Unconverted

__all__ = ["Replaced", "Report", "Unconverted", "convert"]
