"""Planner: choose the terms that compute a pattern, by predicted cost; also for tokens at given positions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import torch

from ..._torch_private import graph_constant
from ..core import And, Bound, Every, Expression, Mixture, advises, device_kind, outside_torch_modes, within
from ..orders import Compact, Folded, Layout, ListedOrder, Part, Placement, residue_rate
from ..patterns import TableSplit, lists_keys, table_split
from ..plan_cache import cache, debug_wanted, log, shortened_line
from ..text import read_text
from ._candidates import ANYTHING, Allowed, Candidates, Choice, Option, way_of
from ._cost import Cost, OperandSizes
from ._machine import Machine, machine_of
from .lowering._key_lists import KeyLists
from .lowering._layouts import MAX_RESIDUE_RATE, shared_terms
from .lowering._shared_lists import PaddedTerm, interval_terms
from .lowering._table import TableProblems, TableTerm
from .lowering._term import Term

BRANCH_BY_BRANCH = "branch by branch"  # layout of an option with the cheapest terms of each branch
_MOST_LOGGED_BRANCHES = 8
_LONGEST_GAP = 128  # of absent keys, in slots, inside a run of keys: one block


@dataclass(frozen=True)
class Plan:
    """How a bound pattern is computed: the terms, with the options compared.

    layout: order of the tokens in which the terms expect q, k and v.
    options: tuples of options compared, the chosen one first: one tuple for each distinct branch, or a single one if
        all branches are computed together. If a table of keys or blocks is read, the first tuple is for its pairs, and
        the others are for all other pairs. A plan of `plan_at` may have only the options of some of its terms.
    together: options that compute all branches together, cheapest first, in a plan of `plan` in natural order; () in
        other plans.
    places: for each term, the indices of all branches that equal its option's `branch`; () for a term of the whole
        mixture or of a part of a branch.
    """

    bound: Bound
    layout: Layout
    terms: tuple[Term, ...]
    options: tuple[tuple[Option, ...], ...]
    together: tuple[Option, ...] = ()
    places: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(
        cls, bound: Bound, layout: Layout, options: tuple[tuple[Option, ...], ...], together: tuple[Option, ...] = ()
    ) -> Plan:
        """Return the plan that has the terms of the first option in each tuple of `options`."""
        terms = [(term, chosen.branch) for chosen, *_ in options for term in chosen.terms]
        branches = bound.pattern.branches()
        places = {branch: tuple(i for i, each in enumerate(branches) if each == branch) for _, branch in terms}
        return cls(bound, layout, tuple(t for t, _ in terms), options, together, tuple(places[b] for _, b in terms))

    @property
    def chosen(self) -> tuple[Option, ...]:
        """The options that are computed: the first one in each tuple of `options`."""
        return tuple(first for first, *_ in self.options)

    @property
    def shares_rows(self) -> bool:
        """True if several terms may contribute to one row of the output, which is then merged by log-sum-exp."""
        return len(self.chosen) > 1 or any(option.shares_rows for option in self.chosen)

    @property
    def cost(self) -> Cost:
        """Predicted cost: sum over the chosen options."""
        return Cost.total(option.cost for option in self.chosen)

    @property
    def nbytes(self) -> int:
        """Approximate bytes of the plan, for the cache."""
        terms = [term for options in self.options for option in options for term in option.terms]
        uneven = (term for term in terms if isinstance(term.q, Compact) and term.q.fold_starts is not None)
        tables = (term.problems.nbytes for term in terms if isinstance(term, TableTerm))
        own = sum(200 + 24 * len(term.heads) for term in terms)
        return own + sum(16 * term.folds for term in uneven) + sum(tables)

    @property
    def table(self) -> TableTerm | None:
        """The first term, if it is computed from a table of keys or blocks; else None."""
        first = self.terms[0] if self.terms else None
        return first if isinstance(first, TableTerm) else None

    @property
    def beside_table(self) -> Plan:
        """The plan of the pairs outside the table, without terms if all are in it; self if `table` is None."""
        if self.table is None:
            return self
        options = self.options[1:]
        branches = [branch for chosen, *_ in options for branch in chosen.branch.branches() * chosen.multiplicity]
        bound = replace(self.bound, pattern=Mixture.of(*branches)) if branches else self.bound
        return Plan.of(bound, self.layout, options)

    def __repr__(self) -> str:
        return f"Plan({_bound_text(self.bound)}: {_plan_text(self)})"


@outside_torch_modes
def plan(
    bound: Bound,
    *,
    device: torch.device | str = "cpu",
    layout: Layout | None = None,
    allowed: Allowed = ANYTHING,
    choice: Choice | None = None,
    operands: OperandSizes | None = None,
) -> Plan:
    """Return the cheapest plan of a bound pattern on this kind of device, by predicted cost; cached.

    allowed: kinds of terms that the engine can run.
    operands: sizes of the tensors; None for the device's usual ones.
    layout: order of the tokens in q, k and v; None for natural order. The plan's `layout` is this order or, if that is
        cheaper including the copies, natural order.
    choice: options to take in natural order instead of the cheapest, if the pattern has all of them.
    """
    kind = torch.device(device).type
    machine, operands = machine_of(kind), operands or OperandSizes.usual_on(kind)
    return cache().get(
        ("plan", bound.key(), kind, machine.text, layout, allowed, choice, operands),
        lambda: _log_plan(_build_plan(bound, machine, layout, allowed, choice, operands), kind, choice),
        lambda made: made.nbytes,
        pattern=bound.pattern,
    )


def _split_for_engine(bound: Bound, engine: str) -> TableSplit | None:
    """Return `table_split` of a pattern whose table the engine reads without block lists; None for other patterns.

    Such a table is one that `lists_keys` accepts or, for "aten", any other if the call's first key begins a block.
    """
    split = table_split(bound.pattern)
    if split is None or lists_keys(split.leaf):
        return split
    return None if engine != "aten" or bound.k_offset % split.leaf.block[1] else split


def reads_table(bound: Bound, engine: str) -> bool:
    """True if the engine reads a table of keys or blocks in this pattern, without block lists of its pairs."""
    return _split_for_engine(bound, engine) is not None


@outside_torch_modes
def plan_with_table(
    bound: Bound,
    *,
    device: torch.device | str = "cpu",
    allowed: Allowed = ANYTHING,
    operands: OperandSizes | None = None,
    engine: str = "aten",
) -> Plan:
    """Return a plan in which the engine reads the pattern's table of keys or blocks, without block lists of its pairs.

    The pairs in the table are one `TableTerm`; all other pairs are planned as by `plan`. If the pattern has no table
    that the engine reads, the result is that of `plan`. Cached.

    engine: name of the engine that computes the call. A table that `lists_keys` rejects is read by "aten" alone, if
        the call's first key begins a block.

    Raises ValueError for tables that differ by batch entry, whose number does not divide the heads, or that have no row
    for the first query.
    """
    kind = torch.device(device).type
    machine, operands = machine_of(kind), operands or OperandSizes.usual_on(kind)
    split = _split_for_engine(bound, engine)
    if split is None:
        return plan(bound, device=device, allowed=allowed, operands=operands)

    def build() -> Plan:
        layout, table = Layout(bound.num_queries), split.leaf
        rule = table if split.rest == Every() else And.of(table, split.rest)
        inside, num_kv_heads = replace(bound, pattern=split.rest), bound.num_heads // operands.groups
        vectors = operands.head_dim, operands.element_bytes
        if lists_keys(table):
            problems = KeyLists.of([(inside, table.key_rows())])
            gathers = engine != "aten" or problems.favours_gather(bound.num_heads, num_kv_heads)
            copies = engine == "aten" or device_kind(kind).engine != "flex"
            work = problems.work(bound, num_kv_heads, *vectors, gathers=gathers, copies=copies)
            name = ("table, keys gathered" if copies else "table, keys in place") if gathers else "table, dense mask"
        else:
            most = None if table.source is None else table.source.most  # rows are padded
            problems = TableProblems.of(inside, num_kv_heads, table.only_row[..., :most], table.block, table.first)
            work = problems.work(*vectors)
            name = "table, keys gathered" if problems.gathers else "table, queries grouped"
        term = TableTerm.of_problems(bound, rule, problems, work)
        own = Option(
            branch=rule,
            multiplicity=1,
            layout=name,
            terms=(term,),
            machine=machine,
            given=layout,
            operands=operands,
        )
        others = ()
        if split.others is not None:
            others = plan(
                replace(bound, pattern=split.others), device=device, allowed=allowed, operands=operands
            ).options
        return Plan.of(bound, layout, ((own,), *others))

    name = ("plan with table", bound.key(), kind, machine.text, allowed, operands, engine)
    return cache().get(name, build, lambda made: made.nbytes, pattern=bound.pattern)


@advises()
def recommended_layout(
    pattern: Expression, num_tokens: int, *, num_heads: int, device: torch.device | str = "cpu"
) -> Layout | None:
    """Return the order in which a whole model should keep its tokens, by predicted cost; None for natural order.

    pattern: the pattern of the model's attention calls.
    num_tokens: length of the sequences.
    num_heads: number of query heads, over all devices.
    device: costs are predicted by the constants of this kind of device.

    The result depends on the values of run-time tensors that the pattern carries; if they differ by batch entry, costs
    are summed over distinct entries. Inside torch.compile the result is a constant of the graph, for the number of
    tokens at tracing.

    Raises ValueError if run-time tensors are missing or do not fit; inside torch.compile, for every pattern with
    run-time tensors.

    >>> masks.recommended_layout(masks.causal(), 1024, num_heads=4) is None  # natural order is best
    True
    """
    kind = torch.device(device).type
    if not torch.compiler.is_compiling():
        rate = _recommended_rate(pattern, num_tokens, num_heads, kind)
    elif not (rate := _recommended_rate_of_text(pattern.text, num_tokens, num_heads, kind)):
        raise ValueError(
            "recommended_layout needs the values of run-time tensors, which are unknown inside torch.compile; got "
            f"{pattern!r}; call recommended_layout before compiling, and pass its result as an argument"
        )
    return None if rate == 1 else Layout(num_tokens, rate)


@graph_constant
def _recommended_rate_of_text(pattern: str, num_tokens: int, num_heads: int, kind: str) -> int:
    """Return the rate of the order to recommend for a pattern's text; 0 if the pattern has run-time tensors."""
    rule = read_text(pattern)
    return 0 if rule.varies else _recommended_rate(rule, num_tokens, num_heads, kind)


@outside_torch_modes
def _recommended_rate(pattern: Expression, num_tokens: int, num_heads: int, kind: str) -> int:
    bound = pattern.bind(num_heads=num_heads, num_queries=num_tokens, num_keys=num_tokens)
    machine, operands = machine_of(kind), OperandSizes.usual_on(kind)

    def build() -> int:
        rate = residue_rate(bound.union, min(MAX_RESIDUE_RATE, num_tokens))
        if rate == 1:
            return 1
        gained_s = 0.0
        for each in {entry.key(): entry for entry in map(bound.entry, range(bound.pattern.num_entries()))}.values():
            residue, given = _plan_in_layout(each, machine, Layout(num_tokens, rate), operands), plan(each, device=kind)
            _log_order(each, residue, given)
            gained_s += given.cost.seconds - residue.cost.seconds
        return rate if gained_s > 0 else 1

    return cache().get(("recommended_rate", bound.key(), kind, machine.text), build, lambda rate: 8, pattern=pattern)


def _build_plan(
    bound: Bound,
    machine: Machine,
    layout: Layout | None,
    allowed: Allowed,
    choice: Choice | None,
    operands: OperandSizes,
) -> Plan:
    natural = _plan_from_natural_order(bound, Candidates.of(bound, machine, allowed, operands), choice)
    if layout is None or layout.rate == 1:
        return natural
    in_layout = _plan_in_layout(bound, machine, layout, operands)
    # Bytes read and written to copy q, k, v into the natural order and out back.
    rows = bound.num_queries * bound.num_heads + bound.num_keys * bound.num_heads // operands.groups
    copied = 4 * rows * operands.row_bytes
    return in_layout if in_layout.cost.seconds <= natural.cost.seconds + copied / machine.bytes_per_s else natural


def _plan_from_natural_order(bound: Bound, candidates: Candidates, choice: Choice | None) -> Plan:
    """Return the plan in natural order by `choice`, if that is among the candidates, else by predicted cost.

    The cheapest plan computes either each distinct branch by its cheapest option, or all branches together.
    """
    layout, together = Layout(bound.num_queries), candidates.together
    chosen = None if choice is None else candidates.with_chosen_first(choice)
    found = Plan.of(bound, layout, candidates.branches if chosen is None else chosen, together)
    if chosen is not None or not together:
        return found
    apart = replace(together[0], layout=BRANCH_BY_BRANCH, terms=found.terms, shares_rows=True)
    if apart.cost.seconds <= together[0].cost.seconds:
        return found
    return Plan.of(bound, layout, ((*together, apart),), together)


def _plan_in_layout(bound: Bound, machine: Machine, layout: Layout, operands: OperandSizes) -> Plan:
    """Return the plan with every branch over all tokens in the order `layout`, which q, k and v already have."""
    option = partial(
        Option, layout=f"residue {layout.rate}, as given", machine=machine, given=layout, operands=operands
    )
    options = (
        (option(branch=branch, multiplicity=times, terms=tuple(shared_terms(branch, times, bound, layout.rate))),)
        for branch, times in Counter(bound.pattern.branches()).items()
    )
    return Plan.of(bound, layout, tuple(options))


def plan_at(
    rule: Expression,
    placement: Placement,
    *,
    num_heads: int,
    head_offset: int,
    num_heads_global: int,
    device: torch.device | str = "cpu",
    allowed: Allowed = ANYTHING,
    operands: OperandSizes | None = None,
) -> Plan:
    """Return the plan of attention for tokens at given positions, such as one rank's part of a sequence.

    rule: the pattern over positions of the whole sequence.
    placement: positions of the rank's queries and keys.
    allowed, operands: as in `plan`.

    The rank has heads head_offset to head_offset + num_heads - 1 of num_heads_global.

    Terms number keys by position. They number queries by their index in q, except an `IntervalTerm`, which numbers them
    by position, too. The plan's bound has the rank's sizes. The terms allow no pair with a key that the placement
    lacks.

    The plan has the terms of all runs of queries. Its `options` are complete only if block lists cover all runs at
    once. Otherwise they are those of a single run, if possible of a run whose terms share rows; () if there are no
    parts.

    Raises ValueError for a sequence that does not fit the pattern.
    """
    # Not `bind`, which rejects rules that name tokens beyond the part: tokens of the whole sequence are valid.
    rule.check_tokens(range(placement.end), range(placement.end))
    heads, batch = (num_heads, head_offset, num_heads_global), rule.num_entries()
    whole = Bound(rule, placement.num_queries, max(1, placement.num_keys), *heads, 0, 0, batch)
    if allowed.lists_only and (over_all := _plan_over_all_runs(whole, placement, device, operands)) is not None:
        return over_all
    allowed = replace(allowed, masks=False)  # placed terms are shifted, and keys are absent
    terms: list[Term] = []
    places: list[tuple[int, ...]] = []
    weighed: dict[range, tuple[tuple[Option, ...], ...]] = {}
    for part in placement.parts():
        offsets = (part.queries.start, part.span.start)
        bound = Bound(rule, len(part.queries), len(part.span), *heads, *offsets, batch)
        best = plan(bound, device=device, allowed=allowed, operands=operands)
        terms += [_placed_term(term, part, placement) for term in best.terms]
        places += best.places
        weighed[part.queries] = weighed.get(part.queries, ()) + best.options
    found = Plan(whole, Layout(placement.num_queries), tuple(terms), (), places=tuple(places))
    # Runs of queries share no rows. Options of one run represent all; prefer a run whose terms need a merge.
    plans = (replace(found, options=options) for options in weighed.values())
    return max(plans, key=lambda each: each.shares_rows, default=found)


def _plan_over_all_runs(
    bound: Bound, placement: Placement, device: torch.device | str, operands: OperandSizes | None
) -> Plan | None:
    """Return a plan whose block lists cover all runs of positions; None if `interval_terms` rejects a branch."""
    options, layout = [], Layout(placement.num_queries)
    kind = torch.device(device).type
    option = partial(
        Option,
        layout="intervals",
        machine=machine_of(kind),
        given=layout,
        operands=operands or OperandSizes.usual_on(kind),
    )
    for branch, times in Counter(bound.pattern.branches()).items():
        terms = interval_terms(branch, times, bound, placement)
        if terms is None:
            return None
        options.append((option(branch=branch, multiplicity=times, terms=tuple(terms)),))
    return Plan.of(bound, layout, tuple(options))


def _placed_term(term: Term, part: Part, placement: Placement) -> Term:
    """Return a part's term renumbered for the whole call: a query by its index in the tensor q, a key by position."""
    in_folds = isinstance(term.q, Compact | Folded) and isinstance(term.k, Compact | Folded)
    natural = isinstance(term.q, Layout) and term.q.is_natural
    if isinstance(term, PaddedTerm) or in_folds or (natural and part.gapless):
        return term.moved(part.q_token, part.span.start)
    # An order of all tokens: drop absent keys. A tiling becomes the natural order.
    rate = term.q.rate if isinstance(term.q, Layout) else 1
    q_offset = part.queries.start - part.q_token
    queries = _ranges_by_residue([range(part.q_token, part.q_token + len(part.queries))], rate)
    keys = _ranges_by_residue(placement.stretches(part.span, _LONGEST_GAP * rate), rate)
    return replace(term, shape="blocks", q=ListedOrder(queries), k=ListedOrder(keys), q_offset=q_offset, k_offset=0)


def _ranges_by_residue(stretches: list[range], rate: int) -> tuple[range, ...]:
    """Return the integers of these intervals as ranges of step `rate`: first those of residue 0, then 1, ..."""
    runs = (
        within(range(residue, stretch.stop, rate), stretch.start, stretch.stop)
        for residue in range(rate)
        for stretch in stretches
    )
    return tuple(run for run in runs if run)


def _log_plan(plan: Plan, kind: str, choice: Choice | None) -> Plan:
    """Log the plan and, for its first branches, the options compared, at debug level; return the plan."""
    if not debug_wanted():
        return plan
    measured = choice is not None and choice.ways == tuple(map(way_of, plan.chosen))
    why = ", in ways that were chosen before" if measured else ""
    log.debug("planned %s, on %s: %s%s", _bound_text(plan.bound), kind, _plan_text(plan), why)
    for best, *others in plan.options[:_MOST_LOGGED_BRANCHES]:
        if others:
            log.debug(
                "chose %s for %s, over %s",
                _option_text(best),
                shortened_line(best.branch),
                ", ".join(map(_option_text, others)),
            )
    return plan


def _log_order(bound: Bound, residue: Plan, natural: Plan) -> None:
    """Log the predicted times of keeping all tokens in residue-major order and in natural order."""
    if debug_wanted():
        times = (residue.layout.rate, *(1e3 * each.cost.seconds for each in (residue, natural)))
        log.debug("weighed %s: all tokens in residues of %d %.3g ms, in order %.3g ms", _bound_text(bound), *times)


def _bound_text(bound: Bound) -> str:
    sizes = f"{bound.num_heads:,} heads, {bound.num_queries:,} queries, {bound.num_keys:,} keys"
    return f"{shortened_line(bound.pattern)}, {sizes}"


def _plan_text(plan: Plan) -> str:
    layouts = Counter(option.layout for option in plan.chosen)
    named = ", ".join(name if times == 1 else f"{times} x {name}" for name, times in layouts.items())
    terms = f"{len(plan.terms):,} term{'' if len(plan.terms) == 1 else 's'}"
    return f"{named or 'nothing to compute'}; {terms}, {1e3 * plan.cost.seconds:.3g} ms predicted"


def _option_text(option: Option) -> str:
    """Return the name of an option, with its predicted time if that is already computed."""
    return f"{option.layout} ({1e3 * option.cost.seconds:.3g} ms)" if "cost" in vars(option) else option.layout
