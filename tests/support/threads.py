"""Jobs side by side, in threads that nobody waits for in the end: a deadlock fails its test and stops no other."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def side_by_side(jobs: Sequence[Callable[[], T]], *, seconds: float) -> list[T]:
    """What each returned, once all have ended; the error of the first that failed. TimeoutError if any runs on."""
    results: list[Future[T]] = [Future() for _ in jobs]
    for job, result in zip(jobs, results, strict=True):
        # An executor's threads are joined whatever happened, which is for ever if one of them is stuck.
        Thread(target=_run, args=(job, result), daemon=True).start()
    ended, running = wait(results, seconds)
    if running:
        raise TimeoutError(f"{len(running)} of {len(jobs)} jobs run on after {seconds} s") from next(
            (error for each in ended if (error := each.exception())), None
        )
    return [result.result() for result in results]


def _run(job: Callable[[], T], result: Future[T]) -> None:
    try:
        result.set_result(job())
    except BaseException as error:
        result.set_exception(error)
