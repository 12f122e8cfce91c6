"""The guard bites: what takes longer than its bound allows ends with status 1, and noise does not."""

import json
from collections.abc import Callable
from time import process_time

import pytest

import flexdilated as fd
from bench import _guard
from bench.__main__ import main
from bench._guard import BOUND, CASES, RECORDED, Pair, check, read

# Three times, not twice: other tests share the machine, and make either side of a ratio up to 1.3 times as slow.
TIMES = 3


def repeated(function: Callable) -> Callable:
    def run(*args, **kw):
        for _ in range(TIMES - 1):
            function(*args, **kw)
        return function(*args, **kw)

    return run


class Scripted:
    """A job that takes what the script says, and its last entry from then on."""

    def __init__(self, *seconds: float) -> None:
        self._left = list(seconds)

    def seconds(self, clock: Callable[[], float]) -> float:
        assert clock is process_time
        return self._left.pop(0) if len(self._left) > 1 else self._left[0]


@pytest.fixture
def quick(monkeypatch):
    """A try is one round."""
    monkeypatch.setattr(_guard, "_ROUNDS_A_TRY", 1)
    monkeypatch.setattr(_guard, "_SECONDS_A_TRY", 0.0)
    monkeypatch.setattr(_guard, "_SECONDS_BETWEEN", 0.0)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("library", "plain", "verdict"),
    [
        ((3.0,), (2.0,), (1.5, 1, "ok")),
        ((9.0, 4.0, 3.0), (2.0, 8.0), (1.5, 3, "ok")),  # noise: the fastest runs of all tries count, each side's own
        ((2.0,), (9.0, 1.0), (2 / 9, 1, "faster: record it anew")),  # the first try alone saw a slow plain job
        ((2.0,), (1.0, 9.0), (2.0, 3, "SLOWER")),  # a plain job that is slowed down for a while does not hide it
    ],
)
def test_a_case_has_up_to_three_tries(library, plain, verdict) -> None:
    found = check("case", lambda: Pair(Scripted(*library), Scripted(*plain)), recorded=1.0, bound=1.6)
    assert (found.ratio, found.tries, found.text) == verdict
    assert found.failed == (found.text == "SLOWER")


def test_both_jobs_of_each_case_run_and_are_recorded() -> None:
    """A case checks its outputs itself; its times are positive."""
    assert list(read(RECORDED)) == list(CASES)
    for case in CASES.values():
        pair = case()
        assert pair.library.seconds(process_time) > 0
        assert pair.plain.seconds(process_time) > 0


@pytest.mark.slow
def test_a_planted_slow_down_is_caught(tmp_path, monkeypatch, capsys) -> None:
    """Recorded here and now, since another machine's ratios are for the guard alone; in shorter tries than there."""
    name = "small_call"
    pair = CASES[name]()  # which checks its outputs: once for all three calls
    monkeypatch.setitem(CASES, name, lambda: Pair(pair.library, pair.plain))
    monkeypatch.setattr(_guard, "_SECONDS_A_TRY", 0.02)
    monkeypatch.setattr(_guard, "_ROUNDS_A_TRY", 2)
    monkeypatch.setattr(_guard, "_SECONDS_BETWEEN", 0.0)
    file = tmp_path / "guard.json"
    assert main(["guard", name, "--record", "--file", str(file)]) == 0
    assert main(["guard", name, "--file", str(file)]) == 0
    monkeypatch.setattr(fd, "attend", repeated(fd.attend))
    capsys.readouterr()
    assert main(["guard", name, "--file", str(file)]) == 1
    out, err = capsys.readouterr()
    assert "SLOWER" in out
    assert err == f"slower than {BOUND} times the recorded ratio: {name}\n"


def test_recording_some_keeps_the_others(tmp_path, monkeypatch, quick, capsys) -> None:
    file = tmp_path / "guard.json"
    file.write_text(json.dumps({"ratios": {"decoding": 7.5, "gone": 1.0}}))
    monkeypatch.setitem(CASES, "small_call", lambda: Pair(Scripted(3.0), Scripted(2.0)))
    assert main(["guard", "small_call", "--record", "--file", str(file)]) == 0
    document = json.loads(file.read_text())
    assert document["ratios"] == {"small_call": 1.5, "decoding": 7.5}
    assert set(document) == {"ratios", "machine", "versions", "commit", "date"}
    with pytest.raises(SystemExit, match="2"):
        main(["guard", "mask_build", "--file", str(file)])
    assert "has no ratio of mask_build; `--record` measures it" in capsys.readouterr().err
