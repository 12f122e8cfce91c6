"""Diagnosis of a wrong output: compute the outputs of known mistakes and compare them with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..engines import multiplicity
from ..masks import Bound, Mixture
from ..masks.core import And, Expression, Pattern
from ._problem import Problem

# B batch, H query heads, N queries, M keys, D head dim
_ROWS_LOOKED_AT = 32
_LISTED_BRANCHES = 12


@dataclass(frozen=True, eq=False)
class _Rows:
    """Wrong rows (R, D), or one row (D).

    found, right: actual and correct values. budget: error bound of a correct row. allowed: error bound of a match with
    the output of a mistake.
    """

    found: Tensor
    right: Tensor
    budget: Tensor
    allowed: Tensor

    def one(self, index: int) -> _Rows:
        """Row `index`."""
        return _Rows(self.found[index], self.right[index], self.budget[index], self.allowed[index])

    def accounted_for(self, out: Tensor) -> Tensor:
        """Mask of rows where `out`, the output of a mistake, matches `found` and exceeds the budget of `right`."""
        close = ((out - self.found).abs() <= self.allowed).all(-1)
        return close & ((out - self.right).abs() > self.budget).any(-1)


def explain(problem: Problem, found: Tensor, budget: Tensor, wrong: Tensor) -> str | None:
    """Text of the mistake that explains most wrong rows (B, H, N), the first and at least half; None without one."""
    places = wrong.nonzero()[:_ROWS_LOOKED_AT]
    b, h, q = places.unbind(1)
    wide = problem.wide()
    limit = budget[b, h, q]
    # A mistake that admits other keys may have larger rounding errors than the correct row.
    allowed = 4 * torch.maximum(limit, limit.mean())
    rows = _Rows(found[b, h, q].double(), wide.attention()[0][b, h, q], limit, allowed)
    counts: Counter[str] = Counter()
    for name, out in _suspects(wide):
        close = rows.accounted_for(out[b, h, q])
        if close[0]:
            counts[name] = int(close.sum())
    for name, number in _by_row(wide, places, rows):
        counts[name] = max(counts[name], number)
    name, number = max(counts.items(), key=lambda item: item[1], default=("", 0))
    if 2 * number < len(places) or not number:
        return None
    seen = " looked at" if len(places) < wrong.sum() else ""
    return f"{name} (accounts for {number} of {len(places)} wrong rows{seen})"


def _suspects(problem: Problem) -> Iterator[tuple[str, Tensor]]:
    """(mistake of a whole module, its output (B, H, N, D) in float64)."""
    scores, values = problem.scores(), problem.for_query_heads(problem.v)
    sinks = problem.sinks

    def outcome(times: Tensor, scores: Tensor = scores, values: Tensor = values) -> Tensor:
        return _softmax(times.expand_as(scores), scores, sinks) @ values

    yield "nothing is written: zeros", torch.zeros_like(problem.q)
    for name, bound in _other_rules(problem):
        yield name, outcome(multiplicity(bound, problem.q.device))
    times = problem.times()
    branches = problem.bound.pattern.branches()
    if len(branches) > 1:
        yield "a pair of several branches counts once", outcome(times.clamp(max=1))
        parts = [outcome(multiplicity(replace(problem.bound, pattern=branch), problem.q.device)) for branch in branches]
        yield "each branch has a softmax of its own, and the results are summed", sum(parts, torch.zeros(()))
        mean = sum(parts, torch.zeros(())) / len(parts)
        yield "each branch has a softmax of its own, and the results are averaged", mean
    for name, other in _other_tables(times):
        yield name, outcome(other)
    yield "scores are not scaled", outcome(times, scores / problem.scale)
    yield "the softmax runs over the heads", _over_heads(times, scores) @ values
    groups, heads = problem.k.shape[1], problem.q.shape[1]
    if 1 < groups < heads:
        cycled = torch.arange(heads, device=problem.q.device) % groups
        k, v = problem.k[:, cycled], problem.v[:, cycled]
        other = replace(problem, k=k, v=v).scores()
        yield "query head h reads key/value head h % G, not h // (H / G)", outcome(times, other, v)


def _other_rules(problem: Problem) -> Iterator[tuple[str, Bound]]:
    """(mistake, bound pattern): a branch omitted, a branch counted twice, or an operand of `&` omitted."""
    bound = problem.bound
    branches = bound.pattern.branches()
    for index, branch in enumerate(branches[:_LISTED_BRANCHES] if len(branches) > 1 else ()):
        name = f"branch {index}, {branch!r},"
        yield f"{name} is left out", replace(bound, pattern=Mixture.of(*branches[:index], *branches[index + 1 :]))
        yield f"{name} counts twice", replace(bound, pattern=Mixture((*branches, branch)))
    operands = dict.fromkeys(part for branch in branches if isinstance(branch, And) for part in branch.parts)
    for operand in operands:
        yield f"{operand!r} is not applied", replace(bound, pattern=_without(bound.pattern, operand))


def _without(pattern: Expression, operand: Pattern) -> Expression:
    def less(branch: Pattern) -> Pattern:
        if not isinstance(branch, And) or operand not in branch.parts:
            return branch
        return And.of(*(part for part in branch.parts if part != operand))

    return Mixture.of(*map(less, pattern.branches()))


def _other_tables(times: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(mistake, multiplicities): all keys, causal order, the rule of a neighbouring query, or of another head."""
    num_heads, num_queries, num_keys = times.shape[1:]
    yield "no mask is applied: every key takes part", torch.ones_like(times)
    if num_queries == num_keys:
        lower = torch.ones(num_queries, num_keys, dtype=torch.bool, device=times.device).tril()
        yield "keys after the query are hidden", times * lower
        yield "the query's own key is hidden", times * ~torch.eye(num_keys, dtype=torch.bool, device=times.device)
    yield "the rule is that of the query before", _moved(times, 2, 1)
    yield "the rule is that of the query after", _moved(times, 2, -1)
    yield "keys stand one position later than they should", _moved(times, 3, 1)
    yield "keys stand one position earlier than they should", _moved(times, 3, -1)
    for step in range(1, min(num_heads, 9)):
        yield f"head h has the rule of head (h + {step}) % H", times.roll(-step, 1)


def _moved(times: Tensor, dim: int, step: int) -> Tensor:
    """Table shifted by `step` along `dim`; zeros enter at the edge."""
    moved = times.roll(step, dim)
    return moved.index_fill(dim, torch.tensor(0 if step > 0 else moved.shape[dim] - 1, device=moved.device), 0)


def _by_row(problem: Problem, places: Tensor, rows: _Rows) -> Iterator[tuple[str, int]]:
    """(mistake, number of rows) for mistakes that differ by row: a key too few or too many, padding, a factor."""
    times, scores = problem.times(), problem.scores()
    for step, what in ((-1, "counts once less than it should"), (1, "counts once more than it should")):
        keys = [_one_key(problem, times, scores, place, step, rows.one(i)) for i, place in enumerate(places)]
        if keys[0] is None:
            continue
        shift = problem.bound.k_offset - problem.bound.q_offset
        distances = {key - int(place[2]) + shift for key, place in zip(keys, places, strict=True) if key is not None}
        number = sum(key is not None for key in keys)
        if number > 1 and len(distances) == 1:
            yield f"the key at position query {distances.pop():+d} {what}", number
        else:
            yield f"one key, here {keys[0]}, {what}", number
    yield from _shrunk_rows(problem, places, rows)


def _one_key(
    problem: Problem, all_times: Tensor, all_scores: Tensor, place: Tensor, step: int, row: _Rows
) -> int | None:
    """Key whose multiplicity changed by `step` explains the row; None without one."""
    b, h, q = place.tolist()
    times, scores = all_times[b, h, q], all_scores[b, h, q]
    table = times + step * torch.eye(len(times), dtype=times.dtype, device=times.device)
    sink = None if problem.sinks is None else problem.sinks[h]
    out = _softmax(table, scores.expand_as(table), sink) @ problem.v[b, h * problem.v.shape[1] // problem.q.shape[1]]
    close = row.accounted_for(out) & (table >= 0).all(-1)
    return int(close.nonzero()[0]) if close.any() else None


def _shrunk_rows(problem: Problem, places: Tensor, rows: _Rows) -> Iterator[tuple[str, int]]:
    """(mistake, number of rows) for rows proportional to the correct ones: extra zero keys, or a constant factor."""
    b, h, q = places.unbind(1)
    out, lse = rows.right, problem.attention()[1][b, h, q]
    if out.shape[-1] < 2:
        return
    factor = (out * rows.found).sum(-1) / (out * out).sum(-1)
    straight = rows.accounted_for(factor[:, None] * out)
    extra = lse.exp() * (1 / factor - 1)
    whole = straight & (factor > 0) & (factor < 1) & ((extra - extra.round()).abs() <= 1e-2 + 1e-3 * extra)
    if bool(whole[0]) and extra[0] >= 0.99:
        number = int(extra[0].round())
        more, take = ("1 key", "takes") if number == 1 else (f"{number} keys", "take")
        yield f"{more} more, of score 0 and value 0, {take} part in the softmax", int(whole.sum())
    elif bool(straight[0]):
        yield f"the output is {_factor(float(factor[0]))} times what it should be", int(straight.sum())


def _factor(factor: float) -> str:
    """Four digits; near 1, the difference from 1."""
    off = factor - 1
    return f"{factor:.4g}" if abs(off) >= 1e-3 else f"1 {'-' if off < 0 else '+'} {abs(off):.2g}"


def _softmax(times: Tensor, scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax weights of pairs with multiplicities `times`; 0 in a row without keys."""
    logits = scores.masked_fill(times <= 0, -torch.inf)
    top = logits.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = times.clamp(min=0) * (logits - top).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks.view(-1, *(1,) * (total.dim() - 2 if sinks.dim() else 0)) - top).exp()
    return weights / total.masked_fill(total == 0, 1.0)


def _over_heads(times: Tensor, scores: Tensor) -> Tensor:
    """Softmax weights that sum to 1 over the heads, not over the keys."""
    logits = scores.masked_fill(times == 0, -torch.inf)
    return (logits - logits.logsumexp(1, keepdim=True).nan_to_num(neginf=0.0)).exp()
