"""Run a function in a process of its own: a clean compiler, a clean heap, and a crash that stays there.

Processes are forked from a server that has imported the questions and run nothing: a start costs
milliseconds, and no thread pool is carried over.
"""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class DiedApart(RuntimeError):
    """The process ended without a result; its own message is on stderr."""


def run_apart(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args) from a fresh process; function, args and result must pickle. Raises DiedApart."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench._questions"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(sender, function, args))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError as error:
        process.join()
        raise DiedApart(f"the process ended with exit code {process.exitcode} and no result") from error
    finally:
        receiver.close()
        process.join()


def _send_result(sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    sender.send(function(*args))
    sender.close()
