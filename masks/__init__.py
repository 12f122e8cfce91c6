"""Attention patterns: values that say who attends to whom, their algebra, layouts and block masks."""

from ._bound import Bound
from ._causal import causal
from ._dilated import dilated
from ._json import from_json, to_json
from ._layout import Layout
from ._local_window import local_window
from ._longnet import longnet
from ._pattern import Mixture, Pattern
from ._per_head import per_head

__all__ = ["Bound", "Layout", "Mixture", "Pattern", "causal", "dilated", "from_json", "local_window", "longnet", "per_head", "to_json"]
