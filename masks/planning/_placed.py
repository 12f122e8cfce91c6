"""Placed plans: the planner's choice for tokens at given positions."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from ..core import Bound, Expression, within
from ..orders import Compact, Folded, Layout, Listed, Part, Placement
from ._cost import Operands
from ._machine import machine_of
from ._options import ANYTHING, Allowed, Option
from ._planner import Plan, plan
from .lowering import PaddedTerm, Term, interval_terms

_GAP = 128  # longest gap of absent keys inside a run of keys: one block


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
    """Plan whose queries are tokens of a device's q, and whose keys are numbered by position.

    The bound of the plan has the sizes of the device. Keys of a term that are absent from the placement are hidden by
    its rule.
    """
    # Not `bind`, which rejects rules that name tokens beyond the part: tokens of the whole sequence are valid.
    rule.check_tokens(range(placement.end), range(placement.end))
    heads = (num_heads, head_offset, num_heads_global)
    whole = Bound(rule, placement.num_queries, max(1, placement.num_keys), *heads, 0, 0, batch=1)
    if allowed.lists_only and (over_all := _over_all_runs(whole, placement, device, operands)) is not None:
        return over_all
    allowed = replace(allowed, masks=False)  # placed terms are shifted, and keys are absent
    terms: list[Term] = []
    weighed: dict[range, tuple[tuple[Option, ...], ...]] = {}
    for part in placement.parts():
        offsets = (part.queries.start, part.span.start)
        bound = Bound(rule, len(part.queries), len(part.span), *heads, *offsets, batch=1)
        best = plan(bound, device=device, allowed=allowed, operands=operands)
        terms += [_placed(term, part, placement) for term in best.terms]
        weighed[part.queries] = weighed.get(part.queries, ()) + best.options
    plans = [Plan(whole, Layout(placement.num_queries), tuple(terms), options) for options in weighed.values()]
    # Runs of queries share no rows. Options of one run represent all; prefer a run whose terms need a merge.
    return max(plans, key=lambda each: each.shares_rows, default=Plan(whole, Layout(placement.num_queries), (), ()))


def _over_all_runs(
    bound: Bound, placement: Placement, device: torch.device | str, operands: Operands | None
) -> Plan | None:
    """Plan of block lists over all runs at once, for any number of runs; None if a branch has no such form."""
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
    """The term for the queries of `part` that the placement holds, with keys given by position instead of by slot."""
    in_folds = isinstance(term.q, Compact | Folded) and isinstance(term.k, Compact | Folded)
    natural = isinstance(term.q, Layout) and term.q.is_natural
    if isinstance(term, PaddedTerm) or in_folds or (natural and part.gapless):
        return term.moved(part.q_token, part.span.start)
    # An order of all tokens: drop absent keys. A tiling becomes the natural order.
    rate = term.q.rate if isinstance(term.q, Layout) else 1
    tokens = part.queries.start - part.q_token
    queries = _by_residue([range(part.q_token, part.q_token + len(part.queries))], rate)
    keys = _by_residue(placement.stretches(part.span, _GAP * rate), rate)
    return replace(term, shape="blocks", q=Listed(queries), k=Listed(keys), q_offset=tokens, k_offset=0)


def _by_residue(stretches: list[range], rate: int) -> tuple[range, ...]:
    """Numbers of all intervals, sorted into runs by residue modulo `rate`."""
    runs = (
        within(range(residue, stretch.stop, rate), stretch.start, stretch.stop)
        for residue in range(rate)
        for stretch in stretches
    )
    return tuple(run for run in runs if run)
