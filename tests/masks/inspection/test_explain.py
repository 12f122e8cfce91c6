"""explain: every reason agrees with the rule, and the block around a pair is the one that is listed."""

import json
from dataclasses import replace

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flexdilated import masks
from flexdilated.masks.core._reason import Pair, Reason
from flexdilated.masks.patterns import After, Blockwise, PerDocument
from flexdilated.masks.patterns._per_sample import QueriesFrom
from flexdilated.testing._drawn_inputs import in_range
from tests.support.run_time_strategies import Packed, packed_cases
from tests.support.strategies import cases, whole_cases


def answer(pattern: masks.Pattern, pair: Pair) -> bool:
    """What mask_mod says."""
    mod = pattern.mask_mod(num_heads=pair.num_heads, device=torch.device("cpu"))
    return bool(mod(*map(torch.tensor, (0, pair.head, pair.query, pair.key))))


def disagreements(reason: Reason, pair: Pair) -> list[str]:
    """The rules of a tree that mask_mod contradicts, each asked about the pair as it meets it."""
    wrong = [] if reason.allowed == answer(reason.pattern, pair) else [f"{reason.pattern!r} at {pair}: {reason.text}"]
    rule, parts = reason.pattern, reason.parts
    if isinstance(rule, Blockwise):
        return wrong + disagreements(parts[0], pair.counted("block", pair.query // rule.block, pair.key // rule.block))
    if isinstance(rule, After):
        return wrong + [each for part in parts for each in disagreements(part, _counted_from(rule.start, pair))]
    if isinstance(rule, PerDocument):
        start = int(rule.spans.rows[0, pair.query])
        inner = [] if len(parts) == 1 else disagreements(parts[1], _counted_from(start, pair))
        return wrong + disagreements(parts[0], pair) + inner
    if isinstance(rule, QueriesFrom):
        pair = replace(pair, query=pair.query + rule.start)
    return wrong + [each for part in parts for each in disagreements(part, pair)]


def _counted_from(start: int, pair: Pair) -> Pair:
    return pair.counted("place", pair.query - start, pair.key - start)


def _binds(case: Packed) -> bool:
    try:
        return in_range(case.bind)
    except ValueError as error:
        if "selected blocks must have a row for each block" not in str(error):
            raise
        return False


def drawn_pairs(data: st.DataObject, counts: torch.Tensor, number: int) -> list[list[int]]:
    """Some (head, query, key) of a table of counts, allowed and forbidden ones."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 16)))
    found = []
    for group in (counts > 0).nonzero(), (counts == 0).nonzero():
        found += group[torch.randperm(len(group), generator=generator)[: number // 2]].tolist()
    return found


@settings(max_examples=12)
@given(cases(), st.data())
def test_every_rule_of_the_tree_agrees_with_mask_mod(case, data):
    counts, heads = case.counts(), case.num_heads_global
    for h, q, k in drawn_pairs(data, counts, 24):
        pair = Pair(q + case.q_offset, k + case.k_offset, h + case.head_offset, heads)
        at = {"query": pair.query, "key": pair.key, "head": pair.head}
        found = masks.explain(case.twin.pattern, **at, num_heads=heads)
        assert found.multiplicity == counts[h, q, k]
        assert found.allowed == (found.multiplicity > 0)
        branches = found.parts if isinstance(case.twin.pattern, masks.Mixture) else [found.reason]
        assert [each for branch in branches for each in disagreements(branch, pair)] == []


@settings(max_examples=8)
@given(packed_cases(), st.data())
def test_run_time_tensors_answer_by_batch_entry(case, data):
    b = data.draw(st.integers(0, case.batch - 1))
    rule = case.bind().pattern.entry(b)
    sizes = {"num_tokens": case.q_offset + case.num_queries, "num_keys": case.k_offset + case.num_keys}
    # With all queries from position 0 on, a block list may have rows that name blocks beyond the keys, and a table of
    # selected blocks that begins with a later row has none for the first queries.
    whole = replace(case, num_queries=sizes["num_tokens"], num_keys=sizes["num_keys"], q_offset=0, k_offset=0)
    assume(_binds(whole))
    for h, q, k in drawn_pairs(data, case.counts[b], 6):
        pair = Pair(q + case.q_offset, k + case.k_offset, h, case.num_heads)
        at = {"query": pair.query, "key": pair.key, "head": h, "num_heads": case.num_heads, "batch": b}
        found = masks.explain(case.pattern, **at, **sizes)
        assert found.multiplicity == case.counts[b, h, q, k]
        assert [each for branch in rule.branches() for each in disagreements(branch.reason(pair), pair)] == []
        assert found.pattern == case.pattern, "the tree names tensors as the pattern does"


@settings(max_examples=8)
@given(whole_cases(), st.data(), st.sampled_from([(1, 1), (4, 3), (16, 16)]))
def test_the_block_is_the_one_that_is_listed(case, data, sides):
    N, H, counts = case.num_keys, case.num_heads, case.counts() > 0
    rate = masks.layout(case.twin.pattern, N).rate
    orders = [masks.Layout(N, each) for each in ((1, rate) if 1 < rate <= N else (1,))]
    tables = [
        masks.block_mask(case.twin.pattern, N, num_heads=H, layout=order, block_size=sides).to_dense()[0]
        for order in orders
    ]
    for h, q, k in drawn_pairs(data, counts, 4):
        found = masks.explain(
            case.twin.pattern, query=q, key=k, head=h, num_heads=H, num_tokens=N, block_size=sides
        ).standings
        for each, order, listed in zip(found, orders, tables, strict=True):
            tokens = order.positions()
            assert (each.rate, tokens[each.query_slot], tokens[each.key_slot]) == (order.rate, q, k)
            assert (each.row, each.column) == (each.query_slot // sides[0], each.key_slot // sides[1])
            rows, columns = (tokens.split(side)[at] for side, at in zip(sides, (each.row, each.column), strict=True))
            block = counts[h][rows][:, columns]
            assert (each.allowed_pairs, each.block_pairs) == (int(block.sum()), block.numel())
            assert each.computed == bool(listed[h % len(listed), each.row, each.column])


IDS = torch.tensor([[0] * 30 + [1] * 20 + [-1] * 5, [0] * 55])


def test_the_tree_of_a_mixture():
    pattern = (masks.dilated(4, 1) + masks.dilated(8, 2, 1)) & masks.causal()
    found = masks.explain(pattern, query=3, key=1, num_tokens=8, block_size=4)
    assert str(found) == (
        "query 3, key 1, head 0 of 1: allowed, 2 times\n"
        "yes  (dilated(4, 1) & causal()) + (dilated(8, 2, offset=1) & c...: allowed by 2 of 2 branches: "
        "it counts 2 times\n"
        "  yes  dilated(4, 1) & causal(): all 2 parts allow it\n"
        "    yes  dilated(4, 1): both are in segment 0 (0 to 3)\n"
        "    yes  causal(): key 1 is 2 tokens before query 3\n"
        "  yes  dilated(8, 2, offset=1) & causal(): all 2 parts allow it\n"
        "    yes  dilated(8, 2, offset=1): both are in segment 0 (0 to 7), where head 0 takes the places of residue 1 "
        "modulo 2: query 3 has residue 1, key 1 residue 1\n"
        "    yes  causal(): key 1 is 2 tokens before query 3\n"
        "natural order: block (0, 0) allows 10 of its 16 pairs and is computed with a mask\n"
        "residue-major order of rate 2, slots 5 and 4: block (1, 1) allows 10 of its 16 pairs and is computed "
        "with a mask"
    )
    data = json.loads(json.dumps(found.to_data()))
    assert data["multiplicity"] == 2
    assert data["parts"][1]["parts"][0]["text"].startswith("both are in segment 0 (0 to 7)")
    assert data["standings"][1] == {
        **{"order": "residue", "rate": 2, "query_slot": 5, "key_slot": 4, "block": [1, 1]},
        **{"allowed_pairs": 10, "block_pairs": 16, "computed": True},
    }


def test_tensors_by_name_are_found_and_named():
    pattern = masks.causal().per_document("ids")
    at = {"query": 34, "key": 3, "num_tokens": 55, "bindings": {"ids": IDS}}
    first, second = (masks.explain(pattern, batch=batch, **at) for batch in (0, 1))
    assert (first.allowed, second.allowed) == (False, True)
    assert "documents('ids'): query 34 is in document 1 (30 to 49), key 3 in document 0 (0 to 29)" in str(first)
    assert str(second).startswith("query 34, key 3, head 0 of 1, batch entry 1: allowed\n")
