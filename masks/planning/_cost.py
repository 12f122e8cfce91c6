"""The planner's cost model: what a list of terms computes and moves, and how long that should take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..orders import Compact, Layout, Permutation
from .lowering._term import Term
from .machine._machine import Machine

SLOTS_AT_ONCE = 1 << 14  # of a term's copies: enough for a kernel to share among cores, small beside the inputs
_HEAD_DIM = 64


@dataclass(frozen=True)
class Cost:
    """Work of a forward pass: pairs in listed blocks over all heads, bytes moved to gather and merge, kernels."""

    computed_pairs: int
    gather_bytes: int
    launches: int
    seconds: float


def cost_of(
    terms: Sequence[Term], machine: Machine, given: Layout, *, head_dim: int = _HEAD_DIM, element_bytes: int = 4
) -> Cost:
    """What the terms cost for one batch entry, for tokens that come in the order `given`.

    The machine's rates are those at head dim 64 in float32; they are taken to hold for others.
    """
    work = [_work(term, machine) for term in terms]
    moved = sum(_moved_numbers(term, given) for term in terms) * head_dim * element_bytes
    launches = sum(_launches(term) for term in terms)
    seconds = 4 * head_dim * sum(at_rate for _, at_rate in work)
    seconds += moved / machine.bytes_per_s + launches * machine.launch_s
    return Cost(sum(pairs for pairs, _ in work), moved, launches, seconds)


def least_seconds(terms: Sequence[Term], wanted_pairs: float, machine: Machine, given: Layout) -> float:
    """What block lists cost at least that hold these pairs and nothing else, at the fastest rate of any side."""
    fastest = max(max(rates.runs_flops_per_s, rates.plain_flops_per_s) for rates in machine.blocks)
    moved = sum(_moved_numbers(term, given) for term in terms) * _HEAD_DIM * 4
    launches = sum(_launches(term) for term in terms)
    return 4 * _HEAD_DIM * wanted_pairs / fastest + moved / machine.bytes_per_s + launches * machine.launch_s


def least_seconds_in_larger(side: int, cost: Cost, terms: Sequence[Term], machine: Machine) -> float:
    """What terms of this cost cost at least in blocks of a larger side, which hold all that is computed now."""
    rates = machine.rates(side)
    fastest = max(rates.runs_flops_per_s, rates.plain_flops_per_s)
    work = [_work(term, machine) for term in terms if term.shape == "blocks"]
    return cost.seconds + 4 * _HEAD_DIM * sum(pairs / fastest - at_rate for pairs, at_rate in work)


def computed_pairs(term: Term) -> int:
    """Pairs in the term's listed blocks, over its heads and folds; an estimate for block lists."""
    return round(sum(term.listed_blocks) * term.block_side**2)


def _work(term: Term, machine: Machine) -> tuple[int, float]:
    """(computed pairs, the sum of these over the rate of each)."""
    runs, plain, masked = (blocks * term.block_side**2 for blocks in term.listed_blocks)
    if term.shape == "blocks":
        rates = machine.rates(term.block_side)
        slowness = runs / rates.runs_flops_per_s + plain / rates.plain_flops_per_s + masked / rates.masked_flops_per_s
    else:
        slowness = plain / (machine.causal_flops_per_s if term.shape == "causal" else machine.dense_flops_per_s)
    return round(runs + plain + masked), slowness


def _launches(term: Term) -> int:
    """Kernel calls: one, or one for each portion of what a dense kernel is given in copies."""
    if not isinstance(term.q, Compact) or not term.q.is_copied:
        return 1
    return -(-term.q.num_slots * term.folds * len(term.heads) // SLOTS_AT_ONCE)


def _moved_numbers(term: Term, given: Layout) -> int:
    """Rows copied of q, k, v into the term's layout and of out back, where the tokens are not given in that order."""
    if isinstance(term.q, Permutation):
        gathered = 0 if term.q == given else 4 * term.q.num_slots
    else:
        gathered = sum(2 * side.num_slots for side in (term.q, term.k) if side.is_copied)
    return (gathered * 2 + 3 * term.q.num_slots) * term.folds * len(term.heads)
