"""Files of torch.save: plain data and tensors, read so that damage is one kind of error."""

from __future__ import annotations

import struct
import warnings
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

# What torch.load meets in bytes that are no such file: it says so in as many ways as its readers have.
_DAMAGE = (
    *(ArithmeticError, AssertionError, AttributeError, BufferError, EOFError, ImportError, LookupError, MemoryError),
    *(RuntimeError, TypeError, UnpicklingError, ValueError, struct.error),
)


def read_torch(path: Path) -> Any:
    """What the file holds, on the CPU; nothing but data is unpickled.

    Raises OSError where it cannot be read, and ValueError where torch.load does not read it.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # of an old format, which is read or is damage
            return torch.load(path, map_location="cpu", weights_only=True)
    except _DAMAGE as error:
        raise ValueError(f"torch.load does not read it ({type(error).__name__})") from None
