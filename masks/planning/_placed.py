"""Placed plans: the planner's choice for tokens that stand at stated positions."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from ..core import Bound, Expression, within
from ..orders import Compact, Folded, Layout, Listed, Part, Placement
from ._cost import Operands
from ._options import ANYTHING, Allowed, Option
from ._planner import Plan, plan
from .lowering import PaddedTerm, Term, interval_terms
from .machine import machine_of

_GAP = 128  # missing keys over which a run of keys goes on: no more than a block


def plan_at(
    rule: Expression,
    placement: Placement,
    *,
    num_heads: int,
    head_offset: int,
    num_heads_global: int,
    device: torch.device | str = "cpu",
    allowed: Allowed = ANYTHING,
    operands: Operands | None = None,
) -> Plan:
    """Terms whose queries are tokens of a device's own q, and whose keys are counted by position.

    The bound of the plan has the device's own sizes. Keys of a term that are not among the placement's are hidden by
    its rule.
    """
    # A part is bound without `bind`, which refuses rules that name tokens beyond its own: those of the whole count.
    rule.check_tokens(range(placement.end), range(placement.end))
    heads = (num_heads, head_offset, num_heads_global)
    whole = Bound(rule, placement.num_queries, max(1, placement.num_keys), *heads, 0, 0, batch=1)
    if allowed.lists_only and (over_all := _over_all_runs(whole, placement, device, operands)) is not None:
        return over_all
    allowed = replace(allowed, masks=False)  # placed terms are moved, and lack keys
    terms: list[Term] = []
    weighed: dict[range, tuple[tuple[Option, ...], ...]] = {}
    for part in placement.parts():
        offsets = (part.queries.start, part.span.start)
        bound = Bound(rule, len(part.queries), len(part.span), *heads, *offsets, batch=1)
        best = plan(bound, device=device, allowed=allowed, operands=operands)
        terms += [_placed(term, part, placement) for term in best.terms]
        weighed[part.queries] = weighed.get(part.queries, ()) + best.options
    plans = [Plan(whole, Layout(placement.num_queries), tuple(terms), options) for options in weighed.values()]
    # Runs of queries share no rows; what is weighed for one stands for all, but for whether terms are to be merged.
    return max(plans, key=lambda each: each.shares_rows, default=Plan(whole, Layout(placement.num_queries), (), ()))


def _over_all_runs(
    bound: Bound, placement: Placement, device: torch.device | str, operands: Operands | None
) -> Plan | None:
    """Each branch as lists over all runs at once, however many they are; None where a branch has no such form."""
    options, layout = [], Layout(placement.num_queries)
    kind = torch.device(device).type
    costs = machine_of(kind), layout, operands or Operands.usual_on(kind)
    for branch, times in Counter(bound.pattern.branches()).items():
        terms = interval_terms(branch, times, bound, placement)
        if terms is None:
            return None
        options.append((Option(branch, times, "intervals", tuple(terms), *costs),))
    return Plan.of(bound, layout, tuple(options))


def _placed(term: Term, part: Part, placement: Placement) -> Term:
    """The term over the device's own queries, and keys by their positions."""
    in_folds = isinstance(term.q, Compact | Folded) and isinstance(term.k, Compact | Folded)
    natural = isinstance(term.q, Layout) and term.q.is_natural
    if isinstance(term, PaddedTerm) or in_folds or (natural and part.gapless):
        return term.moved(part.q_token, part.span.start)
    # An order of all tokens: without the keys that are not there. A tiling is left for the natural order.
    rate = term.q.rate if isinstance(term.q, Layout) else 1
    tokens = part.queries.start - part.q_token
    queries = _by_residue([range(part.q_token, part.q_token + len(part.queries))], rate)
    keys = _by_residue(placement.stretches(part.span, _GAP * rate), rate)
    return replace(term, shape="blocks", q=Listed(queries), k=Listed(keys), q_offset=tokens, k_offset=0)


def _by_residue(stretches: list[range], rate: int) -> tuple[range, ...]:
    """The numbers of all stretches, first those that the rate divides, then those that leave 1, and so on."""
    runs = (
        within(range(residue, stretch.stop, rate), stretch.start, stretch.stop)
        for residue in range(rate)
        for stretch in stretches
    )
    return tuple(run for run in runs if run)
