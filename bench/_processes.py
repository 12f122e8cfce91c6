"""Run functions in processes of their own: a clean compiler, a clean heap, and a crash that stays there.

Processes are forked from a server that has imported the measures and run nothing: a start costs milliseconds, and no
thread pool is carried over. None outlives its parent, however that one ended: each watches a pipe that closes with the
parent, and the server ends with the last of them.
"""

import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any

PRELOADED = ["bench._run", "bench.device"]  # what the server imports: all measures


class DiedApart(RuntimeError):
    """The process ended without a result: what its function raised, or its exit code."""


class TookTooLong(DiedApart):
    """The process was ended because its time was up."""


@dataclass(frozen=True)
class _Raised:
    text: str


class _NoMore:
    """Sent after the last of several results."""


class _Process:
    """function(*args) in a process; as a `stream`, each value that it yields is a result."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], *, stream: bool = False) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.receiver, sender = context.Pipe(duplex=False)
        self.process: BaseProcess = context.Process(target=_send, args=(sender, stream, function, args))
        self.process.start()
        sender.close()

    def result(self) -> Any:
        try:
            found = self.receiver.recv()
        except EOFError as error:
            self.process.join()
            raise DiedApart(f"the process ended with exit code {self.process.exitcode} and no result") from error
        if isinstance(found, _Raised):
            raise DiedApart(found.text)
        return found

    def end(self, *, kill: bool) -> None:
        if kill:
            self.process.kill()
        self.receiver.close()
        self.process.join()


def run_apart(function: Callable[..., Any], *args: Any, limit_s: float | None = None) -> Any:
    """function(*args) from a fresh process; raises as `run_together` does."""
    (result,) = run_together([(function, args)], limit_s=limit_s)
    return result


def run_together(
    calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], *, limit_s: float | None = None
) -> list[Any]:
    """function(*args) of each call, all at once, a fresh process each; the results in the order of the calls.

    Functions, arguments and results must pickle. Raises DiedApart for the first process that ends without a result,
    TookTooLong after `limit_s` seconds. Where the wait ends early, as by Ctrl-C, all processes are ended.
    """
    end, done = None if limit_s is None else monotonic() + limit_s, False
    started: list[_Process] = []
    results: dict[Connection, Any] = {}
    try:
        for function, args in calls:
            started.append(_Process(function, args))
        while waiting := {each.receiver: each for each in started if each.receiver not in results}:
            ready = wait(list(waiting), None if end is None else max(0.0, end - monotonic()))
            if not ready:
                raise TookTooLong(f"no result within {limit_s:.0f} s")
            results |= {receiver: each.result() for receiver, each in waiting.items() if receiver in ready}
        done = True
    finally:
        for each in started:
            each.end(kill=not done)
    return [results[each.receiver] for each in started]


def each_apart(function: Callable[..., Iterable[Any]], *args: Any, limit_s: float) -> Iterator[Any]:
    """The values that function(*args) yields in a fresh process, as they come; raises as `run_together` does."""
    end, started = monotonic() + limit_s, _Process(function, args, stream=True)
    try:
        while True:
            if not started.receiver.poll(max(0.0, end - monotonic())):
                raise TookTooLong(f"no result within {limit_s:.0f} s")
            found = started.result()
            if isinstance(found, _NoMore):
                return
            yield found
    finally:
        started.end(kill=True)


def _send(sender: Connection, stream: bool, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        for found in function(*args) if stream else [function(*args)]:
            sender.send(found)
        if stream:
            sender.send(_NoMore())
    except Exception as error:  # any: the parent reports it
        traceback.print_exc()
        sender.send(_Raised(f"{type(error).__name__}: {error}"))
    sender.close()


def _end_with_parent() -> None:
    """Wait until the parent is no more. An exception in this thread would not end the process: exit at once."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
