"""What commands write: to the terminal, all of it or one line that says why not; to files, in one piece; progress."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from time import monotonic
from typing import NamedTuple, TextIO

from ..masks.inspection import LEAST_COLUMNS, LEAST_LINES
from . import _machine
from ._command_parser import UsageError

_UNREAD = 141  # what shells report of a process that SIGPIPE ended
_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}
_COLUMNS, _LINES = 80, 24  # where nothing is known of a terminal
_SHAPES = "·░▒▓█▀▄│─┌┐└┘┬┤├┴×…"
COLOR_CHOICES = ("auto", "always", "never")
_SECONDS_BETWEEN_LINES = 10.0


def written(run: Callable[[], int]) -> int:
    """Run, write what is left of the output, and return the exit status: 2 if it cannot be written, 141 if unread."""
    try:
        with _standard_error():
            try:
                return run()
            finally:
                if sys.stdout is not None:  # not left to the interpreter's end, which would print a traceback
                    sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as `head` has
        _discard()
        return _UNREAD
    except OSError as error:
        if error.errno not in _UNWRITABLE or error.filename is not None:
            raise
        _discard()
        tell(f"standard output must be writable; {error.strerror}")
        return 2


def require_open() -> None:
    """Raise UsageError where standard output was closed before the command began, as by `>&-` in a shell."""
    if sys.stdout is None:
        raise UsageError("standard output must be open, as the answer is printed there; got it closed")


def tell(error: str) -> None:
    """One line on standard error, if it can be written."""
    with _standard_error(), suppress(OSError):
        print(f"flexdilated: error: {error}", file=sys.stderr, flush=True)


@contextmanager
def _standard_error() -> Iterator[None]:
    """Where it was closed, as by `2>&-`, what is written to it goes nowhere, and not to standard output."""
    if sys.stderr is not None:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stderr(nowhere):
        yield


def _discard() -> None:
    """What is still in the buffer goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Terminal(NamedTuple):
    """Characters a line and lines; whether it shows colors (ANSI, 256 of them) and shapes beyond ASCII."""

    columns: int
    lines: int
    color: bool
    shapes: bool


def terminal_of(stream: TextIO, *, color: str = "auto") -> Terminal:
    """What is known of a stream's terminal. With "auto" only a terminal gets colors, and none where NO_COLOR is set.

    Source of NO_COLOR: https://no-color.org.
    """
    size = shutil.get_terminal_size((_COLUMNS, _LINES))
    wanted = color == "always" or (color == "auto" and _takes_colors(stream))
    return Terminal(max(size.columns, LEAST_COLUMNS), max(size.lines, LEAST_LINES), wanted, _takes_shapes(stream))


def _takes_colors(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _takes_shapes(stream: TextIO) -> bool:
    try:
        _SHAPES.encode(stream.encoding or "utf-8")  # none: text that is not encoded
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def require_file(flag: str, path: Path | None, kinds: Sequence[str]) -> None:
    """Raise UsageError where a file cannot be of this kind, or not in that folder, or needs matplotlib and lacks it."""
    if path is None:
        return
    if path.suffix.lower() not in kinds:
        raise UsageError(f"{flag} writes {' or '.join(kinds)} files; got {path}")
    if not path.parent.is_dir():
        raise UsageError(f"{flag} must be in a folder that exists; got {path}")
    if ".png" in kinds and _machine.find("matplotlib") is None:
        raise UsageError(_machine.missing_line("matplotlib"))


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


class Progress:
    """A bar on standard error where tqdm is installed, a line now and then where it is not."""

    def __init__(self, bar, unit: str) -> None:
        self._bar, self._unit, self._last = bar, unit, monotonic()

    def step(self, done: int, total: int, note: str) -> None:
        """`done` of `total` steps are behind."""
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(done - self._bar.n)
        elif done >= total or monotonic() - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = monotonic()
            print(f"{self._unit} {done} of {total}: {note}", flush=True, file=sys.stderr)


@contextmanager
def progress(what: str, *, unit: str, total: int) -> Iterator[Progress]:
    tqdm = _machine.find("tqdm")
    if tqdm is None:
        print(_machine.missing_line("tqdm"), file=sys.stderr)
        yield Progress(None, unit)
        return
    with tqdm.tqdm(total=total, unit=unit, desc=what, dynamic_ncols=True) as bar:
        yield Progress(bar, unit)
