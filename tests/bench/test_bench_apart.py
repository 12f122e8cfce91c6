"""Processes of the benchmark end with whoever asked for them, however that one is ended."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench._processes import DiedApart, TookTooLong, each_apart, run_apart

ROOT = Path(__file__).resolve().parents[2]

# A process within a process, as for a peak of memory; the inner one writes down who they are and works on. They
# import no torch: what is tested does not need it.
JOBS = """
import os
import time
from pathlib import Path

from bench import _processes
from bench._processes import run_apart

_processes.PRELOADED = []


def outer(path):
    run_apart(inner, path, os.getpid())


def inner(path, outer_id):
    written = Path(f"{path}.part")
    # Both processes are children of the server that forks them.
    written.write_text(f"{os.getpid()} {outer_id} {os.getppid()}")
    written.rename(path)
    end = time.monotonic() + 600
    while time.monotonic() < end:
        sum(range(10**5))
"""
ASK = """
import signal
import sys

from jobs_apart import outer, run_apart

if __name__ == "__main__":
    # Who starts the tests in the background may have them ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_apart(outer, sys.argv[1])
"""


def alive(process_id) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def until(condition, seconds=250) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="tells living processes by /proc")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL], ids=lambda sent: sent.name)
def test_no_process_outlives_the_one_that_asked(tmp_path, sent) -> None:
    path = tmp_path / "ids"
    (tmp_path / "jobs_apart.py").write_text(JOBS)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", ASK, str(path)]
    asking = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
    try:
        assert until(path.exists, seconds=250)
        ids = [int(word) for word in path.read_text().split()]
        assert all(map(alive, ids))
        asking.send_signal(sent)
        asking.wait(timeout=250)
        assert asking.returncode != 0
        assert until(lambda: not any(map(alive, ids))), f"{sent.name} left a process of {ids} behind"
    finally:
        asking.kill()
        asking.wait()


def test_results_come_one_by_one() -> None:
    """Those before an error, an end or a limit are there."""
    with pytest.raises(DiedApart, match="ValueError: invalid literal"):
        run_apart(int, "no number")
    assert list(each_apart(yields, 3, None, limit_s=250)) == [0, 1, 2]
    for last, error, message in (
        ("raise", DiedApart, "ValueError: planted"),
        ("exit", DiedApart, "exit code 7"),
        ("sleep", TookTooLong, "no result within 2 s"),
    ):
        found = each_apart(yields, 1, last, limit_s=2 if last == "sleep" else 250)
        assert next(found) == 0
        with pytest.raises(error, match=message):
            next(found)


def yields(number, last):
    yield from range(number)
    if last == "raise":
        raise ValueError("planted")
    if last == "exit":
        os._exit(7)
    if last == "sleep":
        time.sleep(600)
