"""A pattern as one interactive HTML page."""

from ._page import page

__all__ = ["page"]
