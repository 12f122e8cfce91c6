"""What a plan says of itself: in its repr, and in the log when it is made."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ..core import Bound
from ..plan_cache import debug_wanted, in_line, log
from ._options import Option

if TYPE_CHECKING:
    from ._planner import Plan

_MOST_BRANCHES = 8  # that have lines of their own


def plan_text(plan: Plan) -> str:
    """Pattern and sizes, the layouts chosen, and the time predicted, in one line."""
    return f"Plan({_bound_text(plan.bound)}: {_ways(plan)})"


def tell_plan(plan: Plan, kind: str, *, measured: bool) -> None:
    """Tell what was planned for this kind of device, and what each branch was weighed against.

    `measured` says that the ways are those that won a measurement.
    """
    if not debug_wanted():
        return
    why = ", the ways that autotune measured to be fastest" if measured else ""
    log.debug("planned %s, on %s: %s%s", _bound_text(plan.bound), kind, _ways(plan), why)
    for best, *others in plan.options[:_MOST_BRANCHES]:
        if others:
            log.debug("chose %s for %s, over %s", _way(best), in_line(best.branch), ", ".join(map(_way, others)))


def tell_order(bound: Bound, residue: Plan, natural: Plan) -> None:
    """Tell what a whole model's tokens in residue order, and in the natural one, were predicted to cost."""
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
    """The layout, and the time predicted where it is known already: counting blocks is what takes time."""
    return f"{option.layout} ({1e3 * option.cost.seconds:.3g} ms)" if "cost" in vars(option) else option.layout
