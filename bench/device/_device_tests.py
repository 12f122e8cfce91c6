"""The test suite's own tests for accelerators, where what they need is installed."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

from .._result import Gap, Row, at_most
from ._where import Where

_ROOT = Path(__file__).resolve().parents[2]
_NEEDED = ("pytest", "hypothesis", "beartype", "jaxtyping", "pytest_timeout", "matplotlib", "tqdm")
_MEASURE = "tests marked device: failures and errors"
_TARGET = at_most(0)
_COUNTS = re.compile(r"(\d+) (passed|failed|errors?)\b")


def run_device_tests(where: Where, limit_s: float) -> Row | Gap:
    """How many fail; a Gap where they cannot run."""
    if not where.is_cuda:
        return Gap(_MEASURE, _TARGET, "they need a CUDA device")
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        return Gap(_MEASURE, _TARGET, f"not installed: {', '.join(missing)}")
    files = [str(path) for path in sorted((_ROOT / "tests").glob("test_*.py")) if "mark.device" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "device", "-p", "no:cacheprovider", *files]
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return Gap(_MEASURE, _TARGET, f"no result within {limit_s:.0f} s")
    return read_outcome(done.stdout)


def read_outcome(printed: str) -> Row | Gap:
    """The row that pytest's last line tells; a Gap if it ran nothing."""
    last = printed.rstrip().rpartition("\n")[2]
    counts = {word.rstrip("s"): int(number) for number, word in _COUNTS.findall(last)}
    wrong = counts.get("failed", 0) + counts.get("error", 0)
    if not wrong and not counts.get("passed", 0):
        return Gap(_MEASURE, _TARGET, f"pytest ran nothing: {last}")
    return Row(_MEASURE, _TARGET, wrong, detail={"passed": counts.get("passed", 0), "printed": printed[-4000:]})
