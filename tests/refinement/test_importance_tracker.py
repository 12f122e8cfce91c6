"""ImportanceTracker: weighted means written out, its state, and ranks that hold bitwise the same."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import flexdilated as fd
from flexdilated import masks
from tests.support.ranks import on_ranks


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
