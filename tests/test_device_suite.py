"""The device suite: its dry run on CPU, what it does with rows that fail, and the parts that only a GPU would run."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import flexdilated as fd
from bench import _machine
from bench.__main__ import main as bench_main
from bench._jobs import Job, Size
from bench._measures import Gap, Row, at_least
from bench._rules import LONGNET_5, Contestant
from bench.device import _correctness, _device, _suite
from bench.device.__main__ import main
from bench.device._correctness import CASES, Trial, Verdict, failure, judge, read_outcome, summary, trials
from bench.device._device import Where, compare
from bench.device._suite import CODES, NAMES, SUITE
from tests.compilers import nothing_is_built  # noqa: F401  (a fixture)

ROOT = Path(__file__).resolve().parents[1]
HERE = Where("cpu")
TINY = LONGNET_5.shrunk(64)
SIZE = Size(1024, num_heads=4, head_dim=16, repeats=1)


FEW = [Trial("window, odd length", "tiles on CPU"), Trial("one token", "tiles on CPU")]


def few_trials(where: Where) -> list[Trial]:
    return FEW


@pytest.mark.slow
@pytest.mark.parametrize("trial", trials(HERE), ids=lambda trial: trial.measure)
def test_every_odd_case_is_right_on_cpu(trial) -> None:
    assert judge(trial, HERE).row.met


def here(function, *arguments, limit_s=None):
    """Instead of `run_apart`, in this process."""
    return function(*arguments)


@pytest.fixture
def in_this_process(monkeypatch):
    monkeypatch.setattr(_suite, "run_apart", here)


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("name", NAMES)
def test_dry_run_of_a_row(name, tmp_path, monkeypatch, capsys) -> None:
    """A number in every row, or why there is none."""
    monkeypatch.setattr(_suite, "trials", few_trials)
    assert main([name, "--device", "cpu", "--small", "--limit", "1e6", "--out", str(tmp_path)]) == 0
    document, printed = json.loads((tmp_path / f"{name}.json").read_text()), capsys.readouterr().out
    assert document["rows"]
    for row in document["rows"]:
        assert "not_verified" not in row
        assert row["measure"] in printed
    gaps = [row["measure"] for row in document["rows"] if row["measured"] is None]
    unmeasured = ["tests marked device"] if name == "gpu_correctness" else []
    assert [gap.partition(":")[0] for gap in gaps] == unmeasured


@pytest.mark.slow
def test_the_command_and_its_files(tmp_path, capsys) -> None:
    """They make README's table, and one of them holds all others."""
    names = ["gpu_merge"]
    command = [ROOT / "bench" / "h200.sh", "G8", "--device", "cpu", "--small", "--limit", "1e6"]
    command += ["--out", tmp_path, "--commit", "abc123"]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    texts = {f"{name}.json": (tmp_path / f"{name}.json").read_text() for name in names}
    documents = [json.loads(text) for text in texts.values()]
    assert json.loads((tmp_path / "summary.json").read_text())["documents"] == documents
    for document in documents:
        assert (document["commit"], document["small"]) == ("abc123", True)
        assert all(row["measure"] in done.stdout for row in document["rows"])
    assert bench_main(["table", "--out", str(tmp_path)]) == 0
    markdown = capsys.readouterr().out
    assert all(f"`{tmp_path}/{name}`" in markdown for name in texts)
    unpacked = tmp_path / "unpacked"
    assert main(["--unpack", str(tmp_path / "summary.json"), "--out", str(unpacked)]) == 0
    assert {path.name: path.read_text() for path in unpacked.iterdir()} == texts


def test_earlier_codes_are_accepted() -> None:
    assert list(CODES) == [f"G{number}" for number in range(12)]
    assert list(CODES.values()) == list(NAMES)


def fail_some(name, small, where):
    """`answer`, but one row raises, one ends its process, and one takes too long."""
    if name == "gpu_vs_matmul":
        raise RuntimeError("planted\nmore")
    if name == "gpu_gathers":
        os._exit(7)
    if name == "gpu_merge":
        time.sleep(600)
    return ANSWER(name, small, where)


ANSWER = _suite.answer


@pytest.mark.slow
def test_rows_that_fail_are_reported_and_the_others_go_on(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(_suite, "answer", fail_some)
    monkeypatch.setattr(_suite, "_LEAST_S", 0.1)
    slow = replace(SUITE["gpu_merge"], limit_s=2.0 / _suite._DRY_RUN_FACTOR)
    monkeypatch.setitem(SUITE, "gpu_merge", slow)
    names = ["gpu_vs_matmul", "gpu_gathers", "gpu_vs_branch_loop", "gpu_merge"]
    assert main([*names, "--device", "cpu", "--small", "--limit", "1e6", "--out", str(tmp_path)]) == 1
    table = capsys.readouterr().out
    for reason in ("RuntimeError: planted ", "exit code 7", "no result within 2 s"):
        assert f"not measured: {reason}" in table.replace("the process ended with ", "")
    documents = [json.loads((tmp_path / f"{name}.json").read_text()) for name in names]
    assert [[row["measured"] is None for row in document["rows"]] for document in documents] == [
        [True], [True], [False, False], [True]
    ]  # fmt: skip
    assert documents[0]["rows"][0]["detail"]["reason"] == "RuntimeError: planted\nmore"


def test_no_row_is_begun_without_time(monkeypatch) -> None:
    kept = []
    monkeypatch.setattr(_suite.Suite, "_conditions", lambda suite: {})
    _suite.Suite(HERE, True, ("gpu_backward", "gpu_memory")).run(1.0, kept.append)
    assert [(document["name"], document["rows"][0]["measured_text"]) for document in kept] == [
        ("gpu_backward", "not measured: the suite's time was up"),
        ("gpu_memory", "not measured: the suite's time was up"),
    ]


def test_flash_implementation_is_activated_only_when_asked(monkeypatch) -> None:
    """In the process that measures, before it does; what PyTorch then raises is a reason like any other."""
    order = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", order.append)
    assert _suite._guarded(None, lambda: order.append("run"), ()) is None
    assert order == ["run"]
    _suite._guarded("FA3", lambda: order.append("run"), ())
    assert order == ["run", "FA3", "run"]
    monkeypatch.undo()
    found = _suite._guarded("FA0", lambda: order.append("run"), ())
    assert "ValueError: Unknown flash attention impl 'FA0'" in found.reason
    assert len(order) == 3


def distorted(change):
    """attend, with an output, an lse or a gradient that is wrong, except in the reference."""
    right = fd.attend

    def attend(q, k, v, pattern, **options):
        if options.get("engine") == "reference":
            return right(q, k, v, pattern, **options)
        if change == "dk":
            k = k * 1.05 - 0.05 * k.detach()
        out, lse = right(q, k, v, pattern, **options)
        if change == "nan":
            lse = lse * torch.nan
        return out * 1.05 if change == "out" else out, lse + 0.69 if change == "lse" else lse

    return attend


@pytest.mark.parametrize(
    ("case", "change", "spoils"),
    [
        ("mixture, head dim 48", None, ()),
        ("mixture, head dim 48", "out", ("longnet forward", "longnet backward")),
        ("mixture, head dim 48", "lse", ("longnet forward", "longnet backward")),
        ("mixture, head dim 48", "dk", ("longnet backward",)),
        ("mixture, head dim 48", "nan", ("longnet forward", "longnet backward")),
        ("one token", None, ()),
        ("one token", "out", ("longnet forward", "longnet backward")),
        ("hidden rows, rate not dividing segment", "lse", ("longnet forward", "longnet backward")),
    ],
)
def test_odd_cases_see_a_wrong_kernel(monkeypatch, case, change, spoils) -> None:
    if change is not None:
        monkeypatch.setattr(_correctness.fd, "attend", distorted(change))
    verdict = judge(Trial(case, "tiles on CPU"), HERE)
    assert verdict.row.met is (change is None)
    assert verdict.spoils == spoils


def test_not_a_number_is_wrong() -> None:
    row = Row("nan", _correctness._TARGET, torch.nan)
    right = Row("right", _correctness._TARGET, 0.5)
    assert not row.met
    for order in ([row, right], [right, row]):
        worst, *bad = summary([Verdict(each) for each in order])
        assert worst.measured != worst.measured
        assert bad == [row]
    assert list(_correctness._spoiled({"out": torch.nan}, ("set forward",))) == ["set forward"]


def test_a_case_without_numbers_spoils_what_it_is_about() -> None:
    trial = Trial("window, odd length", "Triton")
    verdict = failure(trial, "AcceleratorError: illegal memory access")
    assert verdict.spoils == ("set forward", "set backward")
    assert "illegal memory access" in verdict.row.to_data()["measured_text"]
    assert failure(Trial("sinks", "Triton"), "x").spoils == ()


def test_a_way_may_refuse_a_pattern(monkeypatch) -> None:
    """On CPU FlexAttention refuses mixtures: no fault where it is not the default, and one where it is."""
    other = judge(Trial("mixture, head dim 48", "FlexAttention on CPU"), HERE)
    assert (other.refused, other.spoils) == (True, ())
    assert "engine='tiles' serves it" in other.row.reason
    monkeypatch.setattr(_correctness, "_default", lambda case, where: _device.inference(where))
    assert judge(Trial("mixture, head dim 48", "FlexAttention on CPU"), HERE).spoils[0] == "longnet forward"
    assert len(summary([other])) == 1


def test_every_case_runs_in_the_default_way_and_plain_ones_in_all(monkeypatch) -> None:
    monkeypatch.setattr(_device, "_tiles", lambda where: (_device.Way("tiles", "tiles"),))
    monkeypatch.setattr(_device, "is_flash_backend_importable", lambda: True)
    planned = trials(Where("cuda"))
    names = {way: [trial.case for trial in planned if trial.way == way] for way in ("Triton", "FLASH", "tiles")}
    assert names["Triton"] == [case.name for case in CASES]
    assert names["FLASH"] == names["tiles"] == [case.name for case in CASES if case.is_plain]
    assert not {"sinks", "score_mod", "documents", "in one compiled graph"} & set(names["FLASH"])


def test_figures_of_a_wrong_kernel_are_marked() -> None:
    """By way and by what the row needs; a row that names no way is the default's, or that of the best."""
    row = {"measure": "LongNet-5, forward, FLASH: rate", "measured": 1.0, "detail": {}}
    spoiled = {"longnet forward": ["causal, FLASH"], "set forward": ["window, Triton"]}
    longnet, either = ("longnet forward",), ("longnet forward", "set forward")

    def marks(changes, needs):
        return _suite.marked(row | changes, needs, spoiled, ["Triton", "FLASH", "tiles"]).get("not_verified")

    assert marks({}, either) == ["causal, FLASH"]
    other = {"measure": "LongNet-5, forward, Triton: rate"}
    assert marks(other, longnet) is None
    assert marks(other, either) == ["window, Triton"]
    assert marks({"measure": "LongNet-5, forward, tiles: rate"}, either) is None
    unnamed = {"measure": "LongNet-5, forward: share"}
    assert marks(unnamed | {"not_verified": ["own check"]}, either) == ["own check", "window, Triton"]
    assert marks(unnamed | {"detail": {"best": "FLASH"}}, either) == ["causal, FLASH"]
    assert marks({"measured": None}, either) is None


def test_contestants_that_fail_or_are_wrong() -> None:
    """The one is left out and named, the other timed and named; a job beside them may fail too."""
    problem = HERE.draw(SIZE)

    def broken(q, k, v):
        raise RuntimeError("out of memory")

    def wrong(q, k, v):
        return TINY.attention()(q, k, v) * 1.1

    contestants = [
        Contestant(name, attention, problem, TINY)
        for name, attention in (("right", TINY.attention()), ("wrong", wrong), ("broken", broken))
    ]
    jobs = [Job("beside", lambda _: None), Job("odd job", lambda _: broken(1, 2, 3))]
    for part in ("forward", "backward", "forward + backward"):
        found = compare(contestants, HERE, part=part, repeats=2, extra=jobs)
        assert list(found.timings) == ["right", "wrong", "beside"]
        assert all(len(timing.seconds) == 2 for timing in found.timings.values())
        assert found.failed == dict.fromkeys(("odd job", "broken"), "RuntimeError: out of memory")
        assert found.missing("right") is None
        assert found.missing("right", "broken") == "broken: RuntimeError: out of memory"
        assert [text.partition(":")[0] for text in found.objections] == ["wrong"]
    rehearsed = compare(contestants, replace(HERE, rehearsing=True), part="forward", repeats=1)
    assert rehearsed.objections == ()


def test_machine_with_an_accelerator(monkeypatch) -> None:
    found = SimpleNamespace(
        name="NVIDIA H200", total_memory=150 << 30, multi_processor_count=132, major=9, minor=0, L2_cache_size=60 << 20
    )
    monkeypatch.setattr(_machine.torch.cuda, "get_device_properties", lambda device: found)
    printed = SimpleNamespace(stdout="580.1, 1980 MHz, 3201 MHz, 1980 MHz, 700.00 W\n")
    monkeypatch.setattr(_machine.subprocess, "run", lambda *args, **options: printed)
    told = _machine.machine("cuda")
    assert told["gpu"] == "NVIDIA H200"
    assert (told["driver"], told["sm_clock"], told["power_limit"]) == ("580.1", "1980 MHz", "700.00 W")

    def missing(*args, **options):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(_machine.subprocess, "run", missing)
    assert "driver" not in _machine.machine("cuda")
    assert _machine.versions("cuda")["flash_attention"] == "FA2"
    assert "gpu" not in _machine.machine()


@pytest.mark.parametrize(
    ("last", "wrong"),
    [
        ("5 passed, 3 warnings in 2.1s", 0),
        ("1 failed, 4 passed, 9 deselected in 60s", 1),
        ("1 passed, 2 errors in 1s", 2),
    ],
)
def test_outcome_of_the_device_tests(last, wrong) -> None:
    assert read_outcome(f"....\n{last}\n").measured == wrong
    assert isinstance(read_outcome("4 deselected in 1s\n"), Gap)


def test_gap_as_data() -> None:
    data = Gap("speed", at_least(1), "RuntimeError: one line\nanother").to_data()
    assert (data["measured"], data["met"]) == (None, None)
    assert data["measured_text"] == "not measured: RuntimeError: one line"
    assert data["detail"]["reason"].endswith("another")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "the device must be cuda or cpu; got 'tpu'"),
        (["G12"], "a name must be one of gpu_correctness, gpu_forward, gpu_backward"),
        (["--limit", "0"], "the limit must be above 0 seconds; got 0"),
        (["--out", __file__], "the results need a folder"),
        (["--unpack", __file__], "it must be a summary.json of this suite"),
        (["--unpack", "no/such.json"], "it must be a summary.json of this suite"),
        (["--limit", "soon"], "argument --limit: invalid"),
    ],
)
def test_bad_arguments(capsys, arguments, message) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


def test_devices_that_will_not_do(capsys) -> None:
    assert main(["--device", "cpu"]) == 2
    assert "--device cpu needs --small" in capsys.readouterr().err
    assert main(["--device", "cpu", "--small", "--flash-impl", "FA0"]) == 2
    assert "--flash-impl must be one that PyTorch lists" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main([]) == 2
        assert "PyTorch finds no CUDA device here" in capsys.readouterr().err


def test_rows_are_listed(capsys) -> None:
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[0] for line in lines] == list(SUITE)
    assert all(line.endswith("?") for line in lines)
