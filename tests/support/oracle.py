"""The rules and the attention, dense and straight from their definitions: what the library is compared with.

A rule maps (head, heads in all, query positions, key positions) to an (N, M) table of counts: how often each
pair is allowed, 0 or 1 for a set. Nothing here is taken from the library.
"""

from collections.abc import Callable, Sequence
from math import ceil, prod

import torch
from torch import Tensor

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim

Rule = Callable[[int, int, Tensor, Tensor], Tensor]


def causal() -> Rule:
    """Keys at the query's own position and before."""
    return lambda h, H, q, k: (k[None, :] <= q[:, None]).long()


def local_window(left: int, right: int) -> Rule:
    """Keys from query - left to query + right."""
    return lambda h, H, q, k: ((k[None, :] >= q[:, None] - left) & (k[None, :] <= q[:, None] + right)).long()


def dilated_window(left: int, right: int, rate: int) -> Rule:
    """The query's own key, and `left` keys before it and `right` after it at steps of `rate`."""

    def rule(h: int, H: int, q: Tensor, k: Tensor) -> Tensor:
        seen = [q + rate * step for step in range(-left, right + 1)]
        return torch.stack([k[None, :] == key[:, None] for key in seen]).any(0).long()

    return rule


def strided(stride: int) -> Rule:
    """Keys whose place in their block of `stride` tokens is the query's."""
    return lambda h, H, q, k: (k[None, :] % stride == q[:, None] % stride).long()


def fixed(stride: int, summary: int) -> Rule:
    """Keys at the last `summary` places of a block of `stride` tokens."""

    def rule(h: int, H: int, q: Tensor, k: Tensor) -> Tensor:
        places = range(stride)[-summary:]
        return torch.tensor([[int(key) % stride in places for key in k]] * len(q)).long()

    return rule


def global_tokens(count: int, rows: bool, columns: bool) -> Rule:
    """The first `count` queries see every key (rows), every query sees the first `count` keys (columns)."""
    return _marked(lambda places: places < count, rows, columns)


def landmark_tokens(stride: int, rows: bool, columns: bool) -> Rule:
    """Queries (rows) and keys (columns) at the positions 0, stride, 2 * stride, ... take part in every pair."""
    return _marked(lambda places: places % stride == 0, rows, columns)


def _marked(is_marked: Callable[[Tensor], Tensor], rows: bool, columns: bool) -> Rule:
    return lambda h, H, q, k: (is_marked(q)[:, None] & rows | is_marked(k) & columns).long()


def random_blocks(num_tokens: int, block: int, count: int, seed: int) -> Rule:
    """Block rows draw their key blocks by splitmix64 and Floyd's method, in whole numbers modulo 2^64."""
    blocks = -(-num_tokens // block)

    def mixed(state: int) -> int:
        z = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    def drawn(h: int, row: int) -> set[int]:
        state, chosen = mixed(mixed(mixed(seed) + h) + row), set()
        for number, last in enumerate(range(blocks - count, blocks)):
            block = (mixed(state + number) >> 32) * (last + 1) >> 32
            chosen.add(last if block in chosen else block)
        return chosen

    def rule(h: int, H: int, q: Tensor, k: Tensor) -> Tensor:
        rows = [drawn(h, row) for row in range(blocks)]
        seen = [[max(i, j) < num_tokens and j // block in rows[i // block] for j in k.tolist()] for i in q.tolist()]
        return torch.tensor(seen).long()

    return rule


def block_list(tables: Sequence[Sequence[Sequence[int]]], block: int) -> Rule:
    """One table of rows for all heads, or one a head; a query beyond the last row sees nothing."""

    def rule(h: int, H: int, q: Tensor, k: Tensor) -> Tensor:
        rows = dict(enumerate(tables[h if len(tables) > 1 else 0]))
        seen = [[j // block in rows.get(i // block, ()) for j in k.tolist()] for i in q.tolist()]
        return torch.tensor(seen).long()

    return rule


def grid_window(grid: Sequence[int], windows: Sequence[Sequence[int]]) -> Rule:
    """Tokens of one grid, in one of the windows: at most so many places apart along each axis."""
    places = torch.cartesian_prod(*map(torch.arange, grid)).view(-1, len(grid))

    def rule(h: int, H: int, q: Tensor, k: Tensor) -> Tensor:
        far = (places[q.clamp(max=len(places) - 1)][:, None] - places[k.clamp(max=len(places) - 1)][None]).abs()
        inside = (q < len(places))[:, None] & (k < len(places))[None, :]
        near = [(far <= torch.tensor(radii)).all(-1) for radii in windows]
        return (torch.stack(near).any(0) & inside).long()

    return rule


def neighborhood(axes: Sequence[tuple[int, int, int, int, bool, bool]]) -> Rule:
    """NATTEN's windows; axes: (length, kernel size, rate, stride, is causal, wraps) of each axis of the grid.

    The rule applies within each residue class modulo the rate. Each `stride` queries share the window of a leader. On
    a causal axis the leader is the last query of the group, its window ends at it, and queries see no later keys.
    Otherwise the leader is the middle query, and its window is the run of kernel-size tokens most nearly centred on
    it; on an axis that wraps it is centred, modulo the class size.
    """

    def window(place: int, length: int, size: int, rate: int, stride: int, is_causal: bool, wraps: bool) -> list[int]:
        fellows = list(range(place % rate, length, rate))
        number = fellows.index(place)
        groups = [list(range(start, start + stride)) for start in range(0, len(fellows), stride)]
        (group,) = [group for group in groups if number in group]
        leader = min(group[-1] if is_causal else group[stride // 2], len(fellows) - 1)
        if is_causal:
            return [fellows[i] for i in range(number + 1) if leader - size < i]
        if wraps:
            return [fellows[(leader - size // 2 + step) % len(fellows)] for step in range(size)]
        starts = range(len(fellows) - size + 1)
        start = min(starts, key=lambda start: abs(start + size // 2 - leader))
        return fellows[start : start + size]

    grid = [length for length, *_ in axes]
    windows = [[window(place, *axis) for place in range(axis[0])] for axis in axes]

    def sees(i: int, j: int) -> bool:
        strides = [prod(grid[axis + 1 :]) for axis in range(len(grid))]
        if max(i, j) >= prod(grid):
            return False
        return all(
            j // stride % length in window[i // stride % length]
            for stride, length, window in zip(strides, grid, windows, strict=True)
        )

    return lambda h, H, q, k: torch.tensor([[sees(i, j) for j in k.tolist()] for i in q.tolist()]).long()


def dilated(segment: int, rate: int, offset: int | str) -> Rule:
    """Segment by segment: tokens offset, offset + rate, ... of each see each other, the rest nothing."""

    def rule(h: int, H: int, q: Tensor, k: Tensor) -> Tensor:
        end = int(max(q.max(), k.max())) + 1
        segment_of = torch.full((end,), -1)  # -1: not active
        for number, start in enumerate(range(0, end, segment)):
            segment_of[start : start + segment][offset_of(offset, rate, h, H) :: rate] = number
        return ((segment_of[q][:, None] == segment_of[k][None, :]) & (segment_of[q] >= 0)[:, None]).long()

    return rule


def offset_of(offset: int | str, rate: int, head: int, num_heads: int) -> int:
    """The offset of one of all heads: LongNet's eq. 13, torchscale's rule, or a fixed one."""
    if offset == "interleaved":
        return head % rate
    if offset == "contiguous":
        return head // ceil(num_heads / rate)
    assert isinstance(offset, int)
    return offset


def every() -> Rule:
    """All pairs."""
    return lambda h, H, q, k: torch.ones(len(q), len(k), dtype=torch.int64)


def blockwise(inner: Rule, block: int) -> Rule:
    """The inner rule between the numbers of the blocks that tokens lie in."""
    return lambda h, H, q, k: inner(h, H, q // block, k // block)


def queries_from(inner: Rule, start: int) -> Rule:
    """The rule in which query i is at position i + start."""
    return lambda h, H, q, k: inner(h, H, q + start, k)


def after(inner: Rule, start: int) -> Rule:
    """The rule over the tokens from `start` on; the others meet none."""

    def rule(h: int, H: int, q: Tensor, k: Tensor) -> Tensor:
        table = torch.zeros(len(q), len(k), dtype=torch.int64)
        rows, columns = ((side >= start).nonzero().flatten() for side in (q, k))
        if len(rows) and len(columns):
            table[rows[:, None], columns[None, :]] = inner(h, H, q[rows] - start, k[columns] - start)
        return table

    return rule


def before(inner: Rule, stop: int) -> Rule:
    """The rule over the tokens below `stop`; the others meet none."""

    def rule(h: int, H: int, q: Tensor, k: Tensor) -> Tensor:
        table = torch.zeros(len(q), len(k), dtype=torch.int64)
        rows, columns = ((side < stop).nonzero().flatten() for side in (q, k))
        if len(rows) and len(columns):
            table[rows[:, None], columns[None, :]] = inner(h, H, q[rows], k[columns])
        return table

    return rule


def documents(ids: Tensor) -> Rule:
    """Pairs within one document, by the id of each position; negative ids are padding."""
    return same_document(ids, ids)


def same_document(q_ids: Tensor, k_ids: Tensor) -> Rule:
    """A pair is allowed iff q_ids[query] == k_ids[key]; negative ids are padding."""

    def rule(h: int, H: int, q: Tensor, k: Tensor) -> Tensor:
        return ((q_ids[q][:, None] == k_ids[k]) & (q_ids[q] >= 0)[:, None]).long()

    return rule


def mask(allowed: Tensor) -> Rule:
    """A pair is allowed iff the mask (heads, queries, keys) is True for it; dims of size 1 broadcast."""

    def rule(h: int, H: int, q: Tensor, k: Tensor) -> Tensor:
        whole = allowed.expand(H, max(allowed.shape[1], int(q.max()) + 1), max(allowed.shape[2], int(k.max()) + 1))
        return whole[h][q][:, k].long()

    return rule


def visible_keys(visible: Tensor) -> Rule:
    """The keys that are marked."""
    return lambda h, H, q, k: visible[k].long()[None, :].expand(len(q), -1)


def sparse(allowed: Tensor) -> Rule:
    """Each of T matrices serves as many heads."""
    return lambda h, H, q, k: allowed[h // (H // len(allowed))][q][:, k].long()


def selected_blocks(tables: Tensor, block: tuple[int, int], num_rows: int) -> Rule:
    """Each of T tables serves as many heads; its last row is that of the last of all blocks of queries."""
    first = num_rows - tables.shape[1]

    def rule(h: int, H: int, q: Tensor, k: Tensor) -> Tensor:
        rows = tables[h // (H // len(tables))].tolist()
        seen = [[j // block[1] in rows[i // block[0] - first] for j in k.tolist()] for i in q.tolist()]
        return torch.tensor(seen).long()

    return rule


def per_document(inner: Rule, ids: Tensor) -> Rule:
    """The rule over each document alone, put where the document lies."""

    def rule(h: int, H: int, q: Tensor, k: Tensor) -> Tensor:
        table = torch.zeros(len(ids), len(ids), dtype=torch.int64)
        for number in ids[ids >= 0].unique():
            where = (ids == number).nonzero().flatten()
            alone = torch.arange(len(where))
            table[where[:, None], where[None, :]] = inner(h, H, alone, alone)
        return table[q][:, k]

    return rule


def both(*rules: Rule) -> Rule:
    """Pairs that every set allows; one mixture among them keeps its counts."""

    def rule(h: int, H: int, q: Tensor, k: Tensor) -> Tensor:
        return torch.stack([part(h, H, q, k) for part in rules]).prod(0)

    return rule


def either(*rules: Rule) -> Rule:
    """Pairs that any set allows."""
    return lambda h, H, q, k: torch.stack([part(h, H, q, k) for part in rules]).amax(0)


def neither(inner: Rule) -> Rule:
    """Pairs that a set forbids."""
    return lambda h, H, q, k: 1 - inner(h, H, q, k)


def total(*rules: Rule) -> Rule:
    """A mixture: counts add up."""
    return lambda h, H, q, k: torch.stack([part(h, H, q, k) for part in rules]).sum(0)


def per_head(*rules: Rule) -> Rule:
    """Head h follows rule h."""
    return lambda h, H, q, k: rules[h](h, H, q, k)


def grouped(*rules: Rule) -> Rule:
    """Consecutive groups of heads follow one rule each; unequal groups: the first have one head more."""

    def rule(h: int, H: int, q: Tensor, k: Tensor) -> Tensor:
        groups = torch.arange(H).tensor_split(len(rules))
        (mine,) = (index for index, heads in enumerate(groups) if h in heads)
        return rules[mine](h, H, q, k)

    return rule


def longnet(segments: Sequence[int], rates: Sequence[int], offsets: str = "interleaved", heads: str = "all") -> Rule:
    """LongNet's branches: every head runs all of them, or groups of heads run one each."""
    branches = [dilated(w, r, offsets) for w, r in zip(segments, rates, strict=True)]
    return grouped(*branches) if heads == "grouped" else total(*branches)


def counts(rule: Rule, heads: range, num_heads: int, queries: Tensor, keys: Tensor) -> Tensor:
    """(H, N, M): the rule over global heads and positions."""
    return torch.stack([rule(head, num_heads, queries, keys) for head in heads])


def useful_pairs(segments: Sequence[int], rates: Sequence[int], *, num_heads: int, N: int, causal: bool) -> int:
    """Pairs that a LongNet with interleaved offsets allows over N tokens, summed over branches and heads."""
    pairs = 0
    for w, r in zip(segments, rates, strict=True):
        for head in range(num_heads):
            lengths = (len(range(start + head % r, min(start + w, N), r)) for start in range(0, N, w))
            pairs += sum(n * (n + 1) // 2 if causal else n * n for n in lengths)
    return pairs


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    counts: Tensor,
    scale: float | Tensor | None = None,
    sinks: Tensor | None = None,
    modify: Callable[[Tensor], Tensor] = lambda scores: scores,
    dropped: Callable[[Tensor], Tensor] = lambda weights: weights,
) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64 of one softmax in which a pair weighs as often as it is allowed.

    A row without keys has output 0 and lse -inf. Query head h reads key/value head h // (H / G). A sink, a logit a
    head, weighs in every row's sum and has no value. `modify` makes new scores of the (B, H, N, M) scaled ones,
    and `dropped` new weights of the softmax's.
    """
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = modify(q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale))
    scores = scores.masked_fill(counts == 0, -torch.inf)
    sinks = None if sinks is None else sinks.double()[:, None].expand(scores.shape[:-1])
    top = scores.detach().amax(-1) if sinks is None else torch.maximum(scores.detach().amax(-1), sinks.detach())
    empty = top == -torch.inf
    top = top.masked_fill(empty, 0.0)
    weights = counts * (scores - top[..., None]).exp()
    sums = weights.sum(-1) if sinks is None else weights.sum(-1) + (sinks - top).exp()
    sums = sums.masked_fill(empty, 1.0)
    return dropped(weights / sums[..., None]) @ v, (sums.log() + top).masked_fill(empty, -torch.inf)
