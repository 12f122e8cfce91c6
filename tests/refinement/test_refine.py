"""refine: the invariants of an exchange, a plain statement of its rule, and a cache that does not grow."""

import torch
from hypothesis import given
from hypothesis import strategies as st

import flexdilated as fd
from flexdilated import masks

BLOCK = 4


@st.composite
def problems(draw):
    """(listed, importance, scores): booleans and numbers with ties, (H, R, C); some tables have fewer rows than R."""
    shape = [draw(st.integers(1, most)) for most in (3, 5, 5)]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    listed = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.1, 0.5, 0.9]))
    importance, scores = (torch.randint(0, 5, shape, generator=generator) / 4 for _ in range(2))
    scores[torch.rand(shape, generator=generator) < 0.1] = -torch.inf
    return listed, importance, scores


def table_of(listed):
    return masks.block_list(listed, block=BLOCK)


def read(pattern, shape):
    """Which blocks a pattern lists, pair by pair."""
    heads, rows, columns = shape
    h, q, k = (torch.arange(n) for n in (heads, rows, columns))
    mod = pattern.mask_mod(num_heads=heads, device=torch.device("cpu"))
    return mod(torch.tensor(0), h[:, None, None], q[:, None] * BLOCK, k * BLOCK).expand(shape)


def plainly(listed, importance, scores, moves, may_grow, kept):
    """The rule, head by head, one block after the other."""
    after = listed.clone()
    for head in range(len(listed)):
        places = [tuple(place) for place in listed[head].nonzero().tolist()]
        best = {row: max(column for r, column in places if r == row) for row, _ in places}
        for row, column in reversed(places):
            if importance[head, row, column] >= importance[head, row, best[row]]:
                best[row] = column
        going = sorted(
            (float(importance[head, row, column]), row, column)
            for row, column in places
            if best[row] != column and not kept[head, row, column]
        )
        coming = sorted(
            (-float(scores[head, row, column]), row, column)
            for row, column in (~listed[head]).nonzero().tolist()
            if may_grow[head, row, column] and scores[head, row, column] > -torch.inf
        )
        for (_, *old), (_, *new) in list(zip(going, coming, strict=False))[:moves]:
            after[head, *old], after[head, *new] = False, True
    return after


@given(problems(), st.integers(0, 6), st.booleans(), st.booleans())
def test_the_rule_and_what_it_keeps(problem, moves, is_causal, keeps):
    listed, importance, scores = problem
    pattern, everywhere = table_of(listed), torch.ones_like(listed)
    lower = torch.ones_like(listed).tril()
    diagonal = torch.eye(*listed.shape[1:], dtype=torch.bool).expand_as(listed)
    options = {"within": masks.causal() if is_causal else None, "keep": masks.chunked(BLOCK) if keeps else None}
    found = fd.refine(pattern, importance, scores=scores, moves=moves, **options)
    after = read(found.pattern, listed.shape)
    expected = plainly(listed, importance, scores, moves, lower if is_causal else everywhere, diagonal & keeps)
    assert torch.equal(after, expected)
    assert torch.equal(after.sum((1, 2)), listed.sum((1, 2)))
    assert torch.equal((listed & ~after).nonzero(), found.dropped)
    assert torch.equal((after & ~listed).nonzero(), found.grown)
    assert torch.equal(after.any(-1) | ~listed.any(-1), torch.ones_like(listed[..., 0]))
    for moved in (found.dropped, found.grown):
        assert bool((torch.bincount(moved[:, 0], minlength=len(listed)) <= moves).all())
    assert fd.refine(pattern, importance.clone(), scores=scores, moves=moves, **options).pattern == found.pattern


@given(problems(), st.integers(0, 3))
def test_by_what_a_pattern_of_heads_keeps(problem, seed):
    """`keep` and `within` may differ by head, and be given at any finer grain than blocks."""
    listed, importance, scores = problem
    heads, rows, columns = listed.shape
    generator = torch.Generator().manual_seed(seed)
    some = torch.rand(heads, BLOCK * rows, columns, generator=generator) < 0.2
    fine = masks.custom(lambda b, h, q, k: some[h, q, k // BLOCK] & (k % BLOCK == 1))
    touched = some.view(heads, rows, BLOCK, columns).any(2)
    found = fd.refine(table_of(listed), importance, scores=scores, moves=4, keep=fine, within=fine)
    after = read(found.pattern, listed.shape)
    assert torch.equal(after, plainly(listed, importance, scores, 4, touched, touched))


def used(pattern):
    """What a layer does with it: a call, and what its blocks got."""
    torch.manual_seed(1)
    q, k, v = torch.randn(3, 1, 2, 128, 8)
    whole = pattern & masks.causal()
    _, lse = fd.attend(q, k, v, whole, return_lse=True)
    mass = fd.block_mass(q, k, lse, whole, block=16)
    return mass, fd.pooled_scores(q, k, block=16, lse=lse)


def test_old_patterns_leave_the_cache():
    """Bytes and entries are those of one pattern after twenty."""
    rows = [[*range(max(0, row - 2), row + 1)] for row in range(8)]
    pattern, sizes = masks.block_list([rows, rows], block=16), []
    diagonal = masks.chunked(16)
    masks.cache().clear()
    for step in range(20):
        mass, scores = used(pattern)
        held = masks.cache().stats().masters
        sizes.append((held.bytes, held.entries))
        if step % 2:  # a good move, and a bad one to make room for the next
            mass, scores = torch.rand(2, 8, 8), torch.rand(2, 8, 8)
        found = fd.refine(pattern, mass, scores=scores, moves=2, within=masks.causal(), keep=diagonal)
        assert len(found.grown) == len(found.dropped) > 0
        assert found.pattern != pattern
        pattern = found.pattern
    # The lists of what is kept and of causal order stay, once; a plan's bytes differ a little with its tables.
    assert max(entries for _, entries in sizes[1:]) == sizes[1][1]
    assert max(size for size, _ in sizes[10:]) <= 1.3 * max(size for size, _ in sizes[1:10])
