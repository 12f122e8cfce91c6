"""Recipes: each against the rule of its source, written densely; and the whole way to outputs."""

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.masks import recipes
from tests.support import oracle

# N tokens, n blocks

lengths = st.integers(1, 40)
small = st.integers(1, 6)


def allowed(pattern: masks.Pattern, N: int, head: int = 0, every: int = 1) -> Tensor:
    """The recipe's own rule for one head of two: every so many of the N queries, and of the N keys."""
    t = torch.arange(0, N, every)
    mod = pattern.bind(num_heads=2, num_queries=N, num_keys=N).mask_mod()
    return mod(torch.tensor(0), torch.tensor(head), t[:, None], t[None, :]).expand(len(t), len(t))


def dense(N: int, rule) -> Tensor:
    return torch.tensor([[bool(rule(i, j)) for j in range(N)] for i in range(N)])


@given(lengths, st.integers(0, 5), small, small)
def test_longformer(N, radius, num_global, rate):
    def rule(i, j):
        window = [i + step * rate for step in range(-radius, radius + 1)]
        return j in window or i < num_global or j < num_global

    assert torch.equal(allowed(recipes.longformer(radius, num_global, rate=rate), N), dense(N, rule))


@given(lengths, small, st.integers(0, 2), small, st.data())
def test_bigbird(N, block, radius, num_global, data):
    num_random, seed = data.draw(st.integers(1, -(-N // block))), data.draw(st.integers(0, 99))
    pattern = recipes.bigbird(N, block=block, radius=radius, num_global=num_global, num_random=num_random, seed=seed)
    for head in range(2):
        drawn = oracle.random_blocks(N, block, num_random, seed)(head, 2, torch.arange(N), torch.arange(N)).bool()

        def rule(i, j, drawn=drawn):
            row, column = i // block, j // block
            return abs(row - column) <= radius or min(row, column) < num_global or drawn[i, j]

        assert torch.equal(allowed(pattern, N, head), dense(N, rule))


@given(lengths, small)
def test_sparse_transformer_strided(N, stride):
    def rule(i, j):
        recent = range(max(0, i - stride), i + 1)
        every = [key for key in range(i + 1) if (i - key) % stride == 0]
        return j in recent or j in every

    assert torch.equal(allowed(recipes.sparse_transformer_strided(stride), N), dense(N, rule))


@given(lengths, small, st.data())
def test_sparse_transformer_fixed(N, stride, data):
    summary = data.draw(st.integers(1, stride))

    def rule(i, j):
        own = j // stride == i // stride
        summarised = j % stride in range(stride - summary, stride)
        return j <= i and (own or summarised)

    assert torch.equal(allowed(recipes.sparse_transformer_fixed(stride, summary=summary), N), dense(N, rule))


@given(lengths, small, small)
def test_streaming_llm(N, recent, num_sinks):
    """The cache as the paper keeps it: when it is full, the oldest key that is no sink goes."""
    cache, rows = [], []
    for token in range(N):
        cache.append(token)
        if len(cache) > num_sinks + recent:
            del cache[num_sinks]
        rows.append([key in cache for key in range(N)])
    assert torch.equal(allowed(recipes.streaming_llm(recent, num_sinks=num_sinks), N), torch.tensor(rows))


def of_blocks(N: int, block: int, pairs: set[tuple[int, int]]) -> Tensor:
    return dense(N, lambda i, j: (i // block, j // block) in pairs)


def near(row: int, radius: int, n: int) -> range:
    return range(max(0, row - radius), min(n, row + radius + 1))


@given(lengths, small, st.integers(0, 40))
def test_darcstar_local_window(N, block, size):
    """A window of `size // block` blocks, half of them, rounded down, on each side."""
    n = -(-N // block)
    pairs = {(row, column) for row in range(n) for column in near(row, size // block // 2, n)}
    pattern = recipes.darcstar_local_window(local_window_size=size, block_size=block)
    assert torch.equal(allowed(pattern, N), of_blocks(N, block, pairs))


@given(lengths, small, st.lists(small, min_size=1, max_size=5))
def test_darcstar_dilated_sparse(N, block, rates):
    """A block itself, and those at the first three distances, to both sides."""
    steps = {0, *rates[:3], *(-rate for rate in rates[:3])}
    pairs = {(row, row + step) for row in range(N) for step in steps}
    pattern = recipes.darcstar_dilated_sparse(rates, block_size=block)
    assert torch.equal(allowed(pattern, N), of_blocks(N, block, pairs))


@given(lengths, small, st.integers(0, 40), st.integers(0, 30))
def test_darcstar_global_local(N, block, size, tokens):
    """Whole global blocks that all see, and the window; no rows of global queries."""
    n = -(-N // block)
    pairs = {(row, column) for row in range(n) for column in near(row, size // block // 2, n)}
    pairs |= {(row, column) for row in range(n) for column in range(tokens // block)}
    pattern = recipes.darcstar_global_local(global_tokens=tokens, local_window_size=size, block_size=block)
    assert torch.equal(allowed(pattern, N), of_blocks(N, block, pairs))


@given(
    lengths,
    small,
    st.lists(st.tuples(st.integers(1, 30), st.one_of(st.just(-1), st.integers(0, 40))), min_size=1, max_size=4),
)
def test_darcstar_hierarchical(N, block, levels):
    """On each level, every so many blocks see so far."""
    n, pairs = -(-N // block), set()
    for stride, size in levels:
        for row in range(0, n, max(1, stride // block)):
            seen = range(n) if size == -1 else near(row, max(1, size // block) // 2, n)
            pairs |= {(row, column) for column in seen}
    pattern = recipes.darcstar_hierarchical(levels, block_size=block)
    assert torch.equal(allowed(pattern, N), of_blocks(N, block, pairs))


def test_darcstar_defaults_are_the_forks():
    """`SparsePatternConfig` and the standard `HierarchicalConfig` of its blocks of 64, at 4096 tokens."""
    n = 4096 // 128
    window = {(row, column) for row in range(n) for column in near(row, 2, n)}
    expected = of_blocks(32, 1, window)
    for pattern in (recipes.darcstar_local_window(), recipes.darcstar_global_local()):
        assert torch.equal(allowed(pattern, 4096, every=128), expected)
    seen = allowed(recipes.darcstar_hierarchical(), 4096, every=64).sum(1).tolist()
    assert seen[:6] == [64, 4, 5, 5, 13, 5]  # block 0 sees all, block 4 up to 8 to each side, others 2
    assert seen[16] == 64


CALLS = [
    "longformer(6, 2)",
    "longformer(6, num_global=2, rate=2)",
    "bigbird(100, block=8)",
    "sparse_transformer_strided(8)",
    "sparse_transformer_fixed(8, summary=2)",
    "streaming_llm(16)",
    "darcstar_local_window(local_window_size=32, block_size=8)",
    "darcstar_dilated_sparse([1, 2, 4], block_size=8)",
    "darcstar_global_local(global_tokens=8, local_window_size=32, block_size=8)",
    "darcstar_hierarchical(((8, 16), (32, -1)), block_size=8)",
]


@pytest.mark.parametrize("text", CALLS)
def test_recipes_are_read_and_attend(text):
    pattern = eval(text, vars(recipes).copy())
    assert masks.parse(f"recipes.{text}") == masks.parse(f"masks.recipes.{text}") == pattern
    assert masks.parse(repr(pattern)) == masks.from_json(masks.to_json(pattern)) == pattern
    q, k, v = torch.randn(3, 1, 2, 100, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for each in (pattern, pattern & masks.causal()):
        assert_close(fd.attend(q, k, v, each), fd.attend(q, k, v, each, engine="reference"))


def test_each_recipe_is_tried():
    assert {text.partition("(")[0] for text in CALLS} == set(recipes.__all__)
    assert all(inspect.getdoc(getattr(recipes, name)) for name in recipes.__all__)
