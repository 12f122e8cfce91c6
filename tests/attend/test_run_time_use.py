"""Run-time tensors in use: ids of any kind, copies, and plans of their values."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines import _operands
from flexdilated.engines._reference import multiplicity
from flexdilated.masks.blocks import _blocks
from flexdilated.masks.planning import Allowed
from flexdilated.masks.planning._planner import plan
from flexdilated.testing import check_pattern

LONGNET = masks.longnet([8, 16], [1, 3]) & masks.causal()
IDS = torch.tensor([0] * 5 + [1] * 7 + [4] * 12)
ROWS = torch.stack([IDS, torch.tensor([-1] * 3 + [0] * 20 + [1])])


def qkv(batch: int = 2, *, heads: int = 4, kv_heads: int = 4, num_tokens: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch * num_tokens)
    q, k, v = (
        torch.randn(batch, count, num_tokens, 8, generator=generator, dtype=torch.float64)
        for count in (heads, kv_heads, kv_heads)
    )
    return q, k, v


def assert_exact(pattern: masks.Pattern | masks.Mixture, *x: Tensor, **options) -> None:
    found = fd.attend(*x, pattern, return_lse=True, **options)
    assert_close(found, fd.attend(*x, pattern, return_lse=True, engine="reference", **options), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "ids",
    [
        *(IDS.to(dtype) for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint64)),
        IDS << 60,
        IDS[None],
        torch.stack([IDS, IDS], dim=1)[:, 0],
        IDS.expand(2, -1),
        torch.full((24,), -5),
        torch.arange(24),
        IDS.tolist(),
        IDS.numpy(),
    ],
    ids=lambda ids: f"{type(ids).__name__} {getattr(ids, 'dtype', '')} {getattr(ids, 'shape', '')}",
)
def test_ids_of_any_kind(ids):
    """Any integers, however they lie in memory: padding alone and documents of one token, too."""
    assert_exact(LONGNET & masks.documents(ids), *qkv())
    assert_exact(LONGNET.per_document(ids), *qkv())


def test_one_head_may_have_documents():
    causal = masks.causal()
    heads = [causal & masks.documents(ROWS), causal, causal.per_document(ROWS), masks.local_window(left=2, right=2)]
    assert_exact(masks.per_head(heads), *qkv())
    assert_exact(masks.head_groups([causal, masks.documents(IDS)]), *qkv(kv_heads=2), enable_gqa=True)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_take_the_values_along(copied: Callable):
    """A copy's tensor is another: the patterns are not equal, and the one no longer follows the other."""
    ids = IDS.clone()
    pattern = LONGNET.per_document(ids) & masks.documents(ids)
    twin = copied(pattern)
    assert twin != pattern
    before = fd.attend(*qkv(), twin)
    assert torch.equal(before, fd.attend(*qkv(), pattern))
    ids[:] = 0
    assert torch.equal(before, fd.attend(*qkv(), twin))
    assert not torch.equal(before, fd.attend(*qkv(), pattern))


def test_what_is_bound_keeps_its_values():
    """A tensor that changes in place changes no rule that was made of it before."""
    visible, ids, lengths = torch.arange(24) % 3 > 0, IDS.clone(), torch.tensor(7)
    rules = [masks.visible_keys(visible), masks.documents(ids), masks.lengths(lengths)]
    bounds = [rule.bind(num_heads=1, num_queries=24, num_keys=24) for rule in rules]
    before = [multiplicity(bound, torch.device("cpu")).clone() for bound in bounds]
    visible[:], ids[:], lengths[()] = False, 0, 24
    for bound, expected in zip(bounds, before, strict=True):
        assert torch.equal(multiplicity(bound, torch.device("cpu")), expected)


def test_a_window_beyond_its_document_is_causal():
    """What reaches past every position needs no block list; what does not keeps it, to the token."""
    shapes = {
        (6, 0): ["causal", "causal"],
        (5, 0): ["blocks", "causal"],
        (6, 6): ["dense", "dense"],
        (6, 5): ["blocks", "dense"],
        (5, 6): ["blocks", "dense"],
    }
    ids = torch.tensor([0] * 7 + [1] * 6)
    for (left, right), expected in shapes.items():
        pattern = masks.local_window(left=left, right=right).per_document(ids)
        bound = pattern.bind(num_heads=1, num_queries=13, num_keys=13)
        terms = plan(bound, allowed=Allowed(masks=False)).terms
        assert [term.shape for term in terms] == expected
        assert_exact(pattern, *qkv(num_tokens=13), block_size=4)


def test_blocks_at_equal_distances_are_looked_at_once(monkeypatch):
    """Their masks are equal, but where they end early: few are evaluated for many blocks, and none is wrong."""
    looked_at: list[int] = []

    def evaluate(rule, places, shape):
        looked_at.append(len(places.table))
        return _blocks.evaluate(rule, places, shape)

    monkeypatch.setattr(_operands, "evaluate", evaluate)
    masks.cache().clear()
    x, window = qkv(num_tokens=301), masks.local_window(left=37, right=0)
    assert_exact(window, *x, block_size=16)
    assert looked_at == [7]  # three lags, and four in the last row, which ends early and so is never full
    for size in (16, 32, 64):
        assert_exact(window & masks.dilated(48, 3), *x, block_size=(size, 16))
        assert_exact((window | masks.strided(7)) & masks.documents(torch.arange(301) // 90), *x, block_size=size)
        assert_exact((window | masks.chunked(20)) & masks.chunked(50), *x, block_size=size)
        assert_exact(masks.head_groups([window, masks.chunked(10)]) | masks.strided(50), *x, block_size=size)


def test_check_pattern_draws_its_own_positions():
    for pattern in (LONGNET.per_document(IDS), LONGNET & masks.documents("packing")):
        with pytest.raises(ValueError, match="must have no run-time tensors: check it without them"):
            check_pattern(pattern)


def test_documents_too_long_for_a_grid():
    """Packed as apart: a grid has no place for more tokens, and a shorter document leaves some empty."""
    grid = masks.neighborhood((3, 4), 1)
    assert_exact(grid.per_document(IDS), *qkv())
    with pytest.raises(ValueError, match="within the 9 tokens of a 3x3 grid; got queries up to position 11"):
        fd.attend(*qkv(), masks.neighborhood((3, 3), 1).per_document(IDS))
