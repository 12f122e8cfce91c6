"""Rows: the keys of one query, in closed form or searched, are those of the dense rule; and ranges as sets."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from flexdilated._head_groups import branch_rules
from flexdilated.masks._ranges import as_ranges, intersect, unite
from tests import strategies


@given(data=st.data())
def test_closed_forms_are_the_rules(data: st.DataObject) -> None:
    """Of any set, causal or not: ranges without overlap, none of them empty, of just the keys that are seen."""
    case = data.draw(strategies.whole_cases(strategies.sets))
    query = data.draw(st.integers(0, case.num_keys - 1))
    for head, seen in enumerate(case.counts()[:, query]):
        ranges = case.twin.pattern.for_head(head, case.num_heads).row(query, case.num_keys)
        if ranges is not None:
            assert all(ranges)
            assert sorted(key for keys in ranges for key in keys) == seen.nonzero().flatten().tolist()


@given(data=st.data())
def test_rows_of_a_step_are_the_rules(data: st.DataObject) -> None:
    """As a decoding step asks for them, and by search, of one row or some ahead: the same keys, each once."""
    case = data.draw(strategies.whole_cases(strategies.causal_twins))
    query = case.num_keys - 1
    expected = case.counts()[:, query]
    asked, searched = torch.zeros_like(expected), torch.zeros_like(expected)
    heads = {"num_heads": case.num_heads, "head_offset": 0, "num_heads_global": case.num_heads}
    for branch in branch_rules(case.twin.pattern, **heads):
        times = round(torch.tensor(branch.log_weight).exp().item())
        for rule in branch.rules:
            keys = rule.source.keys(query)
            listed = keys.tolist() if isinstance(keys, torch.Tensor) else [key for part in keys for key in part]
            assert len(set(listed)) == len(listed)
            ahead = data.draw(st.integers(1, query + 1))
            rule.source._rows_ahead = ahead
            found = rule.source._search(query + 1 - ahead, 0)[query]
            for head in rule.heads:
                asked[head, listed] += times
                searched[head].index_add_(0, found, torch.full_like(found, times))
    assert torch.equal(asked, expected)
    assert torch.equal(searched, expected)


starts, steps = st.one_of(st.just(0), st.integers(0, 20)), st.one_of(st.just(1), st.integers(1, 12))
progressions = st.builds(range, starts, st.integers(0, 60), steps)


@given(progressions, progressions)
def test_intersections(left: range, right: range) -> None:
    assert set(intersect(left, right)) == set(left) & set(right)


@given(st.lists(progressions, max_size=4))
def test_unions(parts: list[range]) -> None:
    """Each position once; runs always fit, and progressions that meet may be given up."""
    ranges = tuple(keys for part in parts for keys in as_ranges(part))
    united = unite(ranges)
    if united is None:
        coarse = [keys for keys in ranges if keys.step > 1]
        assert any(set(a) & set(b) for index, a in enumerate(coarse) for b in coarse[:index])
    else:
        assert all(united)
        assert sorted(key for keys in united for key in keys) == sorted(set().union(*ranges))
