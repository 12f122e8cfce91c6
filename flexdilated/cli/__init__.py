"""The command line: `flexdilated COMMAND`, or `python -m flexdilated COMMAND`."""

from ._main import main

__all__ = ["main"]
