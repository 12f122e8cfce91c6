"""Dilated segments as the engine of lists computes them: drawn, and planned whatever their length."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

from hypothesis import strategies as st

from flexdilated.masks import Layout, cache
from flexdilated.masks.planning import OperandSizes, Plan, _candidates, machine_of
from flexdilated.masks.planning._candidates import Option
from flexdilated.masks.planning.lowering import padded_terms
from flexdilated.testing import strategies as fst
from tests.support import twins
from tests.support.strategies import Case


@st.composite
def padded_cases(draw: st.DrawFn, max_heads: int = 4, largest: int = 60) -> Case:
    """One or two branches of dilated segments, with or without the past alone; any queries over any keys."""
    H = draw(st.integers(1, max_heads))
    branches = []
    for _ in range(draw(st.integers(1, 2))):
        segment, rate = draw(st.integers(2, 40)), draw(st.integers(2, 6))
        offset = draw(st.one_of(st.sampled_from(["interleaved", "contiguous"]), st.integers(0, rate - 1)))
        one = partial(twins.longnet, [segment], [rate])
        branches.append(one(offsets=offset) if isinstance(offset, str) else twins.dilated(segment, rate, offset))
    twin = branches[0] if len(branches) == 1 else branches[0] + branches[1]
    if draw(st.booleans()):
        twin = twin & twins.causal()
    options = {"num_heads": H, "max_tokens": largest, "blocks": twin.edges}
    where = {"self_attention": False, "all_heads": False}
    return Case.of(twin, draw(fst.attention_sizes(twin.pattern, **options, **where)))


def padded_plan(case: Case) -> Plan:
    """Every branch over its active tokens, also where that is not worth it."""
    bound, layout = case.bind(), Layout(case.num_queries)
    options = []
    for branch, times in Counter(bound.pattern.branches()).items():
        terms = padded_terms(branch, times, bound, side=1)
        assert terms is not None
        options.append((Option(branch, times, "padded", tuple(terms), machine_of("cpu"), layout, OperandSizes()),))
    return Plan.of(bound, layout, tuple(options))


@contextmanager
def everything_padded() -> Iterator[None]:
    """The planner computes all dilated segments over their active tokens, however few these are."""
    with mock.patch.object(_candidates, "padded_terms", partial(padded_terms, side=1)):
        cache().clear()
        yield
    cache().clear()
