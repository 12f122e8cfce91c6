"""Contestants side by side: what fails or is wrong, the clocks, the kernels by name, the machine."""

import pytest
import torch

from bench import _checks, _jobs
from bench._checks import Contestant, compare
from bench._jobs import Job, Problem, Size
from bench._measures import Gap, at_least
from bench._rules import LONGNET_5, Window
from bench.device import _WINDOWS

TINY = LONGNET_5.shrunk(64)


@pytest.mark.parametrize("shape", [*_WINDOWS, ("small", 1, 0, 128), ("odd", 3, 9, 1)], ids=lambda shape: shape[0])
def test_window_rule_and_count(shape) -> None:
    window, num_tokens = Window(*shape), 512
    (allowed,) = window.masks(torch.arange(num_tokens), num_tokens=num_tokens, num_heads=2)
    assert window.pairs(num_tokens=num_tokens, num_heads=2) == int(allowed.sum())
    tokens = torch.arange(num_tokens)
    mask_mod = window.pattern().bind(num_heads=2, num_queries=num_tokens, num_keys=num_tokens).mask_mod()
    assert torch.equal(mask_mod(0, 0, tokens[:, None], tokens[None]).expand_as(allowed[0]), allowed[0])


def test_contestants_that_fail_or_are_wrong() -> None:
    """Failing contestants and jobs are left out and named, wrong ones are timed and named."""
    problem = Problem.draw(Size(256, num_heads=4, head_dim=16), dtype=torch.bfloat16)

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
        found = compare(contestants, part, repeats=2, tolerance=2e-2, jobs=jobs)
        assert list(found.timings) == ["right", "wrong", "beside"]
        assert all(len(timing.seconds) == 2 for timing in found.timings.values())
        assert found.failed == dict.fromkeys(("broken", "odd job"), "RuntimeError: out of memory")
        assert list(found.objections) == ["wrong"]
        gap = found.row("r", at_least(1), "broken", "right")
        assert isinstance(gap, Gap)
        assert gap.reason == "broken: RuntimeError: out of memory"
        marked = found.row("r", at_least(1), "right", "wrong")
        assert [text.partition(":")[0] for text in marked.not_verified] == ["wrong"]
        assert found.row("r", at_least(1), "right", "beside").not_verified == ()
    assert compare(contestants, "forward", repeats=1, tolerance=None).objections == {}
    # A rate is work a second; without work, both do the same.
    timings = {name: _jobs.Timing(name, (seconds,)) for name, seconds in (("own", 2.0), ("peer", 6.0))}
    found = _checks.Comparison(timings, {}, {}, {})
    assert found.row("r", at_least(1), "own", "peer").measured == 3.0
    row = found.row("r", at_least(1), "own", "peer", {"own": 4e12, "peer": 6e12}, scale=100)
    assert row.measured == 200.0
    assert row.detail["tera_a_second"] == {"own": 2.0, "peer": 1.0}
