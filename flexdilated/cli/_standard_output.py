"""What a command prints: all of it is written when the command ends, or one line says why not."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress

from ._usage import UsageError

_UNREAD = 141  # what shells report of a process that SIGPIPE ended
_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


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
