"""What is drawn where little repeats: listed blocks, documents with padding, visible keys and runs of them."""

import operator
from dataclasses import replace
from itertools import count

import torch
from hypothesis import strategies as st
from torch import Tensor

from flexdilated import masks
from flexdilated.masks.core._bound import Bound

_number = count()  # tensors of one pattern go by names of their own
joins = st.sampled_from([operator.and_, operator.or_])


def dense(bound: Bound, rule: masks.Pattern | None = None) -> Tensor:
    """(H, N, N), pair by pair: the whole pattern, or one rule of it."""
    if rule is not None:
        bound = replace(bound, pattern=rule)
    head, query, key = (torch.arange(size) for size in (bound.num_heads, bound.num_queries, bound.num_keys))
    allowed = bound.mask_mod()(torch.tensor(0), head[:, None, None], query[:, None], key)
    return allowed.expand(bound.num_heads, bound.num_queries, bound.num_keys)


def marks(num_tokens: int, *, runs: int) -> st.SearchStrategy[Tensor]:
    """Of each token: runs of tokens that are marked or not."""
    lengths = st.lists(st.integers(1, runs), min_size=num_tokens, max_size=num_tokens).map(torch.tensor)
    return lengths.map(lambda sizes: torch.arange(num_tokens).repeat_interleave(sizes)[:num_tokens] % 2 > 0)


def documents(num_tokens: int) -> st.SearchStrategy[masks.Pattern]:
    """Documents with padding before, between and after some of them."""
    steps = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=num_tokens, max_size=num_tokens)
    padding = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=num_tokens, max_size=num_tokens)
    return st.builds(
        lambda steps, padding: masks.documents(
            torch.tensor(steps).cumsum(0).masked_fill(torch.tensor(padding) > 0, -1), name=f"documents_{next(_number)}"
        ),
        steps,
        padding,
    ).filter(lambda pattern: _is_sound(pattern, num_tokens))


def _is_sound(pattern: masks.Pattern, num_tokens: int) -> bool:
    try:
        pattern.bind(num_heads=1, num_queries=num_tokens, num_keys=num_tokens)
    except ValueError:
        return False
    return True


@st.composite
def stretch_leaves(draw: st.DrawFn, num_tokens: int) -> masks.Pattern:
    block = draw(st.sampled_from([1, 2, 3, 5, 8, 16]))
    blocks = -(-num_tokens // block)
    rows = st.lists(st.sets(st.integers(0, blocks - 1), max_size=3).map(sorted), min_size=1, max_size=blocks + 1)
    kinds = {
        "random": st.builds(
            masks.random_blocks,
            st.sampled_from([num_tokens, max(1, num_tokens - 3), num_tokens + 5]),
            block=st.just(block),
            count=st.just(1),
            seed=st.integers(0, 9),
        ),
        "listed": rows.map(lambda rows: masks.block_list(rows, block=block)),
        "blockwise": st.builds(masks.local_window, left=st.integers(0, 2), right=st.integers(0, 1)).map(
            lambda window: masks.blockwise(window, block)
        ),
        "causal": st.just(masks.causal()),
        "chunked": st.builds(masks.chunked, st.integers(1, 20)),
        "global": st.builds(masks.first_tokens, st.integers(1, 9)) | st.builds(masks.global_tokens, st.integers(1, 9)),
        "documents": documents(num_tokens),
        "restarted": documents(num_tokens).map(lambda ids: masks.causal().per_document(ids)),
        "visible": marks(num_tokens, runs=12).map(lambda seen: masks.visible_keys(seen, name=f"keys_{next(_number)}")),
    }
    return draw(kinds[draw(st.sampled_from([*kinds, "random", "listed", "listed"]))])


@st.composite
def stretch_rules(draw: st.DrawFn, num_tokens: int) -> masks.Pattern:
    rule = draw(stretch_leaves(num_tokens))
    for _ in range(draw(st.integers(0, 2))):
        other = draw(stretch_leaves(num_tokens))
        rule = draw(joins)(rule, ~other if draw(st.integers(0, 3)) == 3 else other)
    return rule


@st.composite
def run_rules(draw: st.DrawFn, num_tokens: int, depth: int = 2) -> masks.Pattern:
    if depth and draw(st.booleans()):
        return draw(joins)(draw(run_rules(num_tokens, depth - 1)), draw(run_rules(num_tokens, depth - 1)))
    windows = st.builds(masks.local_window, left=st.integers(0, 7), right=st.sampled_from([0, 0, 1, 3]))
    leaves = windows | windows | st.builds(masks.chunked, st.integers(1, 20)) | documents(num_tokens)
    windows_anew = st.builds(lambda window, ids: window.per_document(ids), windows, documents(num_tokens))
    return draw(leaves | windows_anew | st.sampled_from([masks.causal(), masks.every()]))


@st.composite
def bound_rules(draw: st.DrawFn, rules, *, visible: bool = False) -> Bound:
    """One rule for all heads, one for each of two, or a sum; self-attention of some tokens."""
    num_tokens = draw(st.integers(1, 90))
    several = [draw(rules(num_tokens)) for _ in range(draw(st.sampled_from([1, 1, 2])))]
    if visible and draw(st.integers(0, 3)):
        keys = masks.visible_keys(draw(marks(num_tokens, runs=draw(st.sampled_from([1, 4, 30])))))
        several = [rule & keys for rule in several]
    pattern = several[0]
    if len(several) == 2:
        pattern = masks.per_head(several) if draw(st.booleans()) else several[0] + several[1]
    return pattern.bind(num_heads=2, num_queries=num_tokens, num_keys=num_tokens)


def listed(num_tokens: int, block: int) -> masks.Pattern:
    """Each block sees its own, or the one before, and one more."""
    blocks = -(-num_tokens // block)
    rows = [sorted({max(0, row - row % 2), (5 * row + 3) % blocks}) for row in range(blocks)]
    return masks.block_list(rows, block=block)


def padded(num_tokens: int) -> masks.Pattern:
    """Documents of 5 tokens, each second one padding."""
    number = torch.arange(num_tokens) // 5
    return masks.documents(torch.where(number % 2 == 0, number, -1))


@st.composite
def sums_of_runs(draw: st.DrawFn) -> Bound:
    """A sum of rules by which tokens see runs, among them dilated ones."""
    num_tokens = draw(st.integers(1, 60))
    dilated = st.builds(masks.dilated, st.integers(1, 40), st.integers(1, 7), st.just("interleaved"))
    parts = draw(st.lists(dilated | run_rules(num_tokens), min_size=1, max_size=4))
    pattern = masks.Mixture.of(*parts)
    if draw(st.booleans()):
        pattern = pattern & draw(st.just(masks.causal()) | dilated | run_rules(num_tokens, 0))
    if draw(st.booleans()):
        pattern = pattern & masks.visible_keys(draw(marks(num_tokens, runs=4)))
    return pattern.bind(num_heads=2, num_queries=num_tokens, num_keys=num_tokens)
