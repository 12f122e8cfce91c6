"""Patterns that follow training: mass of blocks and pooled scores, its average, refine's exchange, schedules."""

import copy
import io
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import flexdilated as fd
from flexdilated import masks, schedules
from tests.support.ranks import on_ranks
from tests.support.strategies import block_sides

both_sides = st.one_of(block_sides, st.tuples(block_sides, block_sides))


def pair(side):
    return side if isinstance(side, tuple) else (side, side)


def drawn(num_heads=4, num_tokens=50, dtype=torch.float64):
    torch.manual_seed(5)
    return torch.randn(3, 2, num_heads, num_tokens, 8, dtype=dtype)


PATTERN = (masks.longnet((16, 32), (1, 2)) & masks.causal()) + masks.first_tokens(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_add_up_to_one_in_every_dtype(dtype):
    q, k, v = drawn(dtype=dtype)
    _, lse = fd.attend(q, k, v, PATTERN, return_lse=True)
    mass = fd.block_mass(q, k, lse, PATTERN, block=(8, 16))
    assert mass.dtype == torch.float32
    own = 1e-5 if dtype == torch.float32 else 1e-4  # the error of the kernels' lse
    torch.testing.assert_close(mass.sum(-1), torch.ones(4, 7), rtol=0, atol=own)


def test_zero_keys_of_padding_take_their_share():
    q, k, v = drawn()
    padded = masks.longnet((16, 32), (1, 4), offsets="contiguous", padding="zeros")
    _, lse = fd.attend(q, k, v, padded, return_lse=True)
    mass = fd.block_mass(q, k, lse, padded, block=64)
    own = fd.attend(q, k, v, padded.unpadded, return_lse=True)[1]
    finite = own > -torch.inf
    expected = torch.where(finite, (own - lse).exp(), 0.0).sum((0, 2)) / (lse > -torch.inf).sum((0, 2))
    torch.testing.assert_close(mass[:, 0, 0], expected)
    assert bool((mass < 1).all())


def test_what_is_hidden_is_not_read():
    """NaN in keys that nobody sees, and in queries that see nothing."""
    q, k, v = drawn()
    pattern = masks.local_window(left=5, right=0).after(9)
    _, lse = fd.attend(q, k, v, pattern, return_lse=True)
    clean = fd.block_mass(q, k, lse, pattern, block=7)
    q[:, :, :9], k[:, :, :9] = torch.nan, torch.nan
    assert torch.equal(fd.block_mass(q, k, lse, pattern, block=7), clean)
    assert bool(clean.isfinite().all())


@given(st.data(), both_sides, st.integers(1, 30), st.integers(1, 30), st.booleans())
def test_pooled_scores_are_means_of_all_scores(data, side, queries, keys, with_lse):
    seed, groups = data.draw(st.integers(0, 9)), data.draw(st.sampled_from([1, 2]))
    torch.manual_seed(seed)
    q, k = torch.randn(2, 2, queries, 3).double(), torch.randn(2, 2 // groups, keys, 3).double()
    scores = 0.4 * q @ k.repeat_interleave(groups, 1).mT
    lse = torch.where(torch.rand(2, 2, queries) < 0.3, -torch.inf, torch.randn(2, 2, queries).double())
    given_lse = {"lse": lse} if with_lse else {}
    found = fd.pooled_scores(q, k, block=side, scale=0.4, enable_gqa=True, **given_lse)
    (q_side, k_side) = pair(side)
    for head in range(2):
        for row, column in torch.cartesian_prod(*map(torch.arange, found.shape[1:])).tolist():
            rows = slice(row * q_side, (row + 1) * q_side)
            means = scores[:, head, rows, column * k_side : (column + 1) * k_side].mean((1, 2))
            if with_lse:
                part = lse[:, head, rows]
                held = part > -torch.inf
                means = [m - p[h].mean() for m, p, h in zip(means, part, held, strict=True) if h.any()]
            expected = sum(means) / len(means) if len(means) else torch.tensor(-torch.inf).double()
            torch.testing.assert_close(found[head, row, column], expected, rtol=1e-9, atol=1e-9)


def masses(number, shape=(2, 3, 4), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(shape, generator=generator) for _ in range(number)]


def expected_of(taken, decay):
    """The weighted mean, in float64; the latest has weight 1."""
    weights = [decay**age for age in range(len(taken))]
    total = torch.stack([w * m.double() for w, m in zip(weights, reversed(taken), strict=True)]).sum(0)
    return total / sum(weights)


def after(taken, decay=0.9, **options):
    tracker = fd.ImportanceTracker(*taken[0].shape, decay=decay, **options)
    for mass in taken:
        tracker.update(mass)
    return tracker


@given(st.integers(1, 40), st.sampled_from([0.0, 0.3, 0.9, 0.999]))
def test_a_weighted_mean_from_the_first_update_on(number, decay):
    assert torch.equal(fd.ImportanceTracker(2, 3, 4).importance(), torch.zeros(2, 3, 4))
    taken = masses(number)
    torch.testing.assert_close(after(taken, decay).importance().double(), expected_of(taken, decay), rtol=2e-4, atol=0)


@given(st.integers(0, 5), st.integers(0, 5))
def test_restarted_blocks_count_what_came_since(before, since):
    taken = masses(before + since)
    tracker = fd.ImportanceTracker(2, 3, 4, decay=0.8)
    for mass in taken[:before]:
        tracker.update(mass)
    tracker.restart(torch.tensor([[0, 1, 2], [1, 2, 3]]))
    for mass in taken[before:]:
        tracker.update(mass)
    new, old = expected_of(taken[before:], 0.8) if since else None, expected_of(taken, 0.8) if taken else None
    found = tracker.importance().double()
    for head, row, column in torch.cartesian_prod(*map(torch.arange, (2, 3, 4))).tolist():
        source = new if (head, row, column) in ((0, 1, 2), (1, 2, 3)) else old
        wanted = 0.0 if source is None else float(source[head, row, column])
        assert float(found[head, row, column]) == pytest.approx(wanted, rel=1e-5)


def test_a_run_goes_on_exactly_from_its_state():
    taken = masses(7)
    whole, begun = after(taken), after(taken[:4])
    file = io.BytesIO()
    torch.save(begun.state_dict(), file)
    file.seek(0)
    resumed = fd.ImportanceTracker(2, 3, 4, decay=0.9)
    resumed.load_state_dict(torch.load(file))
    assert list(resumed.state_dict()) == ["average", "weight"]
    assert repr(resumed) == "ImportanceTracker(num_heads=2, rows=3, columns=4, decay=0.9)"
    for tracker in (resumed, copy.deepcopy(begun)):
        for mass in taken[4:]:
            tracker.update(mass)
        assert torch.equal(tracker.importance(), whole.importance())
        assert all(torch.equal(x, y) for x, y in zip(tracker.buffers(), whole.buffers(), strict=True))


def on_a_rank(taken, listed, scores):
    """(the importance, its state, what was refined, whether another update waits) of one rank with its own mass."""
    tracker = fd.ImportanceTracker(2, 3, 4, decay=0.9, group=dist.group.WORLD)
    for mass in taken[dist.get_rank()]:
        tracker.update(mass)
    importance, state = tracker.importance(), {name: x.clone() for name, x in tracker.state_dict().items()}
    refined = fd.refine(masks.from_json(listed), importance, scores=scores, moves=2)
    # The state waits for what is on its way, and so does a state that takes its place.
    tracker.update(taken[dist.get_rank()][0])
    later = {name: x.clone() for name, x in tracker.state_dict().items()}
    tracker.update(taken[dist.get_rank()][0])
    tracker.load_state_dict(state)
    again = tracker.importance()
    tracker.update(taken[dist.get_rank()][0])
    half = tracker.double().average.dtype
    return importance, state, masks.to_json(refined.pattern), later["average"], again, half


def test_ranks_hold_bitwise_the_same_and_refine_alike():
    size = 3
    taken = [masses(5, seed=rank) for rank in range(size)]
    listed = masks.block_list([[[0, 1], [1, 2], [0, 3]], [[3], [0, 1, 2], [2]]], block=16)
    scores = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(9))
    means = [sum(step) / size for step in zip(*taken, strict=True)]
    found = on_ranks(size, on_a_rank, taken, masks.to_json(listed), scores)
    for importance, state, refined, later, again, half in found:
        assert torch.equal(importance, found[0][0])
        assert refined == found[0][2]
        assert refined != masks.to_json(listed)
        torch.testing.assert_close(importance.double(), expected_of(means, 0.9), rtol=1e-5, atol=0)
        assert torch.equal(state["average"], found[0][1]["average"])
        torch.testing.assert_close(later, 0.9 * state["average"] + 0.1 * means[0])
        assert torch.equal(again, importance)
        assert half == torch.float64


BLOCK = 4


@st.composite
def problems(draw):
    """(listed, importance, scores): booleans and numbers with ties, (H, R, C); some tables have fewer rows than R."""
    shape = [draw(st.integers(1, most)) for most in (3, 5, 5)]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    listed = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.1, 0.5, 0.9]))
    importance, scores = (torch.randint(0, 5, shape, generator=generator) / 4 for _ in range(2))
    for x, value in [(scores, torch.inf), (scores, -torch.inf), (importance, torch.inf), (importance, -torch.inf)]:
        x[torch.rand(shape, generator=generator) < 0.1] = value
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


CURVES = {
    "linear": lambda t: 1 - t,
    "cosine": lambda t: (1 + math.cos(math.pi * t)) / 2,
    "cubic": lambda t: (1 - t) ** 3,
}
numbers = {
    "start": st.integers(0, 300),
    "end": st.integers(0, 300),
    "steps": st.integers(1, 400),
    "begin": st.integers(0, 50),
    "widths": st.one_of(st.integers(2, 20), st.just(400)),
}
schedules_drawn = st.builds(
    lambda name, sizes: getattr(schedules, name)(**sizes), st.sampled_from([*CURVES]), st.fixed_dictionaries(numbers)
)


@given(schedules_drawn)
def test_whole_numbers_that_never_go_back(schedule):
    found = [schedule(step) for step in range(schedule.begin + schedule.steps + 10)]
    assert all(type(value) is int for value in found)
    assert found == sorted(found, reverse=schedule.end < schedule.start)
    assert set(found[: schedule.begin + 1]) == {schedule.start}
    assert set(found[schedule.begin + schedule.steps :]) == {schedule.end}
    assert set(found) <= set(schedule.values)
    assert len(schedule.values) == len(set(schedule.values)) <= schedule.widths
    assert (schedule.values[0], schedule.values[-1]) == (schedule.start, schedule.end)
    assert schedule(10**9) == schedule.end


@given(schedules_drawn, st.integers(0, 500))
def test_near_the_formula(schedule, step):
    """Half a step between values, and half a unit of rounding, away from the published curve at most."""
    time = min(max((step - schedule.begin) / schedule.steps, 0), 1)
    exact = schedule.end + (schedule.start - schedule.end) * CURVES[schedule.curve](time)
    apart = max(1.0, abs(schedule.end - schedule.start) / (schedule.widths - 1))
    assert abs(schedule(step) - exact) <= apart / 2 + 0.5 + 1e-9
