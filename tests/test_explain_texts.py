"""What explain says of each kind of pattern, word for word; a kind without a reason is found."""

import pytest
import torch

from flexdilated import masks
from flexdilated.masks._reason import listing

IDS = torch.tensor([[0] * 30 + [1] * 20 + [-1] * 5, [0] * 55])


def window(b, h, q, k):
    return (q - k) % 7 == h


# For each kind of pattern: it, the pair (query, key, head, heads), and what is said.
TEXTS = {
    "Causal": [
        (masks.causal(), (50, 17, 0, 1), True, "key 17 is 33 tokens before query 50"),
        (masks.causal(), (16, 17, 0, 1), False, "key 17 is 1 token after query 16"),
        (masks.causal(), (17, 17, 0, 1), True, "key 17 is the query's own"),
    ],
    "Dilated": [
        (
            *(masks.dilated(2048, 4), (5000, 17, 0, 1), False),
            "query 5000 is in segment 2 (4096 to 6143), key 17 in segment 0 (0 to 2047): different segments",
        ),
        (masks.dilated(2048, 1), (5000, 6143, 0, 1), True, "both are in segment 2 (4096 to 6143)"),
        (
            *(masks.dilated(10, 4, "interleaved"), (13, 17, 7, 8), True),
            "both are in segment 1 (10 to 19), where head 7 takes the places of residue 3 modulo 4: "
            "query 13 has residue 3, key 17 residue 3",
        ),
        (
            *(masks.dilated(10, 4, "contiguous"), (13, 16, 7, 8), False),
            "both are in segment 1 (10 to 19), where head 7 takes the places of residue 3 modulo 4: "
            "query 13 has residue 3, key 16 residue 2",
        ),
    ],
    "LocalWindow": [
        (
            *(masks.local_window(left=3, right=0), (50, 46, 0, 1), False),
            "key 46 is 4 tokens before query 50: the window reaches 3 before and 0 after",
        ),
    ],
    "DilatedWindow": [
        (
            *(masks.dilated_window(left=2, right=3, rate=5), (50, 65, 0, 1), True),
            "key 65 is 15 tokens after query 50, 3 times 5: the window reaches 2 such steps before and 3 after",
        ),
        (
            *(masks.dilated_window(left=2, right=3, rate=5), (50, 38, 0, 1), False),
            "key 38 is 12 tokens before query 50, 2 more than a multiple of 5",
        ),
    ],
    "GlobalTokens": [
        (
            *(masks.global_tokens(16), (3, 2, 0, 1), True),
            "query 3 is one of the first 16, which see every key; key 2 is one of the first 16, which every query sees",
        ),
        (masks.global_tokens(16), (16, 17, 0, 1), False, "query 16 and key 17 are not among the first 16"),
        (masks.first_tokens(4), (2, 17, 0, 1), False, "key 17 is not among the first 4"),
    ],
    "LandmarkTokens": [
        (
            *(masks.landmark_tokens(64), (128, 17, 0, 1), True),
            "query 128 is a multiple of 64 and key 17 is 17 past a multiple of 64",
        ),
        (masks.landmark_tokens(64, rows=False), (128, 65, 0, 1), False, "key 65 is 1 past a multiple of 64"),
    ],
    "Strided": [
        (masks.strided(7), (50, 22, 0, 1), True, "key 22 is 28 tokens before query 50: 4 times 7"),
        (masks.strided(7), (22, 52, 0, 1), False, "key 52 is 30 tokens after query 22: 4 times 7 and 2"),
    ],
    "Fixed": [
        (
            *(masks.fixed(8, summary=2), (1, 14, 0, 1), True),
            "key 14 is in a summary: the summary of its block of 8 is 14 to 15",
        ),
        (masks.fixed(8), (1, 8, 0, 1), False, "key 8 is not in a summary: the summary of its block of 8 is 15"),
    ],
    "RandomBlocks": [
        (
            *(masks.random_blocks(6400, seed=3), (500, 17, 0, 1), False),
            "query 500 is in block 7, which drew key blocks 5, 72 and 79 for head 0; key 17 is in block 0",
        ),
        (
            *(masks.random_blocks(200), (500, 17, 0, 1), False),
            "query 500 is beyond the 200 tokens of the draw",
        ),
    ],
    "BlockList": [
        (
            *(masks.block_list([[0], [0, 1]], block=8), (9, 17, 0, 1), False),
            "query 9 is in block 1, whose row names key blocks 0 and 1; key 17 is in block 2",
        ),
        (
            *(masks.block_list([[[0]], [[]]], block=8), (7, 1, 1, 2), False),
            "query 7 is in block 0, whose row of head 1 names key blocks none; key 1 is in block 0",
        ),
        (
            *(masks.block_list([[0]], block=8), (8, 1, 0, 1), False),
            "query 8 is in block 1, beyond the 1 rows; key 1 is in block 0",
        ),
    ],
    "Neighborhood": [
        (
            *(masks.neighborhood((100, 64), 3, rate=(1, 2)), (500, 17, 0, 1), False),
            "query 500 is at (7, 52) and sees 4 to 10 x 46 to 58 in steps of 2; key 17 is at (0, 17): "
            "outside along axis 0 and 1",
        ),
        (masks.neighborhood((9,), 1), (0, 2, 0, 1), True, "query 0 is at (0) and sees 0 to 2; key 2 is at (2)"),
        (
            *(masks.neighborhood((9,), 1, rate=3), (4, 5, 0, 1), False),
            "query 4 is at (4) and sees 1 to 7 in steps of 3; key 5 is at (5): outside along axis 0",
        ),
        (masks.neighborhood((9,), 1), (9, 10, 0, 1), False, "query 9 and key 10 are beyond the grid's 9 tokens"),
    ],
    "Documents": [
        (masks.documents(IDS[0]), (34, 49, 0, 1), True, "both are in document 1 (30 to 49)"),
        (
            *(masks.documents(IDS[0]), (34, 29, 0, 1), False),
            "query 34 is in document 1 (30 to 49), key 29 in document 0 (0 to 29): different documents",
        ),
        (masks.documents(IDS[0]), (54, 50, 0, 1), False, "query 54 and key 50 are padding"),
    ],
    "Lengths": [(masks.lengths(torch.tensor(40)), (39, 40, 0, 1), False, "key 40 is padding")],
    "VisibleKeys": [
        (masks.visible_keys(torch.arange(55) % 3 == 0), (34, 33, 0, 1), True, "key 33 is visible"),
        (masks.visible_keys(torch.arange(55) % 3 == 0), (33, 34, 0, 1), False, "key 34 is hidden"),
    ],
    "PerDocument": [
        (
            *(masks.causal().per_document(IDS[0]), (34, 33, 0, 1), True),
            "counted from 30, where their document begins, the pair is allowed",
        ),
        (masks.causal().per_document(IDS[0]), (34, 3, 0, 1), False, "forbidden across documents"),
    ],
    "Blockwise": [
        (
            *(masks.blockwise(masks.causal(), 64), (3, 60, 0, 1), True),
            "query 3 is in block 0 of 64, key 60 in block 0",
        ),
    ],
    "PerHead": [
        (masks.per_head([masks.causal(), ~masks.causal()]), (3, 2, 1, 2), False, "head 1 follows part 2 of 2"),
    ],
    "HeadGroups": [
        (
            *(masks.head_groups([masks.causal(), ~masks.causal()]), (3, 2, 1, 5), True),
            "head 1 follows part 1 of 2, as heads 0 to 2 do",
        ),
    ],
    "Custom": [
        (
            *(masks.custom(window), (340, 33, 2, 4), False),
            "the function window says False for head 2, query 340 and key 33",
        ),
        (masks.custom(window), (9, 0, 2, 4), True, "the function window says True for head 2, query 9 and key 0"),
    ],
    "Every": [(masks.every(), (3, 2, 0, 1), True, "every pair is allowed")],
    "And": [
        (
            *(masks.causal() & masks.strided(2) & masks.first_tokens(2), (3, 4, 0, 1), False),
            "forbidden by parts 1, 2 and 3 of 3",
        ),
        (masks.causal() & masks.strided(2), (4, 2, 0, 1), True, "all 2 parts allow it"),
    ],
    "Or": [
        (masks.causal() | masks.strided(2), (3, 2, 0, 1), True, "allowed by part 1 of 2"),
        (masks.causal() | masks.strided(2), (3, 4, 0, 1), False, "none of 2 parts allows it"),
    ],
    "Not": [
        (~masks.causal(), (3, 4, 0, 1), True, "its part forbids it"),
        (~masks.causal(), (4, 3, 0, 1), False, "its part allows it"),
    ],
}
# Bases of others; what run-time patterns become when their tensors are known; and slots, which no expression holds.
NO_KINDS = {"Composite", "_Combination", "_HeadChoice", "RunTime", "Table", "Spans", "KeySet", "Tiled"}


@pytest.mark.parametrize("kind", TEXTS)
def test_what_each_kind_says(kind):
    for pattern, (query, key, head, heads), allowed, text in TEXTS[kind]:
        tokens = 55 if pattern.varies else None
        found = masks.explain(pattern, query=query, key=key, head=head, num_heads=heads, num_tokens=tokens)
        assert type(found.pattern).__name__ == kind
        assert (found.text, found.allowed) == (text, allowed)


def all_kinds(base: type) -> set[type]:
    return {base}.union(*(all_kinds(kind) for kind in base.__subclasses__()))


def test_every_kind_of_pattern_states_a_reason():
    """A new one needs a `reason`, and its words here."""
    kinds = {kind for kind in all_kinds(masks.Pattern) - {masks.Pattern} if kind.__module__.startswith("flexdilated.")}
    assert {kind.__name__ for kind in kinds} - NO_KINDS == set(TEXTS)
    silent = [kind.__name__ for kind in kinds if kind.reason is masks.Pattern.reason]
    assert set(silent) <= {"Composite", "_Combination", "Table", "Tiled"}


def test_many_blocks_are_cut_short():
    assert listing(range(20)) == "0, 1, 2, 3, 4, 5, 6, 7 and 12 more"
    assert (listing([]), listing([4]), listing([4, 5])) == ("none", "4", "4 and 5")
