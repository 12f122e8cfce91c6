"""The catalogue's one-dimensional rules: small masks by hand, counts that are exact, and bad parameters."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from flexdilated import masks
from flexdilated.masks.blocks._estimate import estimate_blocks
from flexdilated.masks.core._box import EXACT_RUNS, Box, count_multiples
from flexdilated.masks.orders._layout import Layout
from flexdilated.masks.patterns._dilated import Dilated
from flexdilated.masks.patterns._marked_tokens import sum_of_quotients
from flexdilated.masks.planning.lowering._ways import shared_terms
from tests.masks.blocks.test_block_mask import verdicts
from tests.masks.core.test_boxes import BOXES, allowed, boxes, progressions
from tests.support.strategies import dilated_windows, global_kinds, strided_kinds

BY_HAND = {
    "dilated_window": (
        masks.dilated_window(left=1, right=2, rate=2),
        """
        #.#.#...
        .#.#.#..
        #.#.#.#.
        .#.#.#.#
        ..#.#.#.
        ...#.#.#
        ....#.#.
        .....#.#
        """,
    ),
    "global_tokens": (
        masks.global_tokens(2),
        """
        ########
        ########
        ##......
        ##......
        ##......
        ##......
        ##......
        ##......
        """,
    ),
    "global rows": (masks.global_tokens(1, columns=False), "######## " + 7 * "........ "),
    "global columns": (masks.global_tokens(3, rows=False), 8 * "###..... "),
    "first_tokens": (masks.first_tokens(3), 8 * "###..... "),
    "more than there are": (masks.global_tokens(9), 8 * "######## "),
    "strided": (
        masks.strided(3),
        """
        #..#..#.
        .#..#..#
        ..#..#..
        #..#..#.
        .#..#..#
        ..#..#..
        #..#..#.
        .#..#..#
        """,
    ),
    "fixed": (masks.fixed(3, summary=2), 8 * ".##.##.# "),
    "fixed, one key": (masks.fixed(4), 8 * "...#...# "),
    "prefix_lm": (
        masks.prefix_lm(3),
        """
        ###.....
        ###.....
        ###.....
        ####....
        #####...
        ######..
        #######.
        ########
        """,
    ),
    "chunked": (
        masks.chunked(3),
        """
        ###.....
        ###.....
        ###.....
        ...###..
        ...###..
        ...###..
        ......##
        ......##
        """,
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_small_masks_by_hand(name):
    pattern, picture = BY_HAND[name]
    allowed = pattern.bind(num_heads=1, num_queries=8, num_keys=8).mask_mod()
    t = torch.arange(8)
    rows = allowed(torch.tensor(0), torch.tensor(0), t[:, None], t[None, :]).tolist()
    assert ["".join("#" if pair else "." for pair in row) for row in rows] == picture.split()


def test_sparse_transformer_by_hand():
    """Both forms at stride 4 (arXiv 1904.10509, section 4.2): what query 9 sees."""
    strided = (masks.local_window(left=4, right=0) | masks.strided(4)) & masks.causal()
    fixed = (masks.chunked(4) | masks.fixed(4, summary=1)) & masks.causal()
    for pattern, keys in ((strided, [1, 5, 6, 7, 8, 9]), (fixed, [3, 7, 8, 9])):
        allowed = pattern.bind(num_heads=1, num_queries=12, num_keys=12).mask_mod()
        row = allowed(torch.tensor(0), torch.tensor(0), torch.tensor(9), torch.arange(12))
        assert row.nonzero().flatten().tolist() == keys


def test_one_implementation_an_idea():
    """What is a special case of another pattern is that pattern."""
    assert masks.dilated_window(left=3, right=1, rate=1) == masks.local_window(left=3, right=1)
    assert masks.first_tokens(4) == masks.global_tokens(4, rows=False)
    assert masks.prefix_lm(4) == masks.causal() | masks.first_tokens(4)
    assert masks.chunked(16) == masks.dilated(16, 1)


@given(st.one_of(dilated_windows(), strided_kinds()), st.data())
def test_counts_are_exact_over_equal_steps(twin, data):
    """In natural order and in every residue-major one; over many chunks the bounds are those of the area."""
    q = data.draw(progressions())
    box = Box(torch.zeros(BOXES, dtype=torch.int64), q, data.draw(progressions(q.step)))
    if isinstance(twin.pattern, Dilated):
        spanned = torch.maximum(box.q.last, box.k.last) // twin.pattern.segment
        spanned -= torch.minimum(box.q.first, box.k.first) // twin.pattern.segment
        assume((spanned < EXACT_RUNS).all())
    assert_exact(twin, box)


@given(global_kinds().filter(lambda twin: "causal" not in twin.pattern.text), st.data())
def test_global_tokens_count_exactly(twin, data):
    assert_exact(twin, data.draw(boxes(1)))


@given(st.integers(1, 24), st.data())
def test_fixed_counts_exactly(stride, data):
    summary = data.draw(st.integers(1, stride))
    box = data.draw(boxes(1))
    keys = [box.k.first[i] + box.k.step * torch.arange(int(box.k.count[i])) for i in range(BOXES)]
    truth = [int(box.q.count[i]) * sum(int(key) % stride >= stride - summary for key in keys[i]) for i in range(BOXES)]
    found = masks.fixed(stride, summary=summary).count(box, num_heads=1)
    assert found.low.tolist() == found.high.tolist() == truth


def assert_exact(twin, box):
    found, truth = twin.pattern.count(box, num_heads=1), allowed(twin.rule, box, 1)
    assert torch.equal(found.low, truth)
    assert torch.equal(found.high, truth)


@given(st.data(), st.integers(1, 12))
def test_multiples_over_unequal_steps(data, rate):
    """Bounds that hold, and that meet wherever every key, or every query, of a class fits alike."""
    box = data.draw(boxes(1))
    truth = allowed(lambda h, H, q, k: ((k[None] - q[:, None]) % rate == 0).long(), box, 1)
    found = count_multiples(box, rate)
    assert (found.low <= truth).all()
    assert (truth <= found.high).all()
    if box.k.step % rate == 0 or box.q.step % rate == 0:
        assert torch.equal(found.low, found.high)


@given(progressions(), st.integers(1, 40))
def test_sum_of_quotients(progression, modulus):
    found = sum_of_quotients(progression.count, progression.step, progression.first, modulus)
    terms = [progression.first + progression.step * index for index in range(int(progression.count.max()))]
    truth = sum(torch.where(index < progression.count, term // modulus, 0) for index, term in enumerate(terms))
    assert torch.equal(found, truth)


@pytest.mark.parametrize(
    ("pattern", "rate"),
    [
        (masks.dilated_window(left=255, right=256, rate=4), 4),
        (masks.strided(8), 8),
        (masks.fixed(8, summary=3), 8),
    ],
    ids=["dilated_window", "strided", "fixed"],
)
def test_dilation_is_dense_in_its_layout(pattern, rate):
    """4096 tokens: in residue-major order the blocks hold little but allowed pairs."""
    N = 4096
    assert masks.layout(pattern, N) == Layout(N, rate)
    mask = masks.block_mask(pattern, N, num_heads=1, layout=masks.layout(pattern, N))
    listed, _ = verdicts(mask, (1, N // 128, N // 128))
    t = torch.arange(N)
    allowed = pattern.bind(num_heads=1, num_queries=N, num_keys=N).mask_mod()
    useful = int(allowed(torch.tensor(0), torch.tensor(0), t[:, None], t[None, :]).sum())
    assert int((listed > 0).sum()) * 128**2 <= 1.25 * useful


@pytest.mark.parametrize(
    "pattern",
    [
        masks.global_tokens(64) | masks.local_window(left=512, right=512),
        masks.first_tokens(4) | masks.local_window(left=1023, right=0),
        (masks.strided(128) | masks.fixed(256, summary=100)) & masks.causal(),
    ],
    ids=str,
)
def test_estimates_are_near(pattern):
    """What the planner weighs at 65,536 tokens: a first row that sees everyone does not stand for the others."""
    N = 1 << 16
    (term,) = shared_terms(pattern, 1, pattern.bind(num_heads=1, num_queries=N, num_keys=N), 1)
    listed = len(term.blocks(128, 128).row)
    assert estimate_blocks(term.table_rule(), q_block=128, k_block=128).blocks == pytest.approx(listed, rel=0.1)


@pytest.mark.parametrize(
    ("build", "error", "says"),
    [
        (lambda: masks.dilated_window(left=-1, right=0, rate=2), ValueError, "left must be at least 0; got left=-1"),
        (lambda: masks.dilated_window(left=0, right=-2, rate=2), ValueError, "right must be at least 0; got right=-2"),
        (lambda: masks.dilated_window(left=1, right=1, rate=0), ValueError, "rate must be at least 1; got rate=0"),
        (lambda: masks.dilated_window(left=1.0, right=1, rate=1), TypeError, "left=1.0 of type float"),
        (lambda: masks.dilated_window(left=1, right=1, rate=True), TypeError, "rate=True of type bool"),
        (lambda: masks.dilated_window(1, 1, 1), TypeError, "positional"),
        (lambda: masks.global_tokens(0), ValueError, "count must be at least 1; got count=0"),
        (lambda: masks.global_tokens("all"), TypeError, "count='all' of type str"),
        (lambda: masks.global_tokens(3, rows=1), TypeError, "rows must be True or False; got rows=1"),
        (lambda: masks.global_tokens(3, columns=None), TypeError, "columns must be True or False; got columns=None"),
        (lambda: masks.global_tokens(3, rows=False, columns=False), ValueError, "got rows=False and columns=False"),
        (lambda: masks.first_tokens(-4), ValueError, "count must be at least 1; got count=-4"),
        (lambda: masks.strided(0), ValueError, "stride must be at least 1; got stride=0"),
        (lambda: masks.strided(2.5), TypeError, "stride=2.5"),
        (lambda: masks.fixed(0), ValueError, "stride must be at least 1; got stride=0"),
        (lambda: masks.fixed(4, summary=0), ValueError, "summary must be at least 1; got summary=0"),
        (lambda: masks.fixed(4, summary=5), ValueError, "must not exceed the stride; got summary=5, stride=4"),
        (lambda: masks.prefix_lm(0), ValueError, "prefix must be at least 1; got prefix=0"),
        (lambda: masks.prefix_lm(None), TypeError, "prefix=None"),
        (lambda: masks.chunked(0), ValueError, "size must be at least 1; got size=0"),
        (lambda: masks.chunked("8"), TypeError, "size='8'"),
    ],
)
def test_bad_parameters(build, error, says):
    with pytest.raises(error, match=says):
        build()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"kind":"dilated_window","left":1,"right":1,"rate":1}', "rate must be at least 2; got rate=1"),
        ('{"kind":"dilated_window","left":1,"right":1}', "'left', 'right', 'rate'"),
        ('{"kind":"global_tokens","tokens":0,"rows":true,"columns":true}', "tokens must be at least 1; got tokens=0"),
        ('{"kind":"global_tokens","tokens":1,"rows":1,"columns":true}', "rows must be True or False; got rows=1"),
        ('{"kind":"global_tokens","tokens":1,"rows":false,"columns":false}', "rows=False and columns=False"),
        ('{"kind":"strided","stride":-3}', "stride=-3"),
        ('{"kind":"fixed","stride":3,"summary":4}', "summary=4, stride=3"),
        ('{"kind":"fixed","stride":3}', "'stride', 'summary'"),
    ],
)
def test_bad_text(text, says):
    with pytest.raises(ValueError, match=says):
        masks.from_json(text)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (masks.dilated_window(left=1, right=2, rate=3), "dilated_window(left=1, right=2, rate=3)"),
        (masks.global_tokens(3), "global_tokens(3)"),
        (masks.global_tokens(3, columns=False), "global_tokens(3, columns=False)"),
        (masks.global_tokens(3, rows=False), "first_tokens(3)"),
        (masks.strided(4), "strided(4)"),
        (masks.fixed(4), "fixed(4)"),
        (masks.fixed(4, summary=2), "fixed(4, summary=2)"),
        (masks.prefix_lm(4), "causal() | first_tokens(4)"),
    ],
)
def test_how_they_are_written(pattern, text):
    assert repr(pattern) == text
    assert eval(text, vars(masks)) == pattern
