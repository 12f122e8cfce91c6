"""Replace the attention of existing modules of torch, timm, x-transformers and diffusers in place, and restore it.

One file per library, `_torch`, `_timm`, `_x_transformers` and `_diffusers`, defines which of its modules are supported
and how, with a reason for unsupported ones. Only `_torch` imports its library: a model of another library exists only
where that library is imported already.
"""

from ._convert import convert
from ._rule import Replaced, Report, Unconverted

__all__ = ["Replaced", "Report", "Unconverted", "convert"]
