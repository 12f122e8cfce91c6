"""What explain says of each kind of pattern: its numbers and verdicts, in order; a kind without a reason is found."""

import re

import pytest
import torch

from flexdilated import masks
from flexdilated.masks.core._reason import listing
from flexdilated.masks.patterns._from_block_mask import PositionsBelow

IDS = torch.tensor([[0] * 30 + [1] * 20 + [-1] * 5, [0] * 55])


def window(b, h, q, k):
    return (q - k) % 7 == h


# Of a reason, whatever its sentences: the numbers, what each is of, and how they relate.
FACTS = re.compile(
    r"\d+|\b(?:query|key|head|before|after|own|different|beyond|padding|visible|hidden|not|none|outside|residue|segment|"
    r"block|forbidden|allowed|forbids|allows|True|False)\b"
)
ROWS = torch.tensor([[0, -1], [-1, -1], [1, -1], [2, 1], [3, 0], [3, 2]])
SELECTED = masks.selected_blocks(ROWS[None], block=(10, 16), most=2)
# A pattern, the pair (query, key, head, heads), whether it is allowed, and the facts of the reason.
TEXTS = [
    (masks.causal(), (50, 17, 0, 1), True, "key 17 33 before query 50"),
    (masks.causal(), (17, 17, 0, 1), True, "key 17 query own"),
    (masks.dilated(2048, 4), (5000, 17, 0, 1), False,
     "query 5000 segment 2 4096 6143 key 17 segment 0 0 2047 different"),
    (masks.dilated(2048, 1), (5000, 6143, 0, 1), True, "segment 2 4096 6143"),
    (masks.dilated(10, 4, "interleaved"), (13, 17, 7, 8), True,
     "segment 1 10 19 head 7 residue 3 4 query 13 residue 3 key 17 residue 3"),
    (masks.dilated(10, 4, "contiguous"), (13, 16, 7, 8), False,
     "segment 1 10 19 head 7 residue 3 4 query 13 residue 3 key 16 residue 2"),
    (masks.longnet([10], [4], offsets="contiguous", padding="zeros"), (13, 16, 7, 8), False,
     "segment 1 10 19 head 7 residue 3 4 query 13 residue 3 key 16 residue 2"),
    (masks.local_window(left=3, right=0), (50, 46, 0, 1), False, "key 46 4 before query 50 3 before 0 after"),
    (masks.dilated_window(left=2, right=3, rate=5), (50, 65, 0, 1), True,
     "key 65 15 after query 50 3 5 2 before 3 after"),
    (masks.dilated_window(left=2, right=3, rate=5), (50, 38, 0, 1), False, "key 38 12 before query 50 2 5"),
    (masks.global_tokens(16), (3, 2, 0, 1), True, "query 3 16 key 2 16"),
    (masks.global_tokens(16), (16, 17, 0, 1), False, "query 16 not 16 key 17 not 16"),
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
    (masks.neighborhood((9,), 1, rate=3), (4, 5, 0, 1), False, "query 4 4 1 7 3 key 5 5 outside 0"),
    (masks.neighborhood((9,), 1), (9, 10, 0, 1), False, "query 9 key 10 beyond 9"),
    (masks.neighborhood((9,), kernel_size=4, stride=3), (5, 1, 0, 1), False, "query 5 5 2 5 key 1 1 outside 0"),
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
    (masks.causal().per_document(IDS[0]), (34, 33, 0, 1), True, "30 allowed"),
    (masks.causal().after(5), (34, 33, 0, 1), True, "5 allowed"),
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
    *("SelectedTable", "MaskTable", "SpanPairs", "EntryNumber", "Tiled"),
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
