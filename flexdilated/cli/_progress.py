"""Progress of a long command: a bar where tqdm is installed, a line now and then where it is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from time import monotonic
from typing import Protocol, TextIO

from . import _extras

_SECONDS_BETWEEN_LINES = 10.0


class Progress(Protocol):
    """Told after every step."""

    def step(self, done: int, total: int, note: str) -> None:
        """`done` of `total` steps are behind; `total` may change on the way."""
        ...


def training_progress(*, done: int, total: int) -> AbstractContextManager[Progress]:
    """A bar on standard error, or lines on standard output."""
    return progress("training", unit="step", done=done, total=total)


@contextmanager
def progress(what: str, *, unit: str, done: int, total: int, lines: TextIO | None = None) -> Iterator[Progress]:
    """A bar on standard error, or lines on `lines` (None: on standard output)."""
    tqdm = _extras.find("tqdm")
    if tqdm is None:
        print(_extras.missing_line("tqdm"), file=lines)
        yield _Lines(unit, lines)
        return
    with tqdm.tqdm(initial=done, total=total, unit=unit, desc=what, dynamic_ncols=True) as bar:
        yield _Bar(bar)


class _Bar:
    def __init__(self, bar) -> None:
        self._bar = bar

    def step(self, done: int, total: int, note: str) -> None:
        self._bar.total = total
        self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(done - self._bar.n)


class _Lines:
    def __init__(self, unit: str, lines: TextIO | None) -> None:
        self._last, self._unit, self._lines = monotonic(), unit, lines

    def step(self, done: int, total: int, note: str) -> None:
        if done < total and monotonic() - self._last < _SECONDS_BETWEEN_LINES:
            return
        self._last = monotonic()
        print(f"{self._unit} {done} of {total}: {note}", flush=True, file=self._lines)
