"""Files that commands write: the output folder is tried before any work, and files are replaced in one piece."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile

from ._usage import UsageError


def prepare(folder: Path) -> None:
    """Make the folder, and raise UsageError where no file can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        raise UsageError(f"--out must be a folder that can be written; {_said(folder, error)}") from None


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, then move it there: readers see a whole file, old or new.

    What a link names is replaced, not the link; what is no file, such as a pipe, is written to. Raises UsageError where
    that cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            write(path)
        else:
            _move_in(Path(os.path.realpath(path)), path.suffix, write)
    except (OSError, ValueError) as error:
        raise UsageError(f"the file must be one that can be written; {_said(path, error)}") from None


def _said(path: Path, error: OSError | ValueError) -> str:
    """A path and what is wrong with it; one that holds a NUL is a ValueError."""
    return f"{path}: {error.strerror}" if isinstance(error, OSError) else f"{str(path)!r}: {error}"


def _move_in(path: Path, suffix: str, write: Callable[[Path], object]) -> None:
    """The suffix is that of the file to fill: it may say in which format."""
    partial = path.with_name(f".{path.stem}.partial{suffix}")
    try:
        write(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
