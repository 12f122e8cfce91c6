"""Recipes: each against the rule of its source, written densely; and the whole way to outputs."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flexdilated import masks
from flexdilated.masks import recipes
from tests.support import oracle

# N tokens

small = st.integers(1, 6)

# What is drawn, and the number of tokens, to a recipe and its rule for (head, query, key).
Rule = Callable[[int, int, int], Any]
Recipe = Callable[[Callable[..., Any], int], tuple[masks.Pattern, Rule]]


def allowed(pattern: masks.Pattern, N: int, head: int = 0, every: int = 1) -> Tensor:
    """The recipe's own rule for one head of two: every so many of the N queries, and of the N keys."""
    t = torch.arange(0, N, every)
    mod = pattern.bind(num_heads=2, num_queries=N, num_keys=N).mask_mod()
    return mod(torch.tensor(0), torch.tensor(head), t[:, None], t[None, :]).expand(len(t), len(t))


def of_blocks(block: int, sees: Callable[[int], Any]) -> Rule:
    return lambda h, i, j: j // block in sees(i // block)


def near(row: int, radius: int) -> range:
    return range(row - radius, row + radius + 1)


def longformer(draw, N):
    radius, num_global, rate = draw(st.integers(0, 5)), draw(small), draw(small)
    steps = [step * rate for step in range(-radius, radius + 1)]
    rule = lambda h, i, j: j - i in steps or i < num_global or j < num_global  # noqa: E731
    return recipes.longformer(radius, num_global, rate=rate), rule


def bigbird(draw, N):
    block, radius, num_global, seed = draw(small), draw(st.integers(0, 2)), draw(small), draw(st.integers(0, 99))
    count = draw(st.integers(1, -(-N // block)))
    tokens = torch.arange(N)
    drawn = [oracle.random_blocks(N, block, count, seed)(head, 2, tokens, tokens).bool() for head in range(2)]

    def rule(h, i, j):
        row, column = i // block, j // block
        return column in near(row, radius) or min(row, column) < num_global or drawn[h][i, j]

    return recipes.bigbird(N, block=block, radius=radius, num_global=num_global, num_random=count, seed=seed), rule


def sparse_transformer_strided(draw, N):
    stride = draw(small)
    rule = lambda h, i, j: j <= i and (i - j <= stride or (i - j) % stride == 0)  # noqa: E731
    return recipes.sparse_transformer_strided(stride), rule


def sparse_transformer_fixed(draw, N):
    stride = draw(small)
    summary = draw(st.integers(1, stride))
    rule = lambda h, i, j: j <= i and (j // stride == i // stride or j % stride >= stride - summary)  # noqa: E731
    return recipes.sparse_transformer_fixed(stride, summary=summary), rule


def streaming_llm(draw, N):
    """The cache as the paper keeps it: when it is full, the oldest key that is no sink goes."""
    recent, num_sinks = draw(small), draw(small)
    cache, rows = [], []
    for token in range(N):
        cache.append(token)
        if len(cache) > num_sinks + recent:
            del cache[num_sinks]
        rows.append(list(cache))
    return recipes.streaming_llm(recent, num_sinks=num_sinks), lambda h, i, j: j in rows[i]


def video(draw, N, tile=(1, 1, 1)):
    """(frames, rows, columns) of at least N tokens, of whole tiles; and the place of a token in it."""
    rows, columns = (draw(st.integers(1, 4)) * size for size in tile[1:])
    frames = -(-N // (rows * columns * tile[0])) * tile[0]
    return (frames, rows, columns), lambda i: (i // columns // rows, i // columns % rows, i % columns)


def sliding_tile(draw, N):
    """By tiles: those within half a window of the query's tile, or of the nearest tile that has a whole window."""
    tile = tuple(draw(st.integers(1, 3)) for _ in range(3))
    grid, place = video(draw, N, tile)
    tiles = [length // size for length, size in zip(grid, tile, strict=True)]
    numbers = [2 * draw(st.integers(0, min(2, (each - 1) // 2))) + 1 for each in tiles]

    def rule(h, i, j):
        for a, b, size, count, number in zip(place(i), place(j), tile, tiles, numbers, strict=True):
            centre = min(max(a // size, number // 2), count - 1 - number // 2)
            if abs(b // size - centre) > number // 2:
                return False
        return True

    return recipes.sliding_tile(grid, tile=tile, num_tiles=numbers), rule


def radial(draw, N):
    """The paper's formula, with the first frame as its attention sink."""
    (frames, rows, columns), _ = video(draw, N)
    size = max(rows * columns, frames)
    rows, columns, frames = 1, size, -(-N // size)

    def rule(h, i, j):
        frame, other = i // size, j // size
        level = 2 ** int(math.log2(max(abs(frame - other), 1)))
        return other == 0 or abs(i % size - j % size) + 1 <= size / level

    return recipes.radial((frames, rows, columns)), rule


def sparse_videogen_spatial(draw, N):
    (grid, place), near_frames = video(draw, N), draw(st.integers(0, 4))
    rule = lambda h, i, j: abs(place(i)[0] - place(j)[0]) <= near_frames or place(j)[0] == 0  # noqa: E731
    return recipes.sparse_videogen_spatial(grid, near_frames=near_frames), rule


def sparse_videogen_temporal(draw, N):
    grid, near_places = video(draw, N)[0], draw(st.integers(0, 9))
    size = grid[1] * grid[2]
    rule = lambda h, i, j: abs(i % size - j % size) <= near_places or j < size  # noqa: E731
    return recipes.sparse_videogen_temporal(grid, near_places=near_places), rule


def darcstar_local_window(draw, N):
    """A window of `size // block` blocks, half of them, rounded down, on each side."""
    block, size = draw(small), draw(st.integers(0, 40))
    pattern = recipes.darcstar_local_window(local_window_size=size, block_size=block)
    return pattern, of_blocks(block, lambda row: near(row, size // block // 2))


def darcstar_dilated_sparse(draw, N):
    """A block itself, and those at the first three distances, to both sides."""
    block, rates = draw(small), draw(st.lists(small, min_size=1, max_size=5))
    steps = {0, *rates[:3], *(-rate for rate in rates[:3])}
    pattern = recipes.darcstar_dilated_sparse(rates, block_size=block)
    return pattern, of_blocks(block, lambda row: {row + step for step in steps})


def darcstar_global_local(draw, N):
    """Whole global blocks that all see, and the window; no rows of global queries."""
    block, size, tokens = draw(small), draw(st.integers(0, 40)), draw(st.integers(0, 30))
    pattern = recipes.darcstar_global_local(global_tokens=tokens, local_window_size=size, block_size=block)
    return pattern, of_blocks(block, lambda row: {*near(row, size // block // 2), *range(tokens // block)})


def darcstar_hierarchical(draw, N):
    """On each level, every so many blocks see so far."""
    block = draw(small)
    level = st.tuples(st.integers(1, 30), st.just(-1) | st.integers(0, 40))
    levels = draw(st.lists(level, min_size=1, max_size=4))

    def sees(row: int) -> set[int]:
        own = [size for stride, size in levels if row % max(1, stride // block) == 0]
        seen = (range(N) if size == -1 else near(row, max(1, size // block) // 2) for size in own)
        return set().union(*seen)

    return recipes.darcstar_hierarchical(levels, block_size=block), of_blocks(block, sees)


RECIPES: list[Recipe] = [
    *(longformer, bigbird, sparse_transformer_strided, sparse_transformer_fixed, streaming_llm),
    *(sliding_tile, radial, sparse_videogen_spatial, sparse_videogen_temporal),
    *(darcstar_local_window, darcstar_dilated_sparse, darcstar_global_local, darcstar_hierarchical),
]


def test_every_recipe_is_tried():
    assert {recipe.__name__ for recipe in RECIPES} == set(recipes.__all__)


@pytest.mark.parametrize("recipe", RECIPES)
@given(data=st.data(), N=st.integers(1, 40))
def test_a_recipe_is_the_rule_of_its_source(recipe: Recipe, data: st.DataObject, N: int):
    pattern, rule = recipe(data.draw, N)
    assert masks.parse(repr(pattern)) == masks.from_json(masks.to_json(pattern)) == pattern
    for head in range(2):
        expected = torch.tensor([[bool(rule(head, i, j)) for j in range(N)] for i in range(N)])
        assert torch.equal(allowed(pattern, N, head), expected)


def test_darcstar_defaults_are_the_forks():
    """`SparsePatternConfig` and the standard `HierarchicalConfig` of its blocks of 64, at 4096 tokens."""
    row = torch.arange(4096 // 128)
    for pattern in (recipes.darcstar_local_window(), recipes.darcstar_global_local()):
        assert torch.equal(allowed(pattern, 4096, every=128), (row[:, None] - row).abs() <= 2)
    seen = allowed(recipes.darcstar_hierarchical(), 4096, every=64).sum(1).tolist()
    assert seen[:6] == [64, 4, 5, 5, 13, 5]  # block 0 sees all, block 4 up to 8 to each side, others 2
    assert seen[16] == 64
