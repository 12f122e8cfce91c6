"""Run functions in processes of their own: a clean compiler, a clean heap, and a crash that stays there.

Processes are forked from a server that has imported the measures and run nothing: a start costs
milliseconds, and no thread pool is carried over. None outlives who asked for it, however that one ended: it
watches a pipe that closes with its parent, and the server ends with the last of them.
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

PRELOADED = ["bench._run", "bench.device"]  # what the server has imported: all measures


class DiedApart(RuntimeError):
    """The process ended without a result: what its function raised, or its exit code."""


class TookTooLong(DiedApart):
    """The process was ended because its time was up."""


@dataclass(frozen=True)
class _Raised:
    """What a process sends in place of a result."""

    text: str


class _NoMore:
    """What a process sends after the last of its results."""


@dataclass(frozen=True)
class _Started:
    """A process and the end of the pipe that its results come from."""

    process: BaseProcess
    receiver: Connection

    def result(self) -> Any:
        try:
            found = self.receiver.recv()
        except EOFError as error:
            self.process.join()
            raise DiedApart(f"the process ended with exit code {self.process.exitcode} and no result") from error
        if isinstance(found, _Raised):
            raise DiedApart(found.text)
        return found

    def end(self) -> None:
        self.receiver.close()
        self.process.join()


def run_apart(function: Callable[..., Any], *args: Any, limit_s: float | None = None) -> Any:
    """function(*args) from a fresh process; function, args and result must pickle.

    Raises DiedApart, and TookTooLong if there is no result within `limit_s` seconds.
    If the wait ends early, as by Ctrl-C, the process is ended too.
    """
    (result,) = run_together([(function, args)], limit_s=limit_s)
    return result


def run_together(
    calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], *, limit_s: float | None = None
) -> list[Any]:
    """function(*args) of each call, all at once, a fresh process each; the results in the order of the calls.

    Raises as `run_apart` does for the first process that ends without a result. The others are ended with it.
    """
    started: list[_Started] = []
    try:
        for function, args in calls:
            started.append(_start(function, args))
        return _results(started, limit_s)
    except BaseException:
        for each in started:
            each.process.kill()
        raise
    finally:
        for each in started:
            each.end()


def each_apart(function: Callable[..., Iterable[Any]], *args: Any, limit_s: float) -> Iterator[Any]:
    """What function(*args) yields in a fresh process, one by one as it comes; raises as `run_apart` does."""
    end, started = monotonic() + limit_s, _start(function, args, stream=True)
    try:
        while True:
            if not started.receiver.poll(max(0.0, end - monotonic())):
                raise TookTooLong(f"no result within {limit_s:.0f} s")
            found = started.result()
            if isinstance(found, _NoMore):
                return
            yield found
    finally:
        started.process.kill()
        started.end()


def _start(function: Callable[..., Any], args: tuple[Any, ...], *, stream: bool = False) -> _Started:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, stream, function, args))
    process.start()
    sender.close()
    return _Started(process, receiver)


def _results(started: Sequence[_Started], limit_s: float | None) -> list[Any]:
    """As they come, so that the first to fail is the one that is reported."""
    end = None if limit_s is None else monotonic() + limit_s
    results: dict[Connection, Any] = {}
    while len(results) < len(started):
        waiting = {each.receiver: each for each in started if each.receiver not in results}
        ready = wait(list(waiting), None if end is None else max(0.0, end - monotonic()))
        if not ready:
            raise TookTooLong(f"no result within {limit_s:.0f} s")
        results |= {receiver: waiting[receiver].result() for receiver in waiting if receiver in ready}
    return [results[each.receiver] for each in started]


def _send(sender: Connection, stream: bool, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """What the function returns, or, as a stream, each thing that it yields."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        for found in function(*args) if stream else [function(*args)]:
            sender.send(found)
        if stream:
            sender.send(_NoMore())
    except Exception as error:  # whatever it is, it is told
        traceback.print_exc()
        sender.send(_Raised(f"{type(error).__name__}: {error}"))
    sender.close()


def _end_with_parent() -> None:
    """Wait until the parent is no more. An exception in this thread would not end the process: exit at once."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
