"""The command line of this library: `flexdilated COMMAND`, or `python -m flexdilated COMMAND`."""

from ._main import main

__all__ = ["main"]
