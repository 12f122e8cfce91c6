"""Checkpoints: all that a run needs to go on as if it had not stopped."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from ._out import replace
from ._torch_file import read_torch
from ._usage import UsageError

FILE_NAME = "checkpoint.pt"


def save(folder: Path, state: dict[str, Any]) -> None:
    """Write the state, plain data and tensors, in place of an earlier one."""
    buffer = BytesIO()  # where the disk is full, torch.save on a file raises what does not say so
    torch.save(state, buffer)
    replace(folder / FILE_NAME, lambda path: path.write_bytes(buffer.getbuffer()))


def load(folder: Path, *, identity: dict[str, Any]) -> dict[str, Any]:
    """The state last saved, on the CPU. Nothing but data is unpickled.

    Raises UsageError where there is none, where it cannot be read, and where its `identity`, the settings
    that must not change within a run, is another.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        raise UsageError(f"--resume needs a checkpoint, written by an earlier run; there is none at {path}")
    try:
        state = read_torch(path)
        found = dict(state["identity"])
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise UsageError(
            f"--resume needs a checkpoint of this command; {path} is none ({type(error).__name__})"
        ) from None
    differing = [name for name in identity if found.get(name) != identity[name]]
    if differing:
        changes = ", ".join(_change(name, found.get(name), identity[name]) for name in differing)
        raise UsageError(f"--resume needs the settings that the run began with: {changes}")
    return state


def _change(name: str, was: object, now: object) -> str:
    return f"{name} was {was}, is {now}" if isinstance(now, int) else f"another {name}"
