"""Machine constants, and the dtype, head dim and key/value heads of a call: costs and plans follow them."""

import json
from dataclasses import replace

import pytest
import torch

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines import Call
from flexdilated.engines.flex._flex_op import static_program
from flexdilated.masks.planning import ANYTHING, Candidates, OperandSizes, Option
from flexdilated.masks.planning._machine import ACCELERATOR, CPU
from flexdilated.masks.planning._planner import plan, recommended_layout
from flexdilated.tuning import MeasuredMachine

H, N = 4, 4096
DILATED = masks.dilated(1024, 4, offset=1)


@pytest.fixture(autouse=True)
def as_before():
    yield
    for device in ("cpu", "cuda"):
        masks.set_machine(None, device=device)


def bound(pattern=DILATED, num_tokens: int = N) -> masks.core.Bound:
    return pattern.bind(num_heads=H, num_queries=num_tokens, num_keys=num_tokens)


def options(operands: OperandSizes, pattern=DILATED, num_tokens: int = N) -> dict[str, Option]:
    (found,) = Candidates.of(bound(pattern, num_tokens), CPU, ANYTHING, operands).branches
    return {option.layout: option for option in found}


def test_a_plan_follows_its_operands() -> None:
    """Where residue order gains as much as its copies cost at 4 bytes a number, it is taken at 2 and not at 8.

    So it is where query heads share keys, which are copied once for them, and at a larger head dim nothing changes.
    """
    pattern = masks.dilated_window(left=127, right=0, rate=8)
    natural, residue = (options(OperandSizes(), pattern)[name].cost for name in ("natural", "residue 8"))
    more_bytes = residue.gather_bytes - natural.gather_bytes
    gained_s = natural.seconds - residue.seconds + more_bytes / CPU.bytes_per_s
    assert gained_s > 0
    masks.set_machine(replace(CPU, bytes_per_s=more_bytes / gained_s))

    def chosen(*operands: int) -> str:
        return plan(bound(pattern), operands=OperandSizes(*operands)).chosen[0].layout

    assert [chosen(2), chosen(4, 64, 2), chosen(2, 128)] == ["residue 8"] * 3
    assert [chosen(8), chosen(8, 64, 2), chosen(8, 128)] == ["natural"] * 3

    def of_flex(dtype: torch.dtype) -> object:
        q = torch.empty(1, H, N, 64, dtype=dtype)
        call = Call.at(q, q, pattern.text, num_heads_global=H)
        return static_program(call, q.device, operands=call.operands(q)).structure

    assert of_flex(torch.float64) == of_flex(torch.float32) != of_flex(torch.float16)


def test_dtypes_of_one_size_share_what_is_built() -> None:
    """And another size, head dim or number of key/value heads has a plan of its own."""
    masks.cache().clear()
    misses = []
    for dtype, dim, kv_heads in [
        (torch.float16, 16, 4),
        (torch.bfloat16, 16, 4),
        (torch.float32, 16, 4),
        (torch.float16, 32, 4),
        (torch.float16, 16, 2),
        (torch.bfloat16, 16, 2),
    ]:
        q = torch.zeros(1, H, 512, dim, dtype=dtype)
        k = torch.zeros(1, kv_heads, 512, dim, dtype=dtype)
        fd.attend(q, k, k, masks.dilated(256, 4), enable_gqa=True)
        misses.append(masks.cache().stats().misses)
    new = [after - before for before, after in zip([0, *misses], misses, strict=False)]
    assert [each > 0 for each in new] == [True, False, True, True, True, False]


OTHER = replace(CPU, dense_flops_per_s=1e6, launch_s=2.0)
# Where copies cost nothing a dilated branch is gathered and dense; where dense attention is slow, blocks are listed.
CHEAP_COPIES, SLOW_DENSE = replace(CPU, bytes_per_s=1e15), replace(CPU, dense_flops_per_s=1e8)
MEASURED = MeasuredMachine(OTHER, "cpu", "2026-11-21T00:00:00+00:00", {"dense": 1.1}).to_data()


def two_heads(N=4096):
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
    usual = plan(two_heads())
    masks.set_machine(OTHER)
    assert masks.machine() == OTHER
    other = plan(two_heads())
    assert other is not usual
    assert other.cost.seconds > 2.0
    assert masks.machine("meta") == ACCELERATOR
    masks.set_machine(None)
    assert plan(two_heads()) is usual
    masks.set_machine(replace(CPU, source="elsewhere"))
    assert plan(two_heads()) is usual, "where constants come from makes no difference"


def test_other_constants_lead_to_other_choices():
    q, outs, misses = torch.randn(1, 2, 512, 16), [], []
    for machine, layout in ((CHEAP_COPIES, "compact"), (SLOW_DENSE, "residue 4"), (CHEAP_COPIES, "compact")):
        masks.set_machine(machine)
        assert plan(two_heads()).chosen[0].layout == layout
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
