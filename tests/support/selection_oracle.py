"""Block selection in loops, in float64, straight from its definition: what the library's choices are compared with.

Nothing here is taken from the library: a rule is an (N, M) table of booleans for each batch entry and head.
"""

from dataclasses import dataclass
from math import exp, inf, log

import torch
from torch import Tensor

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim, T tables, R rows, C blocks of keys


@dataclass(frozen=True)
class Asked:
    """A selection to make. within and always: booleans (B, H, N, M).

    choose: ("top_k", 0), ("top_p", p), ("top_p_of_row", p) or ("threshold", t). candidates: where a coarse choice
    restricts it, sets of blocks by (entry, head, row).
    """

    within: Tensor
    always: Tensor
    block: int
    query_block: int
    scorer: str
    choose: tuple[str, float]
    most: int
    tables: int
    whole: bool
    q_offset: int
    scale: float
    stride: int = 1
    candidates: dict[tuple[int, int, int], set[int]] | None = None


@dataclass(frozen=True)
class Answer:
    """blocks[b][t][r]: the chosen, best first, with their scores; density and cut as floats."""

    blocks: list[list[list[list[int]]]]
    scores: list[list[list[list[float]]]]
    density: float
    cut: float


def rows_of(N: int, q_offset: int, query_block: int) -> list[list[int]]:
    """The queries of each row."""
    found: dict[int, list[int]] = {}
    for i in range(N):
        found.setdefault((q_offset + i) // query_block, []).append(i)
    return list(found.values())


def blocks_of(M: int, block: int) -> list[list[int]]:
    return [list(range(at, min(at + block, M))) for at in range(0, M, block)]


def select(q: Tensor, k: Tensor, asked: Asked) -> Answer:
    q, k = q.double(), k.double()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    B, H, N, _ = q.shape
    rows, blocks = rows_of(N, asked.q_offset, asked.query_block), blocks_of(k.shape[2], asked.block)
    found: list = [[[[] for _ in rows] for _ in range(asked.tables)] for _ in range(B)]
    worth: list = [[[[] for _ in rows] for _ in range(asked.tables)] for _ in range(B)]
    read, cuts = asked.within & asked.always, 0
    for b in range(B):
        for t in range(asked.tables):
            heads = [h for h in range(H) if h * asked.tables // H == t]
            for r, row in enumerate(rows):
                each = [scores_of(q[b, h], k[b, h], row, r, blocks, asked, b, h) for h in heads]
                chosen, cut = pick(joined(each, asked), asked)
                found[b][t][r], worth[b][t][r] = [j for j, _ in chosen], [score for _, score in chosen]
                cuts += cut
                for h in heads:
                    for j, _ in chosen:
                        read[b, h][torch.tensor(row)[:, None], torch.tensor(blocks[j])] = True
    pairs = asked.within.sum().item()
    return Answer(
        found, worth, (read & asked.within).sum().item() / max(pairs, 1), cuts / (B * asked.tables * len(rows))
    )


def scores_of(q: Tensor, k: Tensor, row: list[int], r: int, blocks: list, asked: Asked, b: int, h: int) -> dict:
    """The score of each candidate of one row and head."""
    view = row if asked.whole else row[:1]
    within, always = asked.within[b, h], asked.always[b, h]
    open_pairs = within & ~always
    found = {}
    for j, block in enumerate(blocks):
        if not any(open_pairs[i, key] for i in view for key in block):
            continue
        if asked.candidates is not None and j not in asked.candidates[b, h, r]:
            continue
        if asked.scorer == "mass":
            found[j] = mass(q, k, view, block, within, asked.scale)
        elif asked.scorer == "antidiagonal":
            found[j] = antidiagonal(q, k, row, block, within, asked)
        else:
            found[j] = pooled(q, k, view, block, within, asked)
    return found


def pooled(q: Tensor, k: Tensor, view: list[int], block: list[int], within: Tensor, asked: Asked) -> float:
    seeing = [i for i in view if within[i].any()]
    query = q[seeing].mean(0) * asked.scale
    keys = k[[key for key in block if any(within[i, key] for i in view)]]
    if asked.scorer == "mean":
        return float(query @ keys.mean(0))
    return float(torch.maximum(query * keys.amin(0), query * keys.amax(0)).sum())


def mass(q: Tensor, k: Tensor, view: list[int], block: list[int], within: Tensor, scale: float) -> float:
    shares = []
    for i in view:
        seen = within[i].nonzero().flatten().tolist()
        if seen:
            weights = (k[seen] @ q[i] * scale).softmax(0)
            shares.append(sum(float(w) for key, w in zip(seen, weights, strict=True) if key in block))
    return log(sum(shares) / len(shares)) if sum(shares) else -inf


def antidiagonal(q: Tensor, k: Tensor, row: list[int], block: list[int], within: Tensor, asked: Asked) -> float:
    S, shares = asked.stride, []
    for a in sorted({(asked.q_offset + i) // S for i in row}):
        tiles = {}
        for c in range(-(-len(k) // S)):
            pairs = [(a * S + S - 1 - step - asked.q_offset, c * S + step) for step in range(S)]
            pairs = [(i, key) for i, key in pairs if 0 <= i < len(q) and key < len(k) and within[i, key]]
            if pairs:
                tiles[c] = sum(float(q[i] @ k[key]) for i, key in pairs) * asked.scale / len(pairs)
        if tiles:
            top = max(tiles.values())
            total = sum(exp(score - top) for score in tiles.values())
            mine = [exp(score - top) for c, score in tiles.items() if c * S in block]
            shares.append(sum(mine) / total)
    return log(sum(shares) / len(shares)) if sum(shares) else -inf


def joined(each: list[dict[int, float]], asked: Asked) -> dict[int, float]:
    """What the heads of a table think together."""
    if len(each) == 1:
        return each[0]
    blocks = sorted({j for scores in each for j in scores})
    logs = asked.scorer in ("mass", "antidiagonal")
    if asked.choose[0] == "top_k" and not logs:
        return {j: sum(scores.get(j, 0.0) for scores in each) for j in blocks}
    weights = [
        softmax(scores) if asked.choose[0] in ("top_p", "threshold") else {j: exp(score) for j, score in scores.items()}
        for scores in each
    ]
    means = {j: sum(shares.get(j, 0.0) for shares in weights) / len(each) for j in blocks}
    return {j: log(mean) if mean else -inf for j, mean in means.items()}


def softmax(scores: dict[int, float]) -> dict[int, float]:
    top = max(scores.values(), default=0.0)
    if top == -inf:
        return dict.fromkeys(scores, 0.0)
    parts = {j: float(score == top) if top == inf else exp(score - top) for j, score in scores.items()}
    return {j: part / sum(parts.values()) for j, part in parts.items()}


def pick(scores: dict[int, float], asked: Asked) -> tuple[list[tuple[int, float]], bool]:
    """(the chosen with their scores, whether some had to be left out)."""
    kind, amount = asked.choose
    order = sorted(scores, key=lambda j: (-torch.tensor(scores[j]).float().item(), j))
    shares = {j: exp(score) for j, score in scores.items()} if kind == "top_p_of_row" else softmax(scores)
    if kind == "top_k":
        wanted = order[: asked.most]
    elif kind == "threshold":
        wanted = [j for j in order if shares[j] >= amount]
    else:
        # What is no candidate is read in any case, and counts where shares are of the whole row.
        wanted, reached = [], max(0.0, 1.0 - sum(shares.values())) if kind == "top_p_of_row" else 0.0
        for j in order:
            if amount == 1 or reached < amount:
                wanted.append(j)
            reached += shares[j]
    return [(j, scores[j]) for j in wanted[: asked.most]], len(wanted) > asked.most
