"""The demo on several processes: one model and one loss curve, whatever their number; one of them prints and writes."""

import io
import json
import os
import random
import signal
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest

from flexdilated.cli import main
from tests.rank_worker import set_group_timeout
from tests.ranks import on_ranks, outcomes_on_ranks

FILES = ["checkpoint.pt", "loss.png", "mask.png", "report.json"]
# Bits per byte. The sums are float32, and in another order; the optimiser rounds matrices to bfloat16 besides.
NOISE = 2e-3
NARROW = "flexdilated.cli._demo_model._EMBED_DIM", 64


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Files of made-up source, 30 kB."""
    folder, draw = tmp_path_factory.mktemp("text"), random.Random(0)
    words = ["def ", "return ", "self", "(", ")", ":\n    ", "value", " = ", "None\n", "import "]
    for number in range(12):
        (folder / f"{number}.py").write_text("".join(draw.choices(words, k=600)), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True, scope="module")
def narrow_model():
    """Half as wide as that of users, and a quarter of its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*NARROW)
        yield


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory) -> Path:
    """The folder of a run of 8 steps on this process."""
    folder = tmp_path_factory.mktemp("whole")
    with mock.patch("flexdilated.cli._demo.find", return_value=None):
        assert main(arguments(folder, text)) == 0
    return folder


def arguments(out: Path, text: Path, *more: str) -> list[str]:
    return ["demo", "--context", "250", "--steps", "8", "--out", str(out), "--data", str(text), *more]


def history(out: Path) -> list[float]:
    return json.loads((out / "report.json").read_text(encoding="utf-8"))["history"]


def results(out: Path) -> dict:
    return json.loads((out / "report.json").read_text(encoding="utf-8"))["results"]


def environment() -> dict[str, str]:
    """What torchrun tells a process of its place."""
    import torch.distributed as dist

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    return {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}


def run_here(command: list[str]) -> tuple[int, str, str]:
    """Exit status and what this process prints, as one of those that torchrun has started."""
    printed, errors = io.StringIO(), io.StringIO()
    # Pictures are left to one test: to draw takes longer than to train.
    undrawn = mock.patch("flexdilated.cli._demo.find", return_value=None)
    with (
        mock.patch.dict(os.environ, environment()),
        mock.patch(*NARROW),
        undrawn,
        redirect_stdout(printed),
        redirect_stderr(errors),
    ):
        status = main(command)
    return status, printed.getvalue(), errors.getvalue()


def assert_one_curve(one: list[float], other: list[float]) -> None:
    assert len(one) == len(other)
    assert max(abs(x - y) for x, y in zip(one, other, strict=True)) < NOISE


def test_the_loss_curve_of_one_process(tmp_path: Path, text: Path, whole: Path) -> None:
    """Training and validation, on 1 and 3 processes; the first alone prints and leaves files."""
    curve = history(whole)
    assert curve[-1] < curve[0] - 1
    first, *others = on_ranks(3, run_here, arguments(tmp_path, text))
    assert first[0] == 0
    assert "ranks     3 processes" in first[1]
    assert first[1].count("validation bits per byte, after") == 1
    assert others == [(0, "", "")] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.pt", "report.json"]
    assert_one_curve(history(tmp_path), curve)
    for name in ("before", "after"):
        assert results(tmp_path)[name] == pytest.approx(results(whole)[name], abs=NOISE)
    assert results(tmp_path)["unigram"] == results(whole)["unigram"]


def test_several_branches_on_ranks(tmp_path: Path, text: Path) -> None:
    """At 1024 bytes the pattern is a mixture, and keys come from other processes; the loss falls all the same."""
    options = ("--context", "1024", "--steps", "3")
    assert main(arguments(tmp_path / "1", text, *options)) == 0
    on_ranks(2, run_here, arguments(tmp_path / "2", text, *options))
    curve = history(tmp_path / "1")
    assert json.loads((tmp_path / "1" / "report.json").read_text())["config"]["model"]["segment_lengths"] == [256, 1024]
    assert curve[-1] < curve[0] - 0.1
    assert_one_curve(history(tmp_path / "2"), curve)


def test_a_run_goes_on_with_another_number_of_processes(tmp_path: Path, text: Path, whole: Path) -> None:
    """5 steps on two processes, the others on one and on three: the curve of 8 steps in one go; and a sample."""
    parts = tmp_path / "parts"
    first, _ = on_ranks(2, stop_in_step, 5, 1, arguments(parts, text))
    assert "training ended by" in first[1]
    assert results(parts)["ended_by"] == "Ctrl-C"
    assert len(history(parts)) == 5
    ended = on_ranks(3, run_here, arguments(parts, text, "--resume", "--sample", "5"))
    assert [status for status, *_ in ended] == [0, 0, 0]
    assert "resumed   at step 5" in ended[0][1]
    assert "sample    5 bytes" in ended[0][1]
    assert_one_curve(history(parts), history(whole))


def stop_in_step(step: int, rank: int, command: list[str]) -> tuple[int, str, str]:
    """One process gets SIGINT in a step; all stop after it."""
    import torch.distributed as dist

    from flexdilated.cli import _demo_training

    def loss(*given):
        nonlocal step
        step -= 1
        if step == 0 and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGINT)
        return step_taken(*given)

    step_taken = _demo_training._step
    with mock.patch.object(_demo_training, "_step", loss):
        return run_here(command)


def test_the_first_process_keeps_the_time(tmp_path: Path, text: Path) -> None:
    command = arguments(tmp_path, text, "--steps", "100000", "--minutes", "1e-6")
    assert [status for status, *_ in on_ranks(2, run_here, command)] == [0, 0]
    assert len(history(tmp_path)) == 1


BAD = {
    "too few bytes": (["--context", "2"], "--context must be at least the number of processes, as each has a part"),
    "nothing to resume": (["--resume"], "--resume needs a checkpoint"),
    "no data": (["--data", "/no/such/place"], "nothing is at /no/such/place"),
    "a place of its own": (["--device", "cpu:1"], "--device must be one of cpu"),
}


@pytest.mark.parametrize(("more", "message"), BAD.values(), ids=BAD)
def test_bad_arguments_are_said_once(tmp_path: Path, text: Path, more: list[str], message: str) -> None:
    first, *others = on_ranks(3, run_here, arguments(tmp_path, text, *more))
    assert first[0] == 2
    assert message in first[2]
    assert first[2].count("\n") == 1
    assert others == [(2, "", "")] * 2
    assert list(tmp_path.iterdir()) == []


def other_steps(command: list[str]) -> tuple[int, str, str]:
    import torch.distributed as dist

    return run_here([*command, "--steps", str(1 + dist.get_rank())])


def test_processes_with_other_settings_are_told(tmp_path: Path, text: Path) -> None:
    (status, _, errors), (other_status, _, _) = on_ranks(2, other_steps, arguments(tmp_path, text))
    assert (status, other_status) == (2, 2)
    assert "steps" in errors


def fail_on(rank: int, command: list[str]) -> tuple[int, str, str]:
    import torch.distributed as dist

    from flexdilated.cli import _demo_training

    def loss(*given):
        set_group_timeout(4)
        if dist.get_rank() == rank:
            raise MemoryError("made up")
        return step_taken(*given)

    step_taken = _demo_training._step
    with mock.patch.object(_demo_training, "_step", loss):
        return run_here(command)


def test_an_error_in_one_process_ends_the_others(tmp_path: Path, text: Path) -> None:
    """The one that fails says why; the other waits for it no longer than its group does."""
    first, second = outcomes_on_ranks(2, fail_on, 1, arguments(tmp_path, text))
    assert "made up" in str(second.error)
    assert "DistError" in str(first.error)


def run_as_started(port: int, command: list[str]) -> tuple[int, str, str]:
    """As a process that torchrun has just started: in no group yet, and told where all meet."""
    import torch.distributed as dist

    place = environment() | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    dist.destroy_process_group()
    printed, errors = io.StringIO(), io.StringIO()
    with mock.patch.dict(os.environ, place), redirect_stdout(printed), redirect_stderr(errors):
        status = main(command)
    assert not dist.is_initialized()
    return status, printed.getvalue(), errors.getvalue()


def test_processes_that_torchrun_has_started(tmp_path: Path, text: Path) -> None:
    """They make their group by the environment, and end it."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = on_ranks(2, run_as_started, store.port, arguments(tmp_path, text, "--steps", "1"))
    assert first[0] == 0
    assert first[1].count("validation bits per byte, after") == 1
    assert second == (0, "", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
