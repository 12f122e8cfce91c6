"""explain: every reason agrees with the rule and says its numbers; the block around a pair is the one listed."""

import json
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flexdilated import masks
from flexdilated.masks.core._reason import Pair, Reason, listing
from flexdilated.masks.patterns import After, Blockwise, PerDocument
from flexdilated.masks.patterns._from_block_mask import PositionsBelow
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


def window(b, h, q, k):
    return (q - k) % 7 == h


# Of a reason, whatever its sentences: the numbers, what each is of, and how they relate.
FACTS = re.compile(
    r"\d+|\b(?:query|key|head|before|after|own|different|beyond|padding|visible|hidden|not|none|outside|residue|segment|"
    r"block|forbidden|allowed|forbids|allows|True|False)\b"
)
ROWS = torch.tensor([[0, -1], [-1, -1], [1, -1], [2, 1], [3, 0], [3, 2]])
SELECTED = masks.selected_blocks(ROWS[None], block=(10, 16), most=2)
SPARSE = masks.sparse((torch.eye(55) + torch.eye(55).roll(-5, 1)).to_sparse())
# A pattern, the pair (query, key, head, heads), whether it is allowed, and the facts of the reason.
TEXTS = [
    (masks.causal(), (50, 17, 0, 1), True, "key 17 33 before query 50"),
    (masks.causal(), (17, 17, 0, 1), True, "key 17 query own"),
    (masks.dilated(2048, 4), (5000, 17, 0, 1), False,
     "query 5000 segment 2 4096 6143 key 17 segment 0 0 2047 different"),
    (masks.dilated(2048, 1), (5000, 6143, 0, 1), True, "segment 2 4096 6143"),
    (masks.dilated(10, 4, "interleaved"), (13, 17, 7, 8), True,
     "segment 1 10 19 head 7 residue 3 4 query 13 residue 3 key 17 residue 3"),
    (masks.longnet([10], [4], offsets="contiguous", padding="zeros"), (13, 16, 7, 8), False,
     "segment 1 10 19 head 7 residue 3 4 query 13 residue 3 key 16 residue 2"),
    (masks.local_window(left=3, right=0), (50, 46, 0, 1), False, "key 46 4 before query 50 3 before 0 after"),
    (masks.dilated_window(left=2, right=3, rate=5), (50, 65, 0, 1), True,
     "key 65 15 after query 50 3 5 2 before 3 after"),
    (masks.global_tokens(16), (3, 2, 0, 1), True, "query 3 16 key 2 16"),
    (masks.first_tokens(4), (2, 17, 0, 1), False, "key 17 not 4"),
    (masks.landmark_tokens(64), (128, 17, 0, 1), True, "query 128 64 key 17 17 64"),
    (masks.strided(7), (50, 22, 0, 1), True, "key 22 28 before query 50 4 7"),
    (masks.fixed(8, summary=2), (1, 14, 0, 1), True, "key 14 block 8 14 15"),
    (masks.random_blocks(6400, seed=3), (500, 17, 0, 1), False, "query 500 block 7 key 5 72 79 head 0 key 17 block 0"),
    (masks.random_blocks(200), (500, 17, 0, 1), False, "query 500 beyond 200"),
    (masks.block_list([[0], [0, 1]], block=8), (9, 17, 0, 1), False, "query 9 block 1 key 0 1 key 17 block 2"),
    (masks.block_list([[[0]], [[]]], block=8), (7, 1, 1, 2), False, "query 7 block 0 head 1 key none key 1 block 0"),
    (masks.block_list([[0]], block=8), (8, 1, 0, 1), False, "query 8 block 1 beyond 1 key 1 block 0"),
    (masks.neighborhood((100, 64), 3, rate=(1, 2)), (500, 17, 0, 1), False,
     "query 500 7 52 4 10 46 58 2 key 17 0 17 outside 0 1"),
    (masks.neighborhood((9,), 1), (9, 10, 0, 1), False, "query 9 key 10 beyond 9"),
    (masks.neighborhood((9,), 1, wrap=True), (0, 8, 0, 1), True, "query 0 0 0 1 8 key 8 8"),
    (masks.neighborhood((4, 12), (0, 1), rate=(1, 3), wrap=True), (13, 17, 0, 1), False,
     "query 13 1 1 1 1 4 10 3 key 17 1 5 outside 1"),
    (masks.neighborhood((9,), kernel_size=4, causal=True), (5, 6, 0, 1), False, "query 5 5 2 5 key 6 6 outside 0"),
    (masks.documents(IDS[0]), (34, 29, 0, 1), False, "query 34 1 30 49 key 29 0 0 29 different"),
    (masks.documents(IDS[0]), (54, 50, 0, 1), False, "query 54 key 50 padding"),
    (masks.lengths(torch.tensor(40)), (39, 40, 0, 1), False, "key 40 padding"),
    (masks.visible_keys(torch.arange(55) % 3 == 0), (33, 34, 0, 1), False, "key 34 hidden"),
    (SELECTED, (34, 50, 0, 1), False, "query 34 block 3 key 1 2 key 50 block 3"),
    (SELECTED, (15, 3, 0, 1), False, "query 15 block 1 key none key 3 block 0"),
    (SPARSE, (34, 29, 0, 1), True, "query 34 29 34 key 29"),
    (SPARSE, (34, 30, 0, 1), False, "query 34 29 34 key 30 key"),
    (masks.causal().per_document(IDS[0]), (34, 33, 0, 1), True, "30 allowed"),
    (masks.causal().after(5), (34, 33, 0, 1), True, "5 allowed"),
    (masks.grid_window((5, 11), (2, 1)), (34, 24, 0, 1), True, "query 34 3 1 key 24 2 2 1 1 2 1"),
    (masks.causal().before(9), (8, 3, 0, 1), True, "before 9 allowed"),
    (masks.causal().before(9), (9, 3, 0, 1), False, "query 9 9"),
    (masks.causal().after(5), (34, 3, 0, 1), False, "key 3 before 5"),
    (masks.blockwise(masks.causal(), 64), (3, 60, 0, 1), True, "query 3 block 0 64 key 60 block 0"),
    (masks.per_head([masks.causal(), ~masks.causal()]), (3, 2, 1, 2), False, "head 1 2 2"),
    (masks.head_groups([masks.causal(), ~masks.causal()]), (3, 2, 1, 5), True, "head 1 1 2 0 2"),
    (masks.custom(window), (340, 33, 2, 4), False, "False head 2 query 340 key 33"),
    (PositionsBelow(55, 60), (3, 2, 0, 1), True, "55 60 allowed"),
    (masks.mask(torch.ones(55, 55).tril() > 0), (2, 3, 0, 1), False, "False query 2 key 3"),
    (masks.same_document(IDS[0], IDS[0]), (31, 40, 0, 1), True, "query 31 1 key 40 1"),
    (masks.same_document(IDS[0], IDS[0]), (53, 54, 0, 1), False, "query 53 padding key 54 padding"),
    (masks.per_sample([masks.causal(), masks.every()], torch.tensor([1])), (3, 4, 0, 1), True, "2 2"),
    (masks.causal().queries_from(torch.tensor([9])), (3, 13, 0, 1), False, "query 3 12"),
    (masks.every(), (3, 2, 0, 1), True, "allowed"),
    (masks.causal() & masks.strided(2) & masks.first_tokens(2), (3, 4, 0, 1), False, "forbidden 1 2 3 3"),
    (masks.causal() & masks.strided(2), (4, 2, 0, 1), True, "2"),
    (masks.causal() | masks.strided(2), (3, 2, 0, 1), True, "allowed 1 2"),
    (masks.causal() | masks.strided(2), (3, 4, 0, 1), False, "none 2 allows"),
    (~masks.causal(), (3, 4, 0, 1), True, "forbids"),
    (~masks.causal(), (4, 3, 0, 1), False, "allows"),
]  # fmt: skip
# Bases of others; what run-time patterns become when their tensors are known; and slots, which no expression holds.
NO_KINDS = {
    *("Band", "Composite", "MarkedTokens", "_Combination", "_HeadChoice", "RunTime", "Table", "Spans", "KeySet"),
    *("OnGrid", "SelectedTable", "SparseTable", "MaskTable", "SpanPairs", "EntryNumber", "Tiled"),
}


def explained(pattern, query, key, head, heads):
    tokens = 55 if pattern.varies else None
    return masks.explain(pattern, query=query, key=key, head=head, num_heads=heads, num_tokens=tokens)


@pytest.mark.parametrize(("pattern", "pair", "allowed", "facts"), TEXTS)
def test_what_each_pattern_says(pattern, pair, allowed, facts):
    found = explained(pattern, *pair)
    assert (" ".join(FACTS.findall(found.text)), found.allowed) == (facts, allowed)


def all_kinds(base: type) -> set[type]:
    return {base}.union(*(all_kinds(kind) for kind in base.__subclasses__()))


def test_every_reason_of_a_pattern_is_held_to_its_words():
    """A new one has its words here; a pattern without one of its own says how far the key is from the query."""
    kinds = {kind for kind in all_kinds(masks.Pattern) - {masks.Pattern} if kind.__module__.startswith("flexdilated.")}
    stated = {kind.__name__ for kind in kinds if kind.reason is not masks.Pattern.reason}
    assert stated - NO_KINDS <= {type(explained(row[0], *row[1]).pattern).__name__ for row in TEXTS}


def test_many_blocks_are_cut_short():
    assert listing(range(20)) == "0, 1, 2, 3, 4, 5, 6, 7 and 12 more"
    assert (listing([]), listing([4]), listing([4, 5])) == ("none", "4", "4 and 5")
