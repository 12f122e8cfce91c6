"""Branches as lists of blocks over their active tokens: the lists, the rule in them, what is hidden."""

from __future__ import annotations

from collections import Counter
from itertools import product

import torch
from hypothesis import assume, given
from torch import Tensor

from flexdilated import masks
from flexdilated.distributed import Sharding
from flexdilated.masks.orders import Placement
from flexdilated.masks.planning import Allowed, IntervalTerm, PaddedTerm, plan_at
from flexdilated.masks.planning.lowering import interval_terms
from tests.support.padded import padded_cases, padded_plan
from tests.support.placed import parts
from tests.support.strategies import block_sides


@given(padded_cases(), block_sides, block_sides)
def test_listed_blocks_hold_the_pairs(case, q_side, k_side):
    planned, times = padded_plan(case), torch.zeros(case.num_heads, case.num_queries, case.num_keys, dtype=torch.int64)
    for term in planned.terms:
        assert isinstance(term, PaddedTerm)
        times.index_put_(listed_pairs(term, q_side, k_side), torch.tensor(term.multiplicity), accumulate=True)
    assert torch.equal(times, case.counts())


@given(parts(complete=False), block_sides, block_sides)
def test_intervals_over_all_runs(part, q_side, k_side):
    """The same of terms over what a device holds, whatever runs of positions that is."""
    bound, sides = part.bind(), (part.placement.queries, part.placement.keys[0])
    terms = [interval_terms(each, times, bound, part.placement) for each, times in Counter(part.branches()).items()]
    assume(all(each is not None for each in terms))
    N = part.placement.num_tokens
    times = torch.zeros(part.num_heads, N, N, dtype=torch.int64)
    for term in (term for each in terms for term in each or ()):
        assert isinstance(term, IntervalTerm)
        times.index_put_(listed_pairs(term, q_side, k_side), torch.tensor(term.multiplicity), accumulate=True)
    q, k = (torch.cat([torch.arange(0), *(torch.arange(r.start, r.stop) for r in side)]) for side in sides)
    assert torch.equal(times[:, q][:, :, k], part.counts)
    assert int(times.sum()) == int(part.counts.sum())


def test_a_term_a_branch_however_the_tokens_are_held():
    """Zigzag shards on eight ranks, each turn of a ring: what is compiled is the same for all of them."""
    pattern, split = masks.longnet([512, 1024, 2048], [1, 2, 4]) & masks.causal(), Sharding(8192, 8, order="zigzag")
    options = {"num_heads": 4, "head_offset": 0, "num_heads_global": 4, "device": "cuda"}
    allowed = Allowed(windows=False, residues=False, lists_only=True)
    for mine, others in product(range(8), range(8)):
        held = Placement(split.ranges(mine), (split.ranges(others),), complete=False, num_tokens=8192)
        terms = plan_at(pattern, held, **options, allowed=allowed).terms
        assert len(terms) <= 3
        assert all(isinstance(term, IntervalTerm) for term in terms)
        assert [term.listed_blocks.blocks for term in terms] == [
            4 * len(term.in_blocks_of(128, 128).blocks(128, 128).row) for term in terms
        ]


def listed_pairs(term: PaddedTerm | IntervalTerm, q_side: int, k_side: int) -> tuple[Tensor, Tensor, Tensor]:
    """(head, query, key) of each pair: in a block that is listed; full blocks need no rule; the others have it."""
    term = term.in_blocks_of(q_side, k_side)
    blocks = term.blocks(q_side, k_side)
    N, M = blocks.num_q_slots, blocks.num_k_slots
    q_tokens, k_tokens = (slots_of(side, length) for side, length in ((term.q, N), (term.k, M)))
    q, k = torch.arange(N), torch.arange(M)
    heads = torch.arange(len(term.heads))[:, None, None]
    rule = term.mask_mod(torch.device("cpu"))(torch.tensor(0), heads, q[:, None], k)
    listed, full = torch.zeros(2, -(-N // q_side), -(-M // k_side), dtype=torch.bool)
    listed[blocks.row.long(), blocks.column.long()] = True
    full[blocks.row.long(), blocks.column.long()] = blocks.full
    listed, full = (each[q // q_side][:, k // k_side] for each in (listed, full))
    pairs = full | (listed & rule)
    held = (q_tokens >= 0)[:, :, None] & (k_tokens >= 0)[:, None]
    assert not (pairs & (q_tokens >= 0)[:, :, None] & (k_tokens < 0)[:, None]).any()
    assert torch.equal(pairs & held, rule & held)
    h, i, j = (pairs & held).nonzero(as_tuple=True)
    assert torch.equal(term.pairs_of_heads(), torch.bincount(h, minlength=len(term.heads)))
    by_block = (pairs & held).any(0).unflatten(0, (-1, q_side)).unflatten(2, (-1, k_side)).any(3).any(1)
    assert int(by_block.sum()) == len(blocks.row), "a listed block holds no pair"
    sides = zip(term.hidden(), (q_tokens, k_tokens), ((pairs & held).any(2), (pairs & held).any(1)), strict=True)
    for marked, tokens, seen in sides:
        lonely = (tokens >= 0) & ~seen
        assert torch.equal(lonely, torch.zeros_like(lonely) if marked is None else marked[0])
    return torch.tensor(term.heads)[h], q_tokens[h, i], k_tokens[h, j]


def slots_of(side, length: int) -> torch.Tensor:
    tokens = side.tokens()[:, 0]
    return torch.nn.functional.pad(tokens, (0, length - tokens.shape[1]), value=-1)
