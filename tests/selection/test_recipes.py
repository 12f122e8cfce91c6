"""Recipes held to plain statements of the published rules: which pairs are read, and what comes out with gradients."""

import pickle
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.selection import recipes
from tests.selection.cases import Case
from tests.support import published_selections as published

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim


@st.composite
def sizes(draw: st.DrawFn, most: int = 30) -> tuple[int, int, int, int]:
    """(H, G, queries, position of the first)."""
    G = draw(st.integers(1, 2))
    return G * draw(st.integers(1, 2)), G, draw(st.integers(1, most)), draw(st.sampled_from([0, 0, 5, 8]))


def tensors(seed: int, H: int, G: int, N: int, M: int, D: int = 4) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, H, N, D), (2, G, M, D), (2, G, M, D))
    return tuple(torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)


def pairs_read(selector: fd.BlockSelector, q: Tensor, k: Tensor, q_offset: int = 0) -> Tensor:
    """(B, H, N, M): what attention over (chosen | always) & within reads."""
    found = selector(q, k, q_offset=q_offset)
    block = (selector.query_block, selector.block)
    chosen = masks.selected_blocks("chosen", block=block, most=selector.choose.most)
    assert selector.always is not None
    return Case({}, q, k, q_offset, {"chosen": found.blocks}).table((chosen | selector.always) & selector.within)


@given(sizes(), st.integers(1, 7), st.integers(2, 4), st.integers(0, 99))
def test_moba_reads_the_own_block_and_the_best_before(size, block, top, seed) -> None:
    H, G, N, offset = size
    q, k, _ = tensors(seed, H, G, N, offset + N)
    found = pairs_read(recipes.moba(block=block, top=top), q, k, offset)
    for b in range(2):
        assert found[b].equal(published.moba(q[b], k[b], block=block, top=top, offset=offset))


@given(sizes(), st.integers(1, 7), st.integers(2, 4), st.integers(0, 99))
def test_quest_reads_the_last_page_and_those_that_could_score_most(size, block, pages, seed) -> None:
    H, G, M, offset = size
    q, k, _ = tensors(seed, H, G, 1, M + offset)
    found = pairs_read(recipes.quest(budget=pages * block, block=block), q, k, M + offset - 1)
    for b in range(2):
        assert found[b, :, 0].equal(published.quest(q[b, :, 0], k[b], block=block, budget=pages * block))


@given(sizes(), st.sampled_from([(4, 2), (4, 1), (6, 3), (3, 3)]), st.sampled_from([0.2, 0.5, 0.9]), st.integers(0, 99))
def test_xattention_reads_the_fewest_blocks_of_enough_attention(size, sides, threshold, seed) -> None:
    (H, G, N, _), (block, stride) = size, sides
    q, k, _ = tensors(seed, H, G, N, N)
    selector = recipes.xattention(most=12, block=block, stride=stride, threshold=threshold)
    found = pairs_read(selector, q, k)
    for b in range(2):
        asked = {"block": block, "stride": stride, "threshold": threshold}
        assert found[b].equal(published.xattention(q[b], k[b], **asked))
    assert selector(q, k).cut == 0


@given(sizes(), st.integers(1, 7), st.booleans(), st.integers(0, 99))
def test_the_gate_scores_and_chooses_as_seer_attention_does(size, block, group, seed) -> None:
    H, G, N, offset = size
    offset = offset if group else 0
    q, k, _ = tensors(seed, H, G, N, offset + N)
    gate = recipes.SeerGate(4, H, G, block=block, dim=6, share="group" if group else "head", base=100.0).double()
    build = recipes.seer_attention_r if group else recipes.seer_attention
    found = build(gate, choose=fd.TopK(2))(q, k, q_offset=offset)
    rows = 1 if group else block
    asked: dict[str, Any] = {"block": block, "rows": rows, "base": 100.0, "group": group, "offset": offset}
    for b in range(2):
        scores = published.seer_scores(q[b], k[b], gate.query, gate.key, **asked)
        for table, row in ((t, r) for t in range(len(scores)) for r in range(scores.shape[1])):
            before = (offset + row * rows) // block
            expected = published.best(scores[table, row, :before].tolist(), 2)
            chosen = found.blocks[b, table, row].tolist()
            assert set(chosen) - {-1} == expected
            worth = scores[table, row, [j for j in chosen if j >= 0]]
            assert_close(found.scores[b, table, row, : len(worth)], worth)


NSA = {"length": 4, "stride": 2, "block": 6, "top": 4, "window": 5}


def layer_of(H: int, G: int, options: dict[str, int]) -> recipes.NativeSparseAttention:
    torch.manual_seed(0)
    layer = recipes.NativeSparseAttention(3, 4, H, G, **options).double()
    for places in (layer.compress_keys.places, layer.compress_values.places):
        torch.nn.init.normal_(places)
    return layer


@settings(max_examples=6)
@given(
    sizes(most=28),
    st.sampled_from([NSA, NSA | {"length": 6, "block": 4, "top": 3, "local": 1}, NSA | {"first": 0, "top": 2}]),
    st.integers(0, 99),
)
def test_native_sparse_attention_is_its_plain_statement(size, options, seed) -> None:
    """Output and every gradient: of inputs, of the compression, of the gates."""
    H, G, N, offset = size
    q, *_ = tensors(seed, H, G, N, 1)
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, 3, 2, G, offset + N, 4, dtype=torch.float64, generator=generator)
    x = torch.randn(2, N, 3, dtype=torch.float64, generator=generator)
    layer = layer_of(H, G, options)
    leaves = [each.clone().requires_grad_() for each in (x, q, k, v)]
    found = layer(*leaves, q_offset=offset)
    x, q, k, v = leaves
    gates = layer.gates(x).sigmoid().view(2, N, 3, H).permute(0, 2, 3, 1)
    plain = [published.nsa(q[b], k[:, b], v[:, b], layer, gates[b], offset=offset) for b in range(2)]
    expected = torch.stack([out for out, _ in plain])
    assert_close(found, expected)
    wanted = torch.randn(found.shape, dtype=torch.float64, generator=generator)
    learned = [*leaves, *layer.parameters()]
    grads = [torch.autograd.grad(out, learned, wanted, allow_unused=True) for out in (found, expected)]
    for leaf, one, other in zip(learned, *grads, strict=True):
        # Of few tokens the plain statement makes no window, and of its parameters no use.
        assert_close(*(torch.zeros_like(leaf) if grad is None else grad for grad in (one, other)))


@settings(max_examples=10)
@given(sizes(), st.integers(1, 7), st.integers(1, 3), st.booleans(), st.integers(0, 99))
def test_coarse_to_fine_is_its_plain_statement(size, block, top, causal, seed) -> None:
    H, G, N, offset = size
    leaves = [x.requires_grad_() for x in tensors(seed, H, G, N, offset + N)]
    options: dict[str, Any] = {"block": block, "top": top, "causal": causal}
    found = recipes.CoarseToFineAttention(**options)(*leaves, enable_gqa=True, q_offset=offset)
    plain = [published.coarse_to_fine(*(x[b] for x in leaves), **options, offset=offset) for b in range(2)]
    expected = torch.stack(plain)
    assert_close(found, expected)
    wanted = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    assert_close(*(torch.autograd.grad(out, leaves, wanted) for out in (found, expected)))


@settings(max_examples=10)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(1, 2),
    st.integers(0, 99),
)
def test_video_sparse_attention_is_its_plain_statement(axes, top, G, seed) -> None:
    """On grids that the cube divides and others; with output and gradients."""
    grid, cube = (tuple(each) for each in zip(*axes, strict=True))
    leaves = [x.requires_grad_() for x in tensors(seed, 2, G, prod(grid), prod(grid))]
    found = torch.stack(recipes.VideoSparseAttention(grid, cube=cube, top=top)(*leaves, enable_gqa=True))
    plain = [published.vsa(*(x[b] for x in leaves), grid=grid, cube=cube, top=top) for b in range(2)]
    expected = torch.stack([torch.stack(each) for each in zip(*plain, strict=True)])
    assert_close(found, expected)
    wanted = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    assert_close(*(torch.autograd.grad(out, leaves, wanted) for out in (found, expected)))


@pytest.mark.parametrize("sizes", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 5, 1), (0, 0, 0)])
def test_empty_inputs_of_all_recipes(sizes) -> None:
    """No batch entries, queries or keys: the output has its shape, and is 0 for queries without keys, as gradients."""
    B, N, M = sizes
    q, k, v, x = (torch.randn(B, *rest).requires_grad_() for rest in ((4, N, 8), (2, M, 8), (2, M, 8), (N, 6)))
    native = recipes.NativeSparseAttention(6, 8, 4, 2, length=4, stride=2, block=4, top=3, window=3)
    outs = [native(x, q, k.expand(3, *k.shape), v.expand(3, *v.shape))]
    outs.append(recipes.CoarseToFineAttention(block=4, top=2)(q, k, v, enable_gqa=True))
    gate = recipes.SeerGate(8, 4, 2, block=4)
    forward_only = [recipes.moba(block=4, top=2), recipes.seer_attention(gate, choose=fd.TopK(2))]
    forward_only += [recipes.quest(budget=8, block=4), recipes.xattention(block=8, threshold=0.5, most=2)]
    with torch.no_grad():
        outs += [fd.SelectedAttention(each)(q, k, v, enable_gqa=True) for each in forward_only]
    for out in outs:
        assert out.shape == (B, 4, N, 8)
        assert out.isfinite().all()
        assert M or not out.any()
    grads = torch.autograd.grad(outs[0].sum() + outs[1].sum(), (q, k, v))
    assert all(grad.isfinite().all() for grad in grads)


class All(torch.nn.Module):
    """Coarse to fine; native, with one key and value for all branches; the scores of what a gate chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.native = recipes.CoarseToFineAttention(block=8, top=2), layer_of(2, 2, NSA).float()
        gate = recipes.SeerGate(4, 2, block=8, share="group")
        self.selector = recipes.seer_attention_r(gate, choose=fd.TopK(2))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        native = self.native(q.mean(1)[..., :3], q, k.expand(3, *k.shape), v.expand(3, *v.shape))
        return self.fine(q, k, v), native, self.selector(q, k).scores.nan_to_num(neginf=0.0)


@pytest.mark.slow
@pytest.mark.thorough  # test_selected_attention.py compiles the module that recipes are made of
def test_compiled_equals_eager() -> None:
    """In one graph, with its gradients; and a copy that was pickled computes the same.

    The ops of attend and of the choice go through AOT in tests of theirs.
    """
    torch.manual_seed(0)
    module, given = All(), torch.randn(3, 1, 2, 50, 4)
    found = []
    copied = pickle.loads(pickle.dumps(module))
    for run in (module, torch.compile(module, fullgraph=True, backend="eager"), copied):
        leaves = [x.clone().requires_grad_() for x in given]
        outs = run(*leaves)
        sum(out.sin().sum() for out in outs).backward()
        found.append([*outs, *(x.grad for x in leaves)])
    for other in found[1:]:
        assert_close(other, found[0])
