"""The output folder: made and tried before any work, its files replaced in one piece."""

from __future__ import annotations

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
    except OSError as error:
        raise UsageError(f"--out must be a folder that can be written; {folder}: {error.strerror}") from None


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, then move it there: readers see a whole file, old or new.

    Raises UsageError where that cannot be written.
    """
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        write(partial)
        partial.replace(path)
    except OSError as error:
        raise UsageError(f"the file must be one that can be written; {path}: {error.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)
