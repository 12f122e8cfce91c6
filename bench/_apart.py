"""Run a function in a process of its own: a clean compiler, a clean heap, and a crash that stays there.

Processes are forked from a server that has imported the questions and run nothing: a start costs
milliseconds, and no thread pool is carried over. None outlives who asked for it, however that one ended: it
watches a pipe that closes with its parent, and the server ends with the last of them.
"""

import multiprocessing
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class DiedApart(RuntimeError):
    """The process ended without a result; its own message is on stderr."""


class TookTooLong(DiedApart):
    """The process was ended because its time was up."""


def run_apart(function: Callable[..., Any], *args: Any, limit_s: float | None = None) -> Any:
    """function(*args) from a fresh process; function, args and result must pickle.

    Raises DiedApart, and TookTooLong if there is no result within `limit_s` seconds.
    If the wait ends early, as by Ctrl-C, the process is ended too.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench._questions"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(sender, function, args))
    process.start()
    sender.close()
    try:
        if not receiver.poll(limit_s):
            raise TookTooLong(f"no result within {limit_s:.0f} s")
        result = receiver.recv()
    except EOFError as error:
        process.join()
        raise DiedApart(f"the process ended with exit code {process.exitcode} and no result") from error
    except BaseException:
        process.kill()
        raise
    finally:
        receiver.close()
        process.join()
    return result


def _send_result(sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sender.send(function(*args))
    sender.close()


def _end_with_parent() -> None:
    """Wait until the parent is no more. An exception in this thread would not end the process: exit at once."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
