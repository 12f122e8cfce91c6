"""Ctrl-C: the first asks the work to end at its next stop, the second ends it at once."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class Interrupt:
    """While entered, the first SIGINT sets `requested` and a later one raises KeyboardInterrupt.

    Enter it on the main thread, where Python handles signals; the earlier handler is put back on exit.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Interrupt:
        self._earlier = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._earlier)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
