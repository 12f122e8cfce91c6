"""Rows: the keys of one query, in closed form or searched, are those of the dense rule."""

import operator
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexdilated.engines._rows import branch_rules
from flexdilated.masks.attended import _row
from tests.support import strategies

STEPS = strategies.strided_kinds() | strategies.dilated_windows()
PROGRESSIONS = st.builds(operator.or_, STEPS, STEPS)  # that may meet


@settings(max_examples=50)
@given(data=st.data(), base=st.sampled_from([0, 0, 2**30]))
def test_closed_forms_are_the_rules(data: st.DataObject, base: int) -> None:
    """Of any set: ranges without overlap, none of them empty, of just the keys that are seen, wherever these lie.

    At 2^30 a list of all keys before would not end.
    """
    num_heads = data.draw(st.integers(1, 3))
    pattern = data.draw(PROGRESSIONS if data.draw(st.booleans()) else strategies.sets(num_heads)).pattern
    query, begin = (base + data.draw(st.integers(0, 40)) for _ in range(2))
    keys = range(begin, begin + data.draw(st.integers(0, 40)))
    allowed = pattern.mask_mod(num_heads=num_heads, device=torch.device("cpu"))
    for head in range(num_heads):
        ranges = pattern.for_head(head, num_heads).row(query, keys)
        of_query = torch.tensor(0), torch.tensor(head), torch.tensor(query)
        seen = allowed(*of_query, torch.tensor([*keys], dtype=torch.int64))
        if ranges is not None:
            assert all(ranges)
            assert len(ranges) <= len(keys)
            found = sorted(key for each in ranges for key in each)
            assert found == [keys[n] for n in seen.nonzero().flatten().tolist()]


@given(data=st.data())
def test_rows_of_a_step_are_the_rules(data: st.DataObject) -> None:
    """As a call of few queries asks for them, and by search: the same keys, each once, and the pairs among them."""
    case = data.draw(strategies.whole_cases(strategies.sets))
    first, begin = (data.draw(st.integers(0, case.num_keys - 1)) for _ in range(2))
    queries = range(first, min(case.num_keys, first + data.draw(st.integers(1, 16))))
    keys = range(begin, data.draw(st.integers(begin + 1, case.num_keys)))
    expected = (case.counts() > 0)[:, queries.start : queries.stop, keys.start : keys.stop]
    for rule in branch_rules(
        case.twin.pattern, num_heads=case.num_heads, head_offset=0, num_heads_global=case.num_heads
    )[0]:
        ways = []
        for meetings, few_pairs in ((1 << 9, 1 << 20), (1 << 9, 0), (0, 1 << 20), (0, 0)):
            with mock.patch.multiple(_row, _MOST_MEETINGS=meetings, _FEW_PAIRS=few_pairs):
                ways += [rule.source.seen(queries, keys), rule.source._searched(queries, keys)]
        for seen in ways:
            found = torch.zeros(len(queries), case.num_keys, dtype=torch.int64)
            if seen is not None:
                listed = seen.keys if isinstance(seen.keys, torch.Tensor) else _row.positions(seen.keys)
                assert len(listed.unique()) == len(listed)
                rows = torch.arange(len(queries))[seen.rows.start : seen.rows.stop : seen.rows.step]
                shown = 1 if seen.pairs is None else seen.pairs.long()
                assert seen.pairs is None or seen.pairs.any(0).all(), "a key that no query sees is not read"
                found[rows[:, None], listed] += shown
            for head in rule.heads:
                assert torch.equal(found[:, keys.start : keys.stop] > 0, expected[head])
                assert found.sum() == expected[head].sum()
