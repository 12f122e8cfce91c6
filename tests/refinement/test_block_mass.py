"""pooled_scores, as means of all scores; block_mass in parts, dtypes and caches: its sums are in test_received.py."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flexdilated as fd
from flexdilated import masks
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


def test_what_is_hidden_is_not_read():
    """NaN in keys that nobody sees, and in queries that see nothing."""
    q, k, v = drawn()
    pattern = masks.local_window(left=5, right=0).after(9)
    _, lse = fd.attend(q, k, v, pattern, return_lse=True)
    clean = fd.block_mass(q, k, lse, pattern, block=7)
    q[:, :, :9], k[:, :, :9] = torch.nan, torch.nan
    assert torch.equal(fd.block_mass(q, k, lse, pattern, block=7), clean)
    assert bool(clean.isfinite().all())


def test_lists_of_a_static_pattern_are_kept_and_forgotten_with_it():
    q, k, v = drawn()
    pattern = masks.local_window(left=11, right=3)
    _, lse = fd.attend(q, k, v, pattern, return_lse=True)
    masks.cache().clear()
    fd.block_mass(q, k, lse, pattern, block=16)
    held = masks.cache().stats()
    fd.block_mass(q, k, lse, pattern, block=16)
    assert masks.cache().stats().masters == held.masters
    assert masks.cache().forget(pattern) == held.masters.entries == 1
    documents = pattern & masks.documents(torch.arange(50) // 20)
    _, lse = fd.attend(q, k, v, documents, return_lse=True)
    before = masks.cache().stats().masters.entries
    fd.block_mass(q, k, lse, documents, block=16)
    assert masks.cache().stats().masters.entries == before


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
