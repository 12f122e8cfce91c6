"""Planner: chooses the terms that compute a pattern, by cost among its layouts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch

from ..._torch_private import graph_constant
from ..core import Bound, Expression, advises, plans
from ..orders import Compact, Layout, residue_rate
from ..plan_cache import cache, debug_wanted, in_line, log
from ..text import read_text
from ._cost import Cost, Operands
from ._machine import Machine, machine_of
from ._options import ANYTHING, Allowed, Candidates, Choice, Option, way_of
from .lowering._term import Term
from .lowering._ways import MAX_RESIDUE_RATE, shared_terms

_MOST_BRANCHES = 8  # logged one by one


@dataclass(frozen=True)
class Plan:
    """How a bound pattern is computed: the terms to run and merge, and the options they were chosen from.

    `layout` is the order in which the terms expect q, k and v. `options` holds for each distinct branch every option
    compared, the chosen one first; if all branches are computed together, it has one tuple for all of them. `together`
    holds the options for all branches together, cheapest first.
    """

    bound: Bound
    layout: Layout
    terms: tuple[Term, ...]
    options: tuple[tuple[Option, ...], ...]
    together: tuple[Option, ...] = ()

    @classmethod
    def of(
        cls, bound: Bound, layout: Layout, options: tuple[tuple[Option, ...], ...], together: tuple[Option, ...] = ()
    ) -> Plan:
        """The plan that takes the first of each tuple of options."""
        return cls(bound, layout, tuple(term for first, *_ in options for term in first.terms), options, together)

    @property
    def shares_rows(self) -> bool:
        """True if several terms contribute to one row of the output, so that their results are merged by lse."""
        return len(self.options) > 1 or any(options[0].shares_rows for options in self.options)

    @property
    def cost(self) -> Cost:
        """Sum over the chosen options."""
        chosen = [options[0].cost for options in self.options]
        return Cost(
            sum(cost.computed_pairs for cost in chosen),
            sum(cost.gather_bytes for cost in chosen),
            sum(cost.launches for cost in chosen),
            sum(cost.seconds for cost in chosen),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the plan, which holds no tables: a few numbers for each head and term, two for each uneven fold."""
        terms = [term for options in self.options for option in options for term in option.terms]
        uneven = (term for term in terms if isinstance(term.q, Compact) and term.q.fold_starts is not None)
        return sum(200 + 24 * len(term.heads) for term in terms) + sum(16 * term.folds for term in uneven)

    def __repr__(self) -> str:
        return f"Plan({_bound_text(self.bound)}: {_ways(self)})"


@plans
def plan(
    bound: Bound,
    *,
    device: torch.device | str = "cpu",
    layout: Layout | None = None,
    allowed: Allowed = ANYTHING,
    choice: Choice | None = None,
    operands: Operands | None = None,
) -> Plan:
    """The cached plan of a bound pattern on this kind of device, from the terms that an engine is `allowed`.

    Costs are for `operands`; by default for the device's usual ones.
    With `layout` the inputs come in that order: the plan then runs in it or, if that is cheaper including the copies,
    in the natural order; see `Plan.layout`. A `choice` replaces the predicted costs in the natural order.
    """
    kind = torch.device(device).type
    machine, operands = machine_of(kind), operands or Operands.usual_on(kind)
    return cache().get(
        ("plan", bound.key(), kind, machine.text, layout, allowed, choice, operands),
        lambda: _logged(_plan(bound, machine, layout, allowed, choice, operands), kind, choice),
        lambda made: made.nbytes,
        pattern=bound.pattern,
    )


@advises()
def recommended_layout(
    pattern: Expression, num_tokens: int, *, num_heads: int, device: torch.device | str = "cpu"
) -> Layout | None:
    """The layout in which a whole model should keep its tokens for this pattern; None for the natural order.

    Tensors that the pattern carries are read now; other values may give another result. If they differ by batch entry,
    costs are summed over distinct entries. Inside torch.compile the result is a constant of the graph, for the number
    of tokens at tracing. Raises ValueError for run-time tensors that are missing or do not fit, and inside
    torch.compile for any.

    >>> masks.recommended_layout(masks.causal(), 1024, num_heads=4) is None  # natural order is best
    True
    """
    kind = torch.device(device).type
    if not torch.compiler.is_compiling():
        rate = _recommended_rate(pattern, num_tokens, num_heads, kind)
    elif _is_fixed(pattern.text):
        rate = _rate_of_text(pattern.text, num_tokens, num_heads, kind)
    else:
        raise ValueError(
            "recommended_layout counts with the values of run-time tensors, which a graph being compiled does not "
            f"have: ask before compiling, and hand over the layout; got {pattern!r}"
        )
    return None if rate == 1 else Layout(num_tokens, rate)


@graph_constant
def _is_fixed(pattern: str) -> bool:
    return not read_text(pattern).varies


@graph_constant
def _rate_of_text(pattern: str, num_tokens: int, num_heads: int, kind: str) -> int:
    return _recommended_rate(read_text(pattern), num_tokens, num_heads, kind)


@plans
def _recommended_rate(pattern: Expression, num_tokens: int, num_heads: int, kind: str) -> int:
    bound = pattern.bind(num_heads=num_heads, num_queries=num_tokens, num_keys=num_tokens)
    machine, operands = machine_of(kind), Operands.usual_on(kind)

    def build() -> int:
        rate = residue_rate(bound.union, min(MAX_RESIDUE_RATE, num_tokens))
        if rate == 1:
            return 1
        gained_s = 0.0
        for each in {entry.key(): entry for entry in map(bound.entry, range(bound.pattern.num_entries()))}.values():
            residue, given = _in_layout(each, machine, Layout(num_tokens, rate), operands), plan(each, device=kind)
            _log_order(each, residue, given)
            gained_s += given.cost.seconds - residue.cost.seconds
        return rate if gained_s > 0 else 1

    return cache().get(("recommended_rate", bound.key(), kind, machine.text), build, lambda rate: 8, pattern=pattern)


def _plan(
    bound: Bound,
    machine: Machine,
    layout: Layout | None,
    allowed: Allowed,
    choice: Choice | None,
    operands: Operands,
) -> Plan:
    natural = _in_natural_order(bound, Candidates.of(bound, machine, allowed, operands), choice)
    if layout is None or layout.rate == 1:
        return natural
    in_layout = _in_layout(bound, machine, layout, operands)
    # Bytes read and written to copy q, k, v into the natural order and out back.
    rows = bound.num_queries * bound.num_heads + bound.num_keys * bound.num_heads // operands.groups
    copied = 4 * rows * operands.row_bytes
    return in_layout if in_layout.cost.seconds <= natural.cost.seconds + copied / machine.bytes_per_s else natural


def _in_natural_order(bound: Bound, candidates: Candidates, choice: Choice | None) -> Plan:
    """Plan of the choice if it fits; else the cheapest options by branch, or for all branches together."""
    layout, together = Layout(bound.num_queries), candidates.together
    chosen = None if choice is None else candidates.chosen(choice)
    if chosen is not None:
        return Plan.of(bound, layout, chosen, together)
    found = Plan.of(bound, layout, candidates.branches, together)
    if not together:
        return found
    apart = replace(together[0], layout="branch by branch", terms=found.terms, shares_rows=True)
    if apart.cost.seconds <= together[0].cost.seconds:
        return found
    return Plan.of(bound, layout, ((*together, apart),), together)


def _in_layout(bound: Bound, machine: Machine, layout: Layout, operands: Operands) -> Plan:
    """Plan of every branch as block lists over the order in which the inputs come."""
    name = f"residue {layout.rate}, as given"
    costs = machine, layout, operands
    options = (
        (Option(branch, times, name, tuple(shared_terms(branch, times, bound, layout.rate)), *costs),)
        for branch, times in Counter(bound.pattern.branches()).items()
    )
    return Plan.of(bound, layout, tuple(options))


def _logged(plan: Plan, kind: str, choice: Choice | None) -> Plan:
    """Log the plan, its kind of device and the options compared; return it."""
    if not debug_wanted():
        return plan
    measured = choice is not None and choice.ways == tuple(way_of(options[0]) for options in plan.options)
    why = ", in ways that were chosen before" if measured else ""
    log.debug("planned %s, on %s: %s%s", _bound_text(plan.bound), kind, _ways(plan), why)
    for best, *others in plan.options[:_MOST_BRANCHES]:
        if others:
            log.debug("chose %s for %s, over %s", _way(best), in_line(best.branch), ", ".join(map(_way, others)))
    return plan


def _log_order(bound: Bound, residue: Plan, natural: Plan) -> None:
    """Log the predicted costs of a whole model's tokens in residue order and in natural order."""
    if debug_wanted():
        times = (residue.layout.rate, *(1e3 * each.cost.seconds for each in (residue, natural)))
        log.debug("weighed %s: all tokens in residues of %d %.3g ms, in order %.3g ms", _bound_text(bound), *times)


def _bound_text(bound: Bound) -> str:
    sizes = f"{bound.num_heads:,} heads, {bound.num_queries:,} queries, {bound.num_keys:,} keys"
    return f"{in_line(bound.pattern)}, {sizes}"


def _ways(plan: Plan) -> str:
    layouts = Counter(options[0].layout for options in plan.options)
    named = ", ".join(name if times == 1 else f"{times} x {name}" for name, times in layouts.items())
    terms = f"{len(plan.terms):,} term{'' if len(plan.terms) == 1 else 's'}"
    return f"{named or 'nothing to compute'}; {terms}, {1e3 * plan.cost.seconds:.3g} ms predicted"


def _way(option: Option) -> str:
    """Layout, with the predicted time only if it is computed already: counting blocks is slow."""
    return f"{option.layout} ({1e3 * option.cost.seconds:.3g} ms)" if "cost" in vars(option) else option.layout
