"""Machine constants: what is refused, how they are set and read, and that plans follow those in use."""

import json
from dataclasses import replace

import pytest
import torch

import flexdilated as fd
from flexdilated import masks
from flexdilated.masks.planning._machine import ACCELERATOR, CPU
from flexdilated.masks.planning._planner import plan, recommended_layout
from flexdilated.tuning import MeasuredMachine

OTHER = replace(CPU, dense_flops_per_s=1e6, launch_s=2.0)
# Where copies cost nothing a dilated branch is gathered and dense; where dense attention is slow, blocks are listed.
CHEAP_COPIES, SLOW_DENSE = replace(CPU, bytes_per_s=1e15), replace(CPU, dense_flops_per_s=1e8)
MEASURED = MeasuredMachine(OTHER, "cpu", "2026-11-21T00:00:00+00:00", {"dense": 1.1}).to_data()


@pytest.fixture(autouse=True)
def as_before():
    yield
    masks.set_machine(None)


def bound(N=4096):
    return masks.dilated(1024, 4).bind(num_heads=2, num_queries=N, num_keys=N)


def test_constants_must_be_positive_finite_numbers():
    for name in ("dense_flops_per_s", "causal_flops_per_s", "bytes_per_s", "launch_s", "backward_ratio"):
        for value in (0, -1.0, float("nan"), float("inf"), "1", True, None):
            with pytest.raises(ValueError, match=f"{name} must be a positive finite number"):
                replace(CPU, **{name: value})
    for blocks in ((), CPU.blocks[::-1], CPU.blocks[:1] * 2, ("x",)):
        with pytest.raises(ValueError, match="blocks must hold at least one BlockRates, in ascending"):
            replace(CPU, blocks=blocks)


def test_rates_of_a_side_that_was_not_measured_are_those_of_the_nearest():
    assert [CPU.rates(side).side for side in (1, 64, 95, 97, 128, 256, 4096)] == [64, 64, 64, 128, 128, 256, 256]
    assert ACCELERATOR.rates(64).side == 128


def test_a_plan_belongs_to_the_constants_in_use():
    usual = plan(bound())
    masks.set_machine(OTHER)
    assert masks.machine() == OTHER
    other = plan(bound())
    assert other is not usual
    assert other.cost.seconds > 2.0
    assert masks.machine("meta") == ACCELERATOR
    masks.set_machine(None)
    assert plan(bound()) is usual
    masks.set_machine(replace(CPU, source="elsewhere"))
    assert plan(bound()) is usual, "where constants come from makes no difference"


def test_other_constants_lead_to_other_choices():
    q, outs, misses = torch.randn(1, 2, 512, 16), [], []
    for machine, layout in ((CHEAP_COPIES, "compact"), (SLOW_DENSE, "residue 4"), (CHEAP_COPIES, "compact")):
        masks.set_machine(machine)
        assert plan(bound()).options[0][0].layout == layout
        recommended = recommended_layout(masks.dilated(1024, 4), 4096, num_heads=2)
        assert (recommended is None) == (machine is CHEAP_COPIES)
        outs.append(fd.attend(q, q, q, masks.dilated(256, 4)))
        misses.append(masks.cache().stats().misses)
    torch.testing.assert_close(outs[0], outs[1])
    assert misses[1] > misses[0], "planned anew"
    assert misses[2] == misses[1], "and found again"


def test_constants_of_a_file_are_those_that_were_measured(tmp_path):
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps(MEASURED), encoding="utf-8")
    masks.set_machine(path)
    assert (masks.machine(), masks.machine().source) == (OTHER, str(path))
    assert masks.machine("cuda") == ACCELERATOR, "it speaks of the CPU only"
    masks.set_machine(None)
    assert masks.machine() == CPU
    with pytest.raises(ValueError, match="kind must be 'cuda'; got 'cpu'"):
        masks.set_machine(str(path), device="cuda")
    assert masks.machine("cuda") == ACCELERATOR
