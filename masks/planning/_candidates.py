"""Candidates: the options to compute each branch of a mixture, or all branches together, with their costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from ..core import And, Bound, Expression, Pattern
from ..orders import Compact, Layout
from ._cost import Cost, OperandSizes, cost_of, least_seconds, least_seconds_in_larger_blocks
from ._machine import Machine
from .lowering._layouts import masked_term, split_causal, terms_by_layout
from .lowering._nested import chains, nested_terms
from .lowering._shared_lists import padded_terms
from .lowering._term import Term
from .lowering._windows import rule_over_all_tokens, split_into_windows, window_terms

# Each part of a union is lowered without the parts before it: many parts make rules that are slow to evaluate.
_MAX_PARTS = 6
# Largest number of pairs, over all heads, of a dense mask, which is kept with the plan.
_MOST_MASKED_PAIRS = 1 << 20
# Blocks of another side gain at most this factor over blocks of 128: options that cost more than this many times the
# cheapest are not tried in them.
_WORTH_OTHER_BLOCKS = 2
# A smaller gain is within the error of the estimate: the block size then stays, and terms without block lists are
# preferred.
_CLEARLY_CHEAPER = 0.95


@dataclass(frozen=True)
class Allowed:
    """Kinds of terms that an engine can run.

    shared_rows: several terms may contribute to one row of the output, merged by log-sum-exp.
    windows: terms inside documents or similar windows, separate ones for each length.
    any_windows: terms inside windows even if there are so many lengths that one block list over all tokens would be
        cheaper.
    key_weights: terms with integer weights of (query, key) pairs.
    masks: terms that compute all pairs of few tokens, under a dense mask, if `key_weights` is True, too.
    residues: terms over all tokens in residue-major order.
    lists_only: the kernels take only block lists: there are no terms over gathered tokens, apart from those that
        `windows` and `key_weights` permit, no split causal terms and no dense masks. Dilated segments are computed by
        `padded_terms`, where it takes their rules.
    """

    shared_rows: bool = True
    windows: bool = True
    any_windows: bool = False
    key_weights: bool = True
    masks: bool = True
    residues: bool = True
    lists_only: bool = False


ANYTHING = Allowed()


@dataclass(frozen=True)
class Option:
    """One way to compute a branch, which counts `multiplicity` times, or the whole mixture.

    layout: name of the method or order of tokens, such as "natural", "residue 4" or "windows".
    terms: the terms that compute the branch, or all branches.
    machine: constants of the device, for the cost.
    given: order of the tokens in q, k and v.
    operands: sizes of q, k and v.
    shares_rows: False if it is certain that each row of the output gets its result from one term; True if several terms
        may contribute, whose results are then merged by log-sum-exp.
    """

    branch: Expression
    multiplicity: int
    layout: str
    terms: tuple[Term, ...]
    machine: Machine
    given: Layout
    operands: OperandSizes
    shares_rows: bool = False

    @cached_property
    def cost(self) -> Cost:
        """Predicted cost of all terms."""
        return cost_of(self.terms, self.machine, self.given, self.operands)


def options_of(
    branch: Pattern, times: int, bound: Bound, machine: Machine, allowed: Allowed, operands: OperandSizes
) -> tuple[Option, ...]:
    """Return the ways to compute a branch, the cheapest first, by cost as in `_adjusted_seconds`.

    times: how often the branch counts.
    bound: the pattern's sizes.
    machine: constants of the device, for the costs.
    allowed: kinds of terms that the engine can run.
    operands: sizes of q, k and v, for the costs.

    Options that cannot be the cheapest, by a lower bound on their cost, come last, unsorted.
    """

    def option(layout: str, terms: Iterable[Term], *, shares_rows: bool = False) -> Option:
        return Option(
            branch=branch,
            multiplicity=times,
            layout=layout,
            terms=tuple(terms),
            machine=machine,
            given=Layout(bound.num_queries),
            operands=operands,
            shares_rows=shares_rows,
        )

    split = split_into_windows(branch, bound) if allowed.windows else None
    if split is not None:
        rest = rule_over_all_tokens(*split, bound)
        if rest is not None:
            found = options_of(rest, times, bound, machine, allowed, operands)
            return tuple(replace(each, branch=branch) for each in found)
        inside = replace(allowed, masks=False)  # terms of one window are repeated for equal windows

        def cheapest_terms(rest: Pattern, part: Bound) -> tuple[Term, ...]:
            return options_of(rest, times, part, machine, inside, operands)[0].terms

        terms = window_terms(*split, times, bound, cheapest_terms, any_number=allowed.any_windows)
        if terms is not None:
            return _cheapest_first(_with_masked_option([option("windows", terms, shares_rows=True)], bound, allowed))
    if allowed.lists_only and (padded := padded_terms(branch, times, bound)) is not None:
        # For all lengths: a choice by length would cause recompilation.
        return (option("padded", padded),)
    found = terms_by_layout(branch, times, bound, residues=allowed.residues, gathered=not allowed.lists_only)
    options = [option(*each) for each in found.items()]
    if allowed.shared_rows:
        for each in () if allowed.lists_only else tuple(options):
            terms = split_causal(each.terms)
            if terms is not None:
                options.append(option(f"{each.layout}, split", terms, shares_rows=len(terms) > len(each.terms)))
        parts = _disjoint_parts(branch)
        if parts:
            alone = replace(allowed, shared_rows=False, masks=False)
            best = (options_of(part, times, bound, machine, alone, operands)[0] for part in parts)
            options.append(option("disjoint", (term for each in best for term in each.terms), shares_rows=True))
    return _in_best_blocks(_with_masked_option(options, bound, allowed))


def _with_masked_option(options: list[Option], bound: Bound, allowed: Allowed) -> list[Option]:
    """Return the options, followed by one with a dense mask where that may be cheaper.

    It is added if `takes_mask` permits it and no option is a single term without block lists.
    """
    plainly = any(len(each.terms) == 1 and not _has_block_lists(each) for each in options)
    if plainly or not takes_mask(len(bound.masked_heads), bound.num_queries, bound.num_keys, allowed):
        return options
    first = options[0]
    terms = (masked_term(first.branch, first.multiplicity, bound),)
    return [*options, replace(first, layout="masked", terms=terms, shares_rows=False)]


def _joint_options(
    apart: Mapping[Pattern, Option], bound: Bound, machine: Machine, allowed: Allowed, operands: OperandSizes
) -> Iterator[Option]:
    """Yield up to two options that compute all branches together.

    In the option "nested", branches with nested dilated segments share terms, so that common pairs are computed once,
    and other branches are computed as in `apart`. In "masked", all pairs are computed under one dense mask.

    apart: the cheapest option of each branch alone.
    """
    option = partial(
        Option,
        branch=bound.pattern,
        multiplicity=1,
        machine=machine,
        given=Layout(bound.num_queries),
        operands=operands,
    )
    if allowed.shared_rows and allowed.key_weights:
        groups = chains({branch: alone.multiplicity for branch, alone in apart.items()}, bound)
        if len(groups) < len(apart):
            terms = [
                term
                for group in groups
                for term in (nested_terms(group, bound) if len(group) > 1 else apart[next(iter(group))].terms)
            ]
            yield option(layout="nested", terms=tuple(terms), shares_rows=True)
    if len(apart) > 1 and takes_mask(len(bound.masked_heads), bound.num_queries, bound.num_keys, allowed):
        yield option(layout="masked", terms=(masked_term(bound.pattern, 1, bound),))


def takes_mask(num_masks: int, num_queries: int, num_keys: int, allowed: Allowed = ANYTHING) -> bool:
    """True if a dense mask has at most 2**20 pairs, num_masks * num_queries * num_keys, and `allowed` permits it.

    `allowed` permits it with `masks` and `key_weights`, and without `lists_only`.

    num_masks: number of distinct masks: 1 if all heads have equal rules, else the number of heads.
    """
    offered = allowed.masks and allowed.key_weights and not allowed.lists_only
    return offered and num_masks * num_queries * num_keys <= _MOST_MASKED_PAIRS


def in_blocks_of(option: Option, side: int) -> Option:
    """Return the option with all its block lists in blocks of `side` queries and keys."""
    if all(term.block_side == side for term in option.terms if term.shape == "blocks"):
        return option  # keeps a cost that is already computed
    terms = (replace(term, block_side=side) if term.shape == "blocks" else term for term in option.terms)
    return replace(option, terms=tuple(terms))


def _in_best_blocks(options: list[Option]) -> tuple[Option, ...]:
    """Return the options, cheapest first; block lists have blocks of 128, or of a size that is over 5 % cheaper.

    Other sizes are tried only for options that cost at most about twice the minimum. "disjoint" keeps its sizes, which
    are chosen part by part. Options that cannot be the cheapest come last; their cost is not computed.
    """
    ruled_out = _ruled_out_options(options)
    weighed = [option for option in options if option not in ruled_out]
    least = min(map(_adjusted_seconds, weighed))
    for index, option in enumerate(weighed):
        # "disjoint" chose the side of each part. `least` may be adjusted by 5 %, which a limit of twice it can bear.
        if (
            _has_block_lists(option)
            and option.layout != "disjoint"
            and option.cost.seconds <= _WORTH_OTHER_BLOCKS * least
        ):
            others = (in_blocks_of(option, side) for side in _block_sides_to_try(option, least))
            best = min(others, key=lambda each: each.cost.seconds, default=option)
            weighed[index] = best if best.cost.seconds < _CLEARLY_CHEAPER * option.cost.seconds else option
    return (*_cheapest_first(weighed), *ruled_out)


def _cheapest_first(options: Sequence[Option]) -> tuple[Option, ...]:
    return tuple(sorted(options, key=_adjusted_seconds))


def _adjusted_seconds(option: Option) -> float:
    """Return the predicted seconds of a forward pass, divided by 0.95 if there are block lists, which must be built."""
    return option.cost.seconds / _CLEARLY_CHEAPER if _has_block_lists(option) else option.cost.seconds


def _block_sides_to_try(option: Option, least: float) -> list[int]:
    """Return block sizes to try instead of 128: smaller, and larger ones that may cost below 0.95 * `least` seconds."""
    machine, own = option.machine, Term.block_side
    return [
        side
        for side in machine.sides
        if side < own
        or (
            side > own
            and least_seconds_in_larger_blocks(side, option.cost, option.terms, machine, option.operands)
            < _CLEARLY_CHEAPER * least
        )
    ]


def _has_block_lists(option: Option) -> bool:
    return any(term.shape == "blocks" for term in option.terms)


def _ruled_out_options(options: list[Option]) -> list[Option]:
    """Return the options with block lists whose lower bound on cost exceeds 95 % of the lowest cost without lists.

    [] if all options have block lists. The bound needs no count of blocks, the slow part of planning.
    """
    plain = [option for option in options if not _has_block_lists(option)]
    if not plain:
        return []
    wanted = sum(term.counted_pairs() // term.multiplicity for term in plain[0].terms)
    least = _CLEARLY_CHEAPER * min(option.cost.seconds for option in plain)
    return [
        option
        for option in options
        if _has_block_lists(option)
        and least_seconds(
            option.terms,
            wanted / _block_density_bound(option, plain[0]),
            option.machine,
            option.given,
            option.operands,
        )
        > least
    ]


def _block_density_bound(option: Option, plain: Option) -> float:
    """Return an upper bound on the fraction of pairs that the rule allows in a block of the option.

    plain: an option without block lists for the same branch.

    If the option is in natural order, a query attends to only every step-th key of a block, where `step` is the spacing
    of the keys in `plain`; in other orders the bound is 1.
    """
    if any(term.q != option.given for term in option.terms):
        return 1.0
    step = min((term.k.step if isinstance(term.k, Compact) else 1 for term in plain.terms), default=1)
    return max(-(-side // step) / side for side in option.machine.sides)


def _disjoint_parts(branch: Pattern) -> list[Pattern]:
    """Return the parts of a union of 2 to 6 parts, each without the pairs of earlier parts; [] for any other branch.

    Parts with short periods come first: they are cheap to exclude from later parts, which stay periodic. To exclude an
    earlier part, a later part is intersected with the negation of the earlier part's factors that it lacks. If it lacks
    none, all its pairs are in the earlier part, and it is dropped. A part may be kept although it has no pairs left.
    """
    parts = sorted(branch.alternatives(), key=lambda part: (part.period() is None, part.period() or 0, part.spacing()))
    found = []
    for index, part in enumerate(parts if 1 < len(parts) <= _MAX_PARTS else ()):
        own = part.factors()
        others = [[factor for factor in before.factors() if factor not in own] for before in parts[:index]]
        if all(others):
            found.append(And.of(*own, *(~And.of(*factors) for factors in others)))
    return found


@dataclass(frozen=True)
class Choice:
    """Choice among the planner's ways to compute a pattern.

    ways: for each distinct branch, the `layout` of the chosen option, such as "natural", and the block size of each of
        its block lists.
    together: True if `ways` is a single item for all branches together.

    If an item is not among a pattern's options, the planner chooses by predicted cost.
    """

    together: bool
    ways: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Candidates:
    """Ways to compute a pattern, cheapest first.

    branches: options for each distinct branch, as from `options_of`.
    together: options that compute all branches together; may be empty.
    """

    branches: tuple[tuple[Option, ...], ...]
    together: tuple[Option, ...]

    @classmethod
    def of(cls, bound: Bound, machine: Machine, allowed: Allowed, operands: OperandSizes) -> Candidates:
        under = machine, allowed, operands
        found = {
            branch: options_of(branch, times, bound, *under)
            for branch, times in Counter(bound.pattern.branches()).items()
        }
        cheapest = {branch: options[0] for branch, options in found.items()}
        return cls(tuple(found.values()), _cheapest_first(list(_joint_options(cheapest, bound, *under))))

    def with_chosen_first(self, choice: Choice) -> tuple[tuple[Option, ...], ...] | None:
        """Return the options for each branch, the chosen one first, in the chosen block sizes.

        If the choice is for all branches together, there is a single tuple of options. None if the choice has another
        number of branches, or names an option that a branch does not have.
        """
        groups = self.branches
        if choice.together:
            groups = (self.together,) if self.together else ()
        if len(groups) != len(choice.ways):
            return None
        found = tuple(_chosen_first(options, way) for options, way in zip(groups, choice.ways, strict=True))
        return found if all(found) else None


def way_of(option: Option) -> tuple[str, tuple[int, ...]]:
    """Return (layout name, block side of each block list) of an option, as in `Choice.ways`."""
    return option.layout, tuple(term.block_side for term in option.terms if term.shape == "blocks")


def in_each_block_size(option: Option) -> tuple[Option, ...]:
    """Return the option, then a copy of it for each block size of `machine.sides`, with all block lists in that size.

    Copies that equal the option, such as those of an option without block lists, are left out.
    """
    others = (in_blocks_of(option, side) for side in option.machine.sides)
    return (option, *(each for each in others if way_of(each) != way_of(option)))


def _chosen_first(options: tuple[Option, ...], way: tuple[str, tuple[int, ...]]) -> tuple[Option, ...]:
    """Return the options, with the option of this (layout name, block sides) moved to the front; () if none has it."""
    for option in options:
        if option.layout == way[0]:
            for each in in_each_block_size(option):
                if way_of(each) == way:
                    return (each, *(other for other in options if other is not option))
    return ()
