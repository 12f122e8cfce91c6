"""What a pattern claims besides its bounds: one head's rule, its period, that it is confined, its text."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..masks import Mixture, Pattern, from_json, to_json
from ._box_bounds import check_bounds
from ._dense_rule import DenseRule, ask

_WINDOWS = 24
_SIDE = 48


def check_for_head(dense: DenseRule, examples: int, generator: torch.Generator) -> None:
    """`for_head(h)` must be the rule of head h, whatever head it is asked about, and its bounds sound."""
    for head in range(dense.num_heads):
        one = dense.for_head(head)
        if one.pattern == dense.pattern and (dense.table == dense.table[head]).all():
            continue
        found = DenseRule.of(one.pattern, dense.num_heads, dense.num_tokens).table
        wrong = (found != one.table).nonzero().tolist()
        if wrong:
            asked, query, key = wrong[0]
            rule = f"{dense.pattern!r}: for_head({head}) must be the rule of head {head}, for all heads alike"
            got = f"it {'allows' if found[asked, query, key] else 'forbids'} query {query}, key {key}"
            raise AssertionError(f"{rule}; {got} when asked about head {asked}")
        check_bounds(one, examples, generator)


def check_period(dense: DenseRule, generator: torch.Generator) -> None:
    """Query and key shifted by the period must get the same answer, near 0 and anywhere in the first periods."""
    period = dense.pattern.period()
    if period is None:
        return
    for h, q, k in _windows(dense, period, generator):
        for shift in (period, 2 * period):
            here, there = _answers(dense, h, q, k), _answers(dense, h, q + shift, k + shift)
            wrong = (here != there).nonzero().tolist() if here is not None and there is not None else []
            if wrong:
                head, query, key = wrong[0]
                q0, k0 = int(q[query]), int(k[key])
                rule = f"{dense.pattern!r}: the rule must repeat after its {period=}"
                pairs = f"query {q0}, key {k0} and query {q0 + shift}, key {k0 + shift}"
                raise AssertionError(f"{rule}; of {pairs} for head {head} one is allowed, the other is not")


def check_confined(dense: DenseRule, generator: torch.Generator) -> None:
    """No allowed pair may cross a multiple of the period."""
    period = dense.pattern.period()
    if period is None or not dense.pattern.confined():
        return
    for h, q, k in _windows(dense, period, generator):
        allowed = _answers(dense, h, q, k)
        if allowed is None:
            continue
        crossing = allowed & (q[:, None] // period != k // period)
        if crossing.any():
            head, query, key = crossing.nonzero()[0].tolist()
            where = f"head {head}, query {int(q[query])}, key {int(k[key])} is allowed"
            rule = f"{dense.pattern!r}: a confined rule must not cross a multiple of its {period=}"
            raise AssertionError(f"{rule}; {where}")


def check_text(pattern: Pattern | Mixture) -> None:
    """The JSON must give an equal pattern back; to_json may refuse."""
    try:
        text = to_json(pattern)
    except TypeError:
        return
    try:
        again = from_json(text)
    except ValueError as error:
        raise AssertionError(f"{pattern!r}: from_json must read what to_json writes: {error}") from error
    if again != pattern or to_json(again) != text or hash(again) != hash(pattern):
        raise AssertionError(f"{pattern!r}: its JSON must give an equal pattern back; got {again!r} from {text}")


def _windows(dense: DenseRule, period: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(heads, queries, keys): the whole table, and windows near each other and anywhere in three periods."""
    heads, whole, side = torch.arange(dense.num_heads), torch.arange(dense.num_tokens), torch.arange(_SIDE)
    yield heads, whole, whole
    for index in range(_WINDOWS):
        q = int(torch.randint(3 * period, (), generator=generator))
        if index % 3 == 0:  # around a border
            q = max(0, period * (1 + index % 2) - _SIDE // 2)
        near = max(0, q + int(torch.randint(-_SIDE, _SIDE, (), generator=generator)))
        k = near if index % 2 == 0 else int(torch.randint(3 * period, (), generator=generator))
        yield heads, q + side, k + side


def _answers(dense: DenseRule, h: Tensor, q: Tensor, k: Tensor) -> Tensor | None:
    """The rule over a window; None where a table in it ends before."""
    try:
        return ask(dense.pattern, dense.num_heads, h[:, None, None], q[:, None], k)
    except IndexError:
        return None
