"""Cost model of the planner: pairs computed and bytes moved by a list of terms, and predicted seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..core import device_kind, outside_torch_modes
from ..orders import Compact, Layout, Padded, Permutation
from ._machine import Machine
from .lowering._table import TableTerm
from .lowering._term import Term

SLOTS_AT_ONCE = 1 << 14  # slots copied in one chunk: enough to share among cores, few compared with the inputs


class OperandSizes(NamedTuple):
    """Sizes of an attention call's tensors, on which costs depend; part of the key of cached plans.

    element_bytes: bytes of an element.
    groups: number of query heads for each key-value head.
    """

    element_bytes: int = 4
    head_dim: int = 64
    groups: int = 1

    @staticmethod
    def usual_on(kind: str) -> OperandSizes:
        """Return sizes to assume for a call on a kind of device, such as "cpu", if its tensors are not known yet.

        These are head dim 64, one query head per key-value head, and elements of 4 bytes on CPU, 2 bytes elsewhere.
        """
        return _SINGLE if device_kind(kind).on_host else _HALF

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward pass for one pair of a query and a key, in one head."""
        return 4 * self.head_dim

    @property
    def row_bytes(self) -> int:
        """Bytes of the vector of one token and head."""
        return self.head_dim * self.element_bytes


_SINGLE, _HALF = OperandSizes(), OperandSizes(element_bytes=2)


class Cost(NamedTuple):
    """Predicted cost of a forward pass.

    computed_pairs: pairs in computed blocks, over all heads.
    gather_bytes: bytes read and written to gather q, k, v and merge outputs.
    launches: number of kernel calls.
    """

    computed_pairs: int
    gather_bytes: int
    launches: int
    seconds: float

    @classmethod
    def total(cls, costs: Iterable[Cost]) -> Cost:
        """Return the cost whose fields are sums of the fields of these costs."""
        return cls(*map(sum, zip(cls(0, 0, 0, 0), *costs, strict=True)))


@outside_torch_modes
def cost_of(terms: Sequence[Term], machine: Machine, given: Layout, operands: OperandSizes) -> Cost:
    """Return the predicted cost of a forward pass of these terms for one batch entry.

    given: order of the tokens in q, k and v.

    The machine's rates are for one head dim and dtype, and are used for all head dims and dtypes.
    """
    work = [_pairs_and_unit_seconds(term, machine) for term in terms]
    unit_s = sum((unit_s for _, unit_s in work), 0.0)
    return _cost_of_pairs(sum(pairs for pairs, _ in work), unit_s, terms, machine, given, operands)


def least_seconds(
    terms: Sequence[Term], wanted_pairs: float, machine: Machine, given: Layout, operands: OperandSizes
) -> float:
    """Return a lower bound on the predicted seconds of terms if their block lists have at least `wanted_pairs` pairs.

    It is the time of these pairs, over all heads, at the fastest `runs` or `plain` rate of any block size, plus that of
    the terms' copies and kernel calls. It need not bound a term without block lists, whose kernel may be faster.

    given: order of the tokens in q, k and v.
    """
    fastest = max(max(rates.runs_flops_per_s, rates.plain_flops_per_s) for rates in machine.blocks)
    return _cost_of_pairs(0, wanted_pairs / fastest, terms, machine, given, operands).seconds


def _cost_of_pairs(
    pairs: int, unit_s: float, terms: Sequence[Term], machine: Machine, given: Layout, operands: OperandSizes
) -> Cost:
    """Return the cost of the terms for this number of computed pairs.

    unit_s: seconds that the kernels would take for all pairs if a pair needed one FLOP.
    """
    moved = sum(_num_moved_vectors(term, given, operands.groups) for term in terms) * operands.row_bytes
    launches = sum(_num_launches(term, machine.calls_a_list) for term in terms)
    seconds = operands.flops * unit_s + (moved / machine.bytes_per_s + launches * machine.launch_s)
    return Cost(pairs, moved, launches, seconds)


def least_seconds_in_larger_blocks(
    side: int, cost: Cost, terms: Sequence[Term], machine: Machine, operands: OperandSizes
) -> float:
    """Return a lower bound on the predicted seconds of these terms if their block lists had blocks of this side.

    It assumes the faster of the `runs` and `plain` rates of these blocks.

    side: queries and keys of a block; larger than at present, so that all pairs computed at present are computed too.
    cost: predicted cost in blocks of the present side.
    """
    rates = machine.rates(side)
    fastest = max(rates.runs_flops_per_s, rates.plain_flops_per_s)
    work = [_pairs_and_unit_seconds(term, machine) for term in terms if term.shape == "blocks"]
    return cost.seconds + operands.flops * sum(pairs / fastest - unit_s for pairs, unit_s in work)


def computed_pairs(term: Term) -> int:
    """Return the number of pairs that the kernel of a term computes, allowed or not, over all heads and folds.

    Blocks that extend past the last slot count in full. For block lists, except those of a `SharedListTerm`, the number
    is an estimate.
    """
    return round(sum(term.listed_blocks) * term.block_side**2)


def _pairs_and_unit_seconds(term: Term, machine: Machine) -> tuple[int, float]:
    """Return (number of computed pairs of a term, seconds that its kernel would take if a pair needed one FLOP)."""
    runs, plain, masked = (blocks * term.block_side**2 for blocks in term.listed_blocks)
    if term.shape == "blocks":
        rates = machine.rates(term.block_side)
        unit_s = runs / rates.runs_flops_per_s + plain / rates.plain_flops_per_s + masked / rates.masked_flops_per_s
    else:
        unit_s = plain / (machine.causal_flops_per_s if term.shape == "causal" else machine.dense_flops_per_s)
    return round(runs + plain + masked), unit_s


def _num_launches(term: Term, calls_a_list: int) -> int:
    """Return the number of kernel calls of a term.

    A term with block lists has `calls_a_list` calls for each list, and a `TableTerm` gives its own number. Any other
    term has one call, or, if its queries are copied in a `Compact` order, one for each `SLOTS_AT_ONCE` query slots in
    all its heads and folds.
    """
    if isinstance(term, TableTerm):
        return term.work.calls
    if term.shape == "blocks":
        return calls_a_list * (max(term.tables()) + 1)
    if not isinstance(term.q, Compact) or not term.q.is_copied:
        return 1
    return -(-term.q.num_slots * term.folds * len(term.heads) // SLOTS_AT_ONCE)


def _num_moved_vectors(term: Term, given: Layout, groups: int) -> int:
    """Return the number of token vectors read and written to gather q, k, v and to merge outputs.

    given: order of the tokens in q, k and v; nothing is gathered if the term uses this order.
    groups: number of query heads for each key-value head.
    """
    if isinstance(term, TableTerm):
        return term.work.moved_vectors
    if isinstance(term.q, Permutation):
        queries = keys = 0 if term.q == given else 2 * term.q.num_slots
    else:
        queries, keys = (2 * side.num_slots if side.is_copied else 0 for side in (term.q, term.k))
    of_queries = (queries * 2 + 3 * term.q.num_slots) * len(term.heads)
    return (of_queries + keys * 2 * _num_gathered_heads(term, groups)) * term.folds


def _num_gathered_heads(term: Term, groups: int) -> int:
    """Return how many heads of keys are copied: one for each query head, or one for each key-value head.

    Keys are copied for each query head if heads differ in the tokens of their `Compact` or `Padded` order, and always
    for a single fold, or evenly spaced folds, of a `Compact` order.
    """
    if isinstance(term.k, Compact | Padded):
        starts = term.k.starts if isinstance(term.k, Compact) else term.k.offsets
        if len(set(starts)) > 1 or (isinstance(term.k, Compact) and term.k.fold_starts is None):
            return len(term.heads)
    return len({head // groups for head in term.heads})
