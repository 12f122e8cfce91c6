"""The command line: `python -m flexdilated COMMAND`."""

from ._main import main

__all__ = ["main"]
