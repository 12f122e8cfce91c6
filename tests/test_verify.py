"""`doctor --verify`: what is right is found right; what is wrong, raises, hangs or dies is told with its cause."""

import json
import sys
from collections.abc import Callable, Sequence

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from flexdilated import masks
from flexdilated.cli import _verify, _verify_jobs, _verify_measure, _verify_ranks, main
from flexdilated.cli._verify_jobs import Job, trained
from flexdilated.cli._verify_measure import Measured
from flexdilated.cli._verify_problem import BRANCHES, HEADS, Problem, causal, dilated, documents, error_of, window
from flexdilated.cli._verify_ranks import NoResult
from tests import verify_jobs

CPU = torch.device("cpu")
GOOD = Measured(error=1e-7, forward_s=0.001, backward_s=0.002, memory_bytes=2048)


@pytest.fixture
def only(monkeypatch) -> Callable[..., None]:
    """Verify these jobs, and these results of ranks, instead of all."""

    def replace(jobs: Sequence[Job] = (), ranks: dict[str, Measured | NoResult] | None = None) -> None:
        found = ranks or {}
        monkeypatch.setattr(_verify, "available_devices", lambda: ("cpu",))
        monkeypatch.setattr(_verify, "jobs", lambda device: iter(jobs))
        monkeypatch.setattr(_verify_ranks, "JOBS", dict.fromkeys(found))
        monkeypatch.setattr(_verify_ranks, "on_ranks", lambda jobs: list(found.values()))

    return replace


def job(name: str, run: Callable[[torch.device], Measured], skipped: str | None = None) -> Job:
    return Job(name, run, CPU, skipped)


def fails(error: Exception) -> Callable[[torch.device], Measured]:
    def run(device: torch.device) -> Measured:
        raise error

    return run


def test_rules_by_hand_are_those_of_the_patterns() -> None:
    """What is verified is what the patterns mean: two statements of each rule agree at every pair."""
    for by_hand, pattern in (
        (causal(120), masks.causal()),
        (window(9, 120), masks.local_window(left=9, right=0)),
        (dilated(tokens=600), masks.longnet(*BRANCHES) & masks.causal()),
    ):
        h, tokens = torch.arange(HEADS)[:, None, None], torch.arange(by_hand.shape[-1])
        rules = [branch.mask_mod(num_heads=HEADS, device=CPU) for branch in pattern.branches()]
        batch = torch.zeros((), dtype=torch.int64)
        counted = sum(rule(batch, h, tokens[:, None], tokens).expand(by_hand.shape).long() for rule in rules)
        assert torch.equal(by_hand, counted)
    packed = documents(torch.tensor([0] * 40 + [1] * 25 + [2] * 55))
    assert torch.equal(packed[3], torch.block_diag(*(torch.ones(size, size).tril() for size in (40, 25, 55))).long())


def test_the_exact_results_are_those_of_torch() -> None:
    problem = Problem.of(causal(50), kv_heads=2)
    q, k, v = (x.clone().requires_grad_() for x in (problem.q, problem.k, problem.v))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(problem.exact(), (out, *torch.autograd.grad(out, (q, k, v), problem.grad)))


def test_an_empty_row_is_zero() -> None:
    problem = Problem.of(causal(8) * (torch.arange(8)[:, None] > 2))
    out, *grads = problem.exact()
    assert out[:, :, :3].abs().max() == 0
    assert all(torch.isfinite(x).all() for x in (out, *grads))


def test_errors_are_relative_and_never_lost() -> None:
    exact = torch.tensor([10.0, -20.0], dtype=torch.float64)
    assert error_of((torch.tensor([10.0, -19.0]),), (exact,)) == pytest.approx(0.05)
    assert error_of((torch.tensor([10.0, float("nan")]),), (exact,)) == float("inf")
    with pytest.raises(ValueError, match=r"a result must have shape \(2,\); got \(1,\)"):
        error_of((torch.tensor([10.0]),), (exact,))


@pytest.mark.parametrize(
    "name", ["attend, documents at run time", "attend, grouped heads", "MultiheadDilatedAttention"]
)
def test_a_job_bites(monkeypatch, name: str) -> None:
    """A result that is a little off, forward or backward, is wrong; the job's own result is right."""
    (found,) = [each for each in _verify_jobs.jobs(CPU) if each.name == name]
    assert found.run(CPU).error < 1e-5
    right = _verify_measure.gradients
    monkeypatch.setattr(_verify_jobs, "gradients", lambda *given: tuple(1.001 * x for x in right(*given)))
    assert found.run(CPU).error > 5e-4


def test_wrong_results_of_attend_are_seen_in_every_job_that_uses_it(monkeypatch) -> None:
    right = _verify_jobs.attend

    def shifted(q, k, v, pattern, **options):
        return right(q, k, v, pattern, **options) + 1e-3

    monkeypatch.setattr(_verify_jobs, "attend", shifted)
    tried = [each for each in _verify_jobs.jobs(CPU) if each.name in ("engine tiles", "attend, causal")]
    assert [_verify._tried(each).word for each in tried] == ["WRONG", "WRONG"]


def test_all_right(only, capsys) -> None:
    only([job("one", lambda device: GOOD)], {"two": GOOD})
    assert main(["doctor", "--verify"]) == 0
    printed = capsys.readouterr().out
    assert ["one", "cpu", "1e-07", "2", "KiB", "1", "ms", "2", "ms"] in [line.split() for line in printed.splitlines()]
    assert printed.splitlines()[-1].startswith("All 2 that were tried are right, in ")


def test_each_failure_is_told_with_its_cause(only, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    off = Measured(error=0.01, forward_s=0.001, backward_s=None, memory_bytes=None)
    only(
        [
            job("good", lambda device: GOOD),
            job("off", lambda device: off),
            job("nowhere", lambda device: Measured(float("inf"), 1.0, None, None)),
            job("broken", fails(RuntimeError("no kernel\nfor this"))),
            job("lacking", fails(AssertionError()), "no compiler"),
        ],
        {"far": NoResult("rank 1 of 2 did not end within 30 s, and was ended")},
    )
    assert main(["doctor", "--verify"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "* off on cpu is 1.0e-02 away from the float64 result, and 1e-04 is the most" in lines
    assert "* nowhere on cpu is inf away from the float64 result, and 1e-04 is the most" in lines
    assert "* broken on cpu raises RuntimeError: no kernel" in lines
    assert "* far on 2 ranks fails: rank 1 of 2 did not end within 30 s, and was ended" in lines
    assert "* lacking on cpu is skipped: no compiler" in lines
    assert lines[-1].startswith("4 of 5 are not right, in ")
    words = {line.split()[0]: line for line in lines if line}
    assert "WRONG 1e-02" in words["off"]
    assert "FAILED" in words["broken"]
    assert "skipped" in words["lacking"]


def test_json(only, capsys) -> None:
    only(
        [job("one", lambda device: GOOD), job("nowhere", lambda device: Measured(float("inf"), 1.0, None, None))],
        {"far": NoResult("rank 0 of 2 ended with exit code 7")},
    )
    assert main(["doctor", "--verify", "--json"]) == 1
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    one, nowhere, far = found["jobs"]
    assert not found["works"]
    assert one == {
        **{"name": "one", "device": "cpu", "verdict": "right", "error": 1e-7, "forward_s": 0.001},
        **{"backward_s": 0.002, "memory_bytes": 2048, "cause": None},
    }
    assert (nowhere["verdict"], nowhere["error"]) == ("wrong", "inf")
    assert (far["verdict"], far["cause"]) == ("failed", "fails: rank 0 of 2 ended with exit code 7")


def test_json_without_verify_is_bad_usage(capsys) -> None:
    assert main(["doctor", "--json"]) == 2
    assert "--json needs --verify; got it without" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's account of the process")
def test_memory_is_what_a_step_holds_at_most() -> None:
    held: list[torch.Tensor] = []

    def forward() -> torch.Tensor:
        held[:] = [torch.ones(8 << 20)]  # 32 MiB
        held[:] = [torch.ones(1 << 20)]
        return held[0]

    _, _, memory = _verify_measure.measure(forward, None, CPU)
    assert memory is not None
    assert 30 << 20 < memory < 45 << 20


def test_time_is_that_of_each_direction(monkeypatch) -> None:
    clock = iter([0, 1, 3, 10, 11, 18, 20, 21, 24])
    monkeypatch.setattr(_verify_measure, "perf_counter", lambda: next(clock))
    assert _verify_measure.measure(lambda: torch.ones(1), lambda out: None, CPU)[:2] == (1, 3)


@pytest.mark.slow
def test_ranks_join_what_they_measured_and_a_hang_ends() -> None:
    """The hang ends its job and those after it; what came before stays."""
    jobs = (verify_jobs.fine, verify_jobs.wrong, verify_jobs.hangs, verify_jobs.fine)
    fine, wrong, hung, after = _verify_ranks.on_ranks(jobs, job_s=2.0)
    assert fine == Measured(error=2e-7, forward_s=1.5, backward_s=None, memory_bytes=1001)
    assert wrong == Measured(error=0.5, forward_s=1.0, backward_s=2.0, memory_bytes=None)
    assert str(hung) == "rank 0 of 2 did not end within 2 s, and was ended"
    assert str(after) == "was not tried, as the job before it came to no result"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "cause"),
    [
        (verify_jobs.raises, "rank 1 of 2 raises ZeroDivisionError: by this rank\nand no other"),
        (verify_jobs.dies, "rank 1 of 2 ended with exit code 7"),
    ],
)
def test_ranks_that_raise_or_die(broken: _verify_ranks.RankJob, cause: str) -> None:
    """The other one waits forever, and is ended at once."""
    (found,) = _verify_ranks.on_ranks((broken,), job_s=600.0)
    assert isinstance(found, NoResult)
    assert str(found) == cause


@pytest.mark.slow
def test_everything_is_right_here(capsys, monkeypatch) -> None:
    """All jobs but that of flex, whose compiler takes its time: it has tests of its own."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    status = main(["doctor", "--verify", "--json"])
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)["jobs"]}
    assert {name: each["cause"] for name, each in found.items() if each["verdict"] not in ("right", "skipped")} == {}
    assert status == 0
    assert {
        *("engine tiles", "engine reference", "attend, causal", "BlockSparseAttention", "DilatedAttention", "LongNet"),
        *("KVCache, decode as prefill", "RingDilatedAttention, ring", "HeadParallelDilatedAttention"),
    } <= set(found)
    assert found["engine flex, inference"]["cause"].startswith("no C++ compiler found")
    assert all(each["forward_s"] > 0 for each in found.values() if each["verdict"] == "right")


@pytest.mark.slow
def test_the_job_of_flex() -> None:
    (flex,) = [each for each in _verify_jobs.jobs(CPU) if each.name.startswith("engine flex")]
    assert flex.skipped is None
    assert flex.run(CPU).error < 1e-5


def test_a_module_is_verified_as_it_is_given() -> None:
    """`trained` compares what it is given: the window of another size is wrong."""
    from flexdilated import BlockSparseAttention

    module = BlockSparseAttention(masks.local_window(left=98, right=0))
    assert trained(module, Problem.of(window(98)), CPU).error < 1e-5
    assert trained(module, Problem.of(window(99)), CPU).error > 1e-2
