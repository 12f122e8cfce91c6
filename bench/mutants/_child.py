"""One run of some tests in a forked child: the parent has torch imported, so that no run pays for that."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Never the library: a child imports it, mutated, from its own copy of the tree.
WARM = (
    "pytest",
    "hypothesis",
    "hypothesis.internal.conjecture.engine",
    "jaxtyping",
    "beartype",
    "tabulate",
    "numpy",
    "torch",
    "torch._dynamo",
    "torch._inductor.config",
    "torch.nn.attention.flex_attention",
)
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "HYPOTHESIS_PROFILE": "ci",
    "PYTHONDONTWRITEBYTECODE": "1",
}


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit status (None: it was out of time, and killed), and after how many seconds."""

    status: int | None
    seconds: float


@dataclass
class Running:
    """A child at work on a copy of the tree."""

    pid: int
    started: float
    limit_s: float

    def ended(self) -> Ended | None:
        """None while it runs within its time. Whatever processes it started end with it."""
        elapsed = time.monotonic() - self.started
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            _kill(self.pid)
            return Ended(os.waitstatus_to_exitcode(status), elapsed)
        if elapsed < self.limit_s:
            return None
        _kill(self.pid)
        os.waitpid(self.pid, 0)
        return Ended(None, elapsed)


def _kill(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def warm_up() -> None:
    """Import what every child needs, and the threads that torch computes on stay one."""
    os.environ.update(_ENVIRONMENT)
    sys.dont_write_bytecode = True
    for name in WARM:
        __import__(name)
    sys.modules["torch"].set_num_threads(1)


def start(tree: Path, job: Callable[[], int], *, log: Path, limit_s: float) -> Running:
    """Fork; the child stands in the tree as `python -m pytest` would, and writes what it says to the log."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 70  # what a job that raises ends with
        try:
            os.setsid()
            _stand_in(tree, log)
            status = job()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            sys.stdout.flush()
            os._exit(status)
    return Running(pid, time.monotonic(), limit_s)


def _stand_in(tree: Path, log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(tree)
    sys.path[0] = str(tree)
    here = {"flexdilated", "tests", "bench"}
    for name in [name for name in sys.modules if name.partition(".")[0] in here]:
        del sys.modules[name]


def run_pytest(arguments: Sequence[str], plugins: Sequence[object]) -> int:
    """Exit status of pytest; nothing is kept between runs."""
    import pytest

    # What is warm was imported before pytest could rewrite its assertions.
    quiet = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    return int(pytest.main([*quiet, *arguments], plugins=[*plugins]))
