"""A pattern as one interactive HTML page."""

from ._page import page
from ._ranks import Ranks

__all__ = ["Ranks", "page"]
