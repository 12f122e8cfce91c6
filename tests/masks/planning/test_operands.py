"""Costs follow a call's dtype, head dim and key/value heads, and so do plans; plans are kept by what costs need."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines._gather import term_sides
from flexdilated.masks.planning import ANYTHING, Candidates, OperandSizes, Option
from flexdilated.masks.planning._cost import _moved_rows
from flexdilated.masks.planning._machine import CPU
from flexdilated.masks.planning._planner import Plan, plan

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


SIZES = torch.tensor([700, 300, 700, 700, 300, 300])
UNEVEN = masks.causal() & masks.documents(torch.arange(6).repeat_interleave(SIZES))
GATHERED = {
    "strided": (DILATED, "compact", N),
    "strided, offset by head": (masks.dilated(1024, 4), "compact", N),
    "residues": (DILATED, "residue 4", N),
    "uneven folds": (UNEVEN, "windows", 3000),
}


ONCE = ("residues", "uneven folds")  # a key/value head: its query heads read the same slots


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("name", GATHERED)
def test_keys_are_counted_for_the_heads_for_which_the_engine_copies_them(name, groups) -> None:
    """Against what its gathers return, where these are no views."""
    pattern, layout, num_tokens = GATHERED[name]
    option = options(OperandSizes(groups=groups), pattern, num_tokens)[layout]
    planned = Plan(bound(pattern, num_tokens), option.given, option.terms, ((option,),))
    q, k = (torch.zeros(1, heads, num_tokens, 2) for heads in (H, H // groups))

    def copied(side, x: Tensor) -> int:
        taken = side.take(x)
        return 0 if taken.untyped_storage()._cdata == x.untyped_storage()._cdata else taken.numel() // 2

    for term in option.terms:
        queries, keys = term_sides(term, planned, groups, None)
        merged = 3 * term.q.num_slots * term.folds * H
        # q and out, k and v: each is read and written.
        expected = 4 * copied(queries, q) + 4 * copied(keys, k) + merged
        assert copied(keys, k) == term.k.num_slots * term.folds * (H // groups if name in ONCE else H)
        assert _moved_rows(term, option.given, groups) == expected


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
        return plan(bound(pattern), operands=OperandSizes(*operands)).options[0][0].layout

    assert [chosen(2), chosen(4, 64, 2), chosen(2, 128)] == ["residue 8"] * 3
    assert [chosen(8), chosen(8, 64, 2), chosen(8, 128)] == ["natural"] * 3


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
