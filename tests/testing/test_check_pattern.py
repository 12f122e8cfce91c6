"""check_pattern: true patterns pass, and every kind of false claim is found and shown small."""

import re
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexdilated import masks
from flexdilated.masks.core._box import Bounds
from flexdilated.masks.core._pattern import Pattern
from flexdilated.testing import check_pattern
from flexdilated.testing._drawn_patterns import classify_window, window_by_head
from tests.support.strategies import expressions, functions

QUICK = {"num_heads": 3, "max_tokens": 40, "examples": 10}


@settings(max_examples=6)
@given(st.one_of(expressions(3), functions()))
def test_true_patterns_pass(twin):
    try:
        check_pattern(twin.pattern, num_heads=3, max_tokens=24, examples=4)
    except ValueError as error:  # a table that ends, or one that names blocks beyond the tokens
        assert re.search("must name blocks below|within the .* tokens|must be defined", str(error))  # noqa: PT017


@dataclass(frozen=True)
class Claims(Pattern):
    """A pattern with some of its statements replaced, which no JSON gives back."""

    kind = "claims"

    inner: Pattern
    false: dict[str, Any] = field(default_factory=dict, hash=False)

    def parameters(self):
        return {"inner": self.inner, "false": str(hash(repr(self.false)))}

    def phrase(self):
        return self.inner.phrase()

    def mask_mod(self, *, num_heads, device):
        return self.false.get("mask_mod", self.inner.mask_mod(num_heads=num_heads, device=device))

    def count(self, box, *, num_heads):
        bounds = self.inner.count(box, num_heads=num_heads)
        return self.false["count"](bounds, box) if "count" in self.false else bounds

    def for_head(self, head, num_heads):
        one = replace(self, inner=self.inner.for_head(head, num_heads))
        return self.false["for_head"](head, num_heads) if "for_head" in self.false else one

    def period(self):
        return self.false.get("period", self.inner.period())

    def confined(self):
        return self.false.get("confined", self.inner.confined())


def beyond(b, h, q, k):
    return (k <= q) & (k <= q.max() - 3)


def full_to_the_diagonal(bounds: Bounds, box) -> Bounds:
    """Takes a box whose last query sees its last key for full."""
    return Bounds(torch.where(box.q.last >= box.k.last, box.area, bounds.low), box.area)


def steps_taken_for_ranges(bounds: Bounds, box) -> Bounds:
    """Right over ranges, and one too many over progressions with gaps."""
    return Bounds(bounds.low + (box.q.step == 3), bounds.high)


DILATED, CAUSAL, WINDOW = masks.dilated(8, 2), masks.causal(), masks.local_window(left=9, right=0)
BY_HEAD = masks.per_head([CAUSAL, WINDOW, CAUSAL])
WIDTHS = torch.tensor([9, 4, 30])


def empty_too_soon(head, q_first, q_last, k_first, k_last):
    return torch.where(q_first - k_last >= WIDTHS[head] - 1, masks.EMPTY, masks.PARTIAL)


WRONG = masks.custom(window_by_head(WIDTHS), classify=empty_too_soon)
LATE = masks.custom(lambda b, h, q, k: (q // 30) == (k // 30), period=1)  # right at the start, where construction looks
FAR = {"period": 2048, "confined": False}
FALSE = {
    "full too early": (CAUSAL, {"count": full_to_the_diagonal}, "queries 0 to 1, keys 1: 1 of 2 pairs .* says 2"),
    "only with steps": (CAUSAL, {"count": steps_taken_for_ranges}, "in steps of 3.*count says"),
    "for_head of another": (BY_HEAD, {"for_head": lambda head, H: CAUSAL}, r"for_head\(1\) must be the rule of head 1"),
    "period too short": (DILATED, {"period": 4}, "must repeat after its period=4"),
    "period far away": (masks.dilated(3000, 1), FAR, "must repeat after its period=2048"),
    "not confined": (CAUSAL, {"confined": True}, "a confined rule must not cross a multiple of its period=1"),
    "not by pairs": (CAUSAL, {"mask_mod": beyond}, "each pair by itself"),
    "off by one": (
        masks.custom(window_by_head(WIDTHS), classify=classify_window(WIDTHS + 1)),
        None,
        r"count must bound the allowed pairs of each box; head 0, queries 9, keys 0: 0 of 1 pairs are allowed, count "
        r"says 1 to 1 \(FULL\)$",
    ),
    "inside a composition": (~(WRONG & masks.causal()), None, "count must bound"),
    "period of a function": (LATE, None, r"must repeat after its period=1; of query .* one is allowed"),
}  # fmt: skip


@pytest.mark.parametrize("name", FALSE)
def test_false_claims_are_found(name):
    inner, false, says = FALSE[name]
    with pytest.raises(AssertionError, match=says):
        check_pattern(inner if false is None else Claims(inner, false), **QUICK)
