"""The planner's cost model: what a list of terms computes and moves, and how long that should take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ._blocks import estimate_blocks
from ._layout import Layout, Permutation
from ._run_time import entry, tables
from ._term import Term

_SIDE = 128  # computed pairs are counted in blocks of this side
_HEAD_DIM = 64
_ELEMENT_BYTES = 4


@dataclass(frozen=True)
class Machine:
    """Rates of a device: what the cost model divides by."""

    dense_flops_per_s: float  # attention over long runs of slots
    block_flops_per_s: float  # attention over gathered blocks
    bytes_per_s: float
    launch_s: float


# Orders of magnitude are enough: the options differ by factors.
CPU = Machine(dense_flops_per_s=90e9, block_flops_per_s=50e9, bytes_per_s=8e9, launch_s=50e-6)
ACCELERATOR = Machine(dense_flops_per_s=400e12, block_flops_per_s=400e12, bytes_per_s=3e12, launch_s=20e-6)


@dataclass(frozen=True)
class Cost:
    """Work of a forward pass: pairs in listed blocks over all heads, bytes moved to gather and merge, kernels."""

    computed_pairs: int
    gather_bytes: int
    launches: int
    seconds: float


def machine_of(device: torch.device) -> Machine:
    return CPU if device.type == "cpu" else ACCELERATOR


def cost_of(terms: Sequence[Term], machine: Machine, given: Layout) -> Cost:
    """What the terms cost for one batch entry at head dim 64 in float32, for tokens that come in the order `given`."""
    pairs = [computed_pairs(term) for term in terms]
    moved = [_moved_bytes(term, given) for term in terms]
    seconds = sum(
        4 * _HEAD_DIM * count / (machine.block_flops_per_s if term.shape == "blocks" else machine.dense_flops_per_s)
        for term, count in zip(terms, pairs, strict=True)
    )
    seconds += sum(moved) / machine.bytes_per_s + len(terms) * machine.launch_s
    return Cost(sum(pairs), sum(moved), len(terms), seconds)


def computed_pairs(term: Term) -> int:
    """Pairs in the term's listed blocks of side 128, over its heads and folds; an estimate for block lists.

    Where run-time tables differ by batch entry, the first stands for all.
    """
    rows, columns = -(-term.q.num_slots // _SIDE), -(-term.k.num_slots // _SIDE)
    if term.shape == "dense":
        listed = rows * columns * len(term.heads)
    elif term.shape == "causal":
        listed = sum(min(row + 1, columns) for row in range(rows)) * len(term.heads)
    else:
        one = replace(term, rule=entry(term.rule, 0)) if tables(term.rule) else term
        mean = estimate_blocks(one.table_rule(), q_block=_SIDE, k_block=_SIDE)
        listed = round(mean * len(term.heads))
    return listed * _SIDE**2 * term.folds


def _moved_bytes(term: Term, given: Layout) -> int:
    """Copies of q, k, v into the term's layout and of out back, where the tokens are not given in that order."""
    if isinstance(term.q, Permutation):
        gathered = 0 if term.q == given else 4 * term.q.num_slots * len(term.heads)
    else:
        assert not isinstance(term.k, Permutation)
        slots = 2 * term.q.num_slots + 2 * term.k.num_slots
        gathered = 0 if term.q.step == 1 else slots * term.folds * len(term.heads)
    merged = 3 * term.q.num_slots * term.folds * len(term.heads)
    return (gathered * 2 + merged) * _HEAD_DIM * _ELEMENT_BYTES
