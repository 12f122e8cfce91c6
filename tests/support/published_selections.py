"""Published rules of data-following attention in loops, in float64: what the recipes are compared with.

Nothing here is taken from the library. Tensors are those of one batch entry; position of query i is offset + i.
"""

from itertools import product
from math import cos, exp, inf, log, sin

import torch
from torch import Tensor

# H query heads, G key/value heads, N queries, M keys, D head dim, C blocks of keys


def grouped(x: Tensor, heads: int) -> Tensor:
    """The key/value head of each query head."""
    return torch.stack([x[h * len(x) // heads] for h in range(heads)])


def spans(number: int, block: int) -> list[range]:
    return [range(at, min(at + block, number)) for at in range(0, number, block)]


def best(scores: list[float], number: int) -> set[int]:
    """Places of the highest scores above -inf; of equal ones the first."""
    order = sorted(range(len(scores)), key=lambda j: (-scores[j], j))
    return {j for j in order[:number] if scores[j] > -inf}


def read_of(blocks: set[int], t: int, M: int, block: int) -> Tensor:
    """Which keys a query at t reads: those up to t of these blocks."""
    return torch.tensor([s <= t and s // block in blocks for s in range(M)])


def moba(q: Tensor, k: Tensor, *, block: int, top: int, offset: int = 0) -> Tensor:
    """(H, N, M): top-k over all blocks, the own at +inf and later ones at -inf, then causal."""
    k = grouped(k, len(q))
    pairs = torch.zeros(len(q), q.shape[1], k.shape[1], dtype=torch.bool)
    for h in range(len(q)):
        means = [k[h, list(span)].mean(0) for span in spans(k.shape[1], block)]
        for i in range(q.shape[1]):
            t = offset + i
            scores = [float(q[h, i] @ mean) if j < t // block else -inf for j, mean in enumerate(means)]
            if t // block < len(scores):
                scores[t // block] = inf
            pairs[h, i] = read_of(best(scores, top), t, k.shape[1], block)
    return pairs


def quest(q: Tensor, k: Tensor, *, block: int, budget: int) -> Tensor:
    """(H, M): what one query after all keys but its own reads; pages by their upper bound, the last one in any case."""
    k = grouped(k, len(q))
    M = k.shape[1]
    pairs = torch.zeros(len(q), M, dtype=torch.bool)
    for h in range(len(q)):
        pages = spans(M, block)
        bounds = []
        for page in pages[:-1]:
            bound = 0.0
            for d in range(q.shape[-1]):
                channel = [float(k[h, s, d]) for s in page]
                bound += max(float(q[h, d]) * min(channel), float(q[h, d]) * max(channel))
            bounds.append(bound)
        pairs[h] = read_of(best(bounds, budget // block - 1) | {len(pages) - 1}, M - 1, M, block)
    return pairs


def xattention(q: Tensor, k: Tensor, *, block: int, stride: int, threshold: float) -> Tensor:
    """(H, N, M): shares of tiles by their antidiagonals; first and own block, then the largest, until the threshold."""
    k = grouped(k, len(q))
    H, N, D = q.shape
    pairs = torch.zeros(H, N, N, dtype=torch.bool)
    for h in range(H):
        for own, rows in enumerate(spans(N, block)):
            mass = [0.0] * (own + 1)
            lines = spans(len(rows), stride)
            for line in lines:
                a = (rows.start + line.start) // stride
                tiles = {}
                for c in range(a + 1):
                    met = [(a * stride + stride - 1 - s, c * stride + s) for s in range(stride)]
                    met = [(t, s) for t, s in met if s <= t < N]
                    if met:
                        tiles[c] = sum(float(q[h, t] @ k[h, s]) for t, s in met) / len(met) / D**0.5
                total = sum(exp(score) for score in tiles.values())
                for c, score in tiles.items():
                    mass[c * stride // block] += exp(score) / total / len(lines)
            chosen = {0, own}
            for j in sorted(range(own + 1), key=lambda j: -mass[j]):
                if sum(mass[i] for i in chosen) < threshold * sum(mass):
                    chosen.add(j)
            for t in rows:
                pairs[h, t] = read_of(chosen, t, N, block)
    return pairs


def rotated(x: Tensor, position: int, base: float) -> Tensor:
    """One vector under rotary embedding, channels i and i + half as a pair."""
    half = len(x) // 2
    turned = torch.empty_like(x)
    for i in range(half):
        angle = position * base ** (-i / half)
        turned[i] = x[i] * cos(angle) - x[half + i] * sin(angle)
        turned[half + i] = x[half + i] * cos(angle) + x[i] * sin(angle)
    return turned


@torch.no_grad()
def seer_scores(
    q: Tensor, k: Tensor, wq: Tensor, wk: Tensor, *, block: int, rows: int, base: float, group: bool, offset: int = 0
) -> Tensor:
    """(H or G, R, C): the gate's scores; rows of `rows` queries are pooled, blocks of keys are pooled three ways."""
    heads, keys = len(q), []
    for g in range(len(k)):
        pools = [
            torch.cat([x.amax(0), x.amin(0), x.mean(0)]) for x in (k[g, list(s)] for s in spans(k.shape[1], block))
        ]
        keys.append([rotated(pool @ wk[g], j * block, base) for j, pool in enumerate(pools)])
    found = []
    for h in range(heads):
        looks = [q[h, list(span)].mean(0) @ wq[h] for span in spans(q.shape[1], rows)]
        found.append([rotated(look, offset + r * rows, base) for r, look in enumerate(looks)])
    per = heads // len(k)
    scores = [[[x @ y / len(x) ** 0.5 for y in keys[h // per]] for x in found[h]] for h in range(heads)]
    each = torch.tensor([[[float(x) for x in row] for row in head] for head in scores], dtype=torch.float64)
    return each.unflatten(0, (len(k), per)).sum(1) if group else each


def nsa(q: Tensor, k: Tensor, v: Tensor, layer, gates: Tensor, *, offset: int = 0) -> tuple[Tensor, list]:
    """(out (H, N, D), blocks chosen by group and query): three softmaxes under gates (3, H, N), with autograd.

    k, v: (3, G, M, D). layer: what has sizes and the parameters of the compression.
    """
    (H, N, D), (_, G, M, _) = q.shape, k.shape
    length, d, side = layer.length, layer.stride, layer.block

    def compress(x: Tensor, phi) -> list[Tensor]:
        first, _, second = phi.mlp
        found = []
        for i in range(0, M - length + 1, d):
            wide = torch.cat([x[i + s] + phi.places[s] for s in range(length)])
            found.append(torch.nn.functional.gelu(wide @ first.weight.T + first.bias) @ second.weight.T + second.bias)
        return found

    def softmax(query: Tensor, keys: list[Tensor]) -> Tensor:
        return (torch.stack(keys) @ query / D**0.5).softmax(0)

    out, chosen = [[torch.zeros(D, dtype=q.dtype)] * N for _ in range(H)], [[set() for _ in range(N)] for _ in range(G)]
    for g in range(G):
        heads = [h for h in range(H) if h * G // H == g]
        small_k, small_v = compress(k[0, g], layer.compress_keys), compress(v[0, g], layer.compress_values)
        for n in range(N):
            t = offset + n
            windows = [i for i in range(len(small_k)) if t >= i * d + length - 1]
            worth = [0.0] * (t // side + 1)
            for h in heads:
                if windows:
                    shares = softmax(q[h, n], [small_k[i] for i in windows])
                    out[h][n] = out[h][n] + gates[0, h, n] * shares @ torch.stack([small_v[i] for i in windows])
                    p = dict(zip((i + 1 for i in windows), shares.tolist(), strict=True))  # counted from 1
                    for j in range(1, len(worth) + 1):
                        worth[j - 1] += sum(
                            p.get(side // d * j - m - n_, 0.0) for m in range(side // d) for n_ in range(length // d)
                        )
            own = t // side
            for j in range(own + 1):
                if j < layer.first or j > own - layer.local:
                    worth[j] = inf
            chosen[g][n] = best(worth, layer.top)
            for h in heads:
                for branch, seen in (
                    (1, [s for s in range(min(M, t + 1)) if s // side in chosen[g][n]]),
                    (2, list(range(max(0, t - layer.window + 1), min(M, t + 1)))),
                ):
                    if seen:
                        shares = softmax(q[h, n], [k[branch, g, s] for s in seen])
                        out[h][n] = out[h][n] + gates[branch, h, n] * shares @ v[branch, g, seen]
    return torch.stack([torch.stack(rows) for rows in out]), chosen


def coarse_to_fine(q: Tensor, k: Tensor, v: Tensor, *, block: int, top: int, causal: bool, offset: int = 0) -> Tensor:
    """(H, N, D), with autograd: one softmax over single keys and, for other blocks, as many keys at their mean."""
    H, N, D = q.shape
    k, v = grouped(k, H), grouped(v, H)
    M = k.shape[1]
    whole = [span for span in spans(M, block) if len(span) == block]
    out = []
    for h in range(H):
        means = [(k[h, list(span)].mean(0), v[h, list(span)].mean(0)) for span in whole]
        for n in range(N):
            t = offset + n if causal else 10 * M
            past = [j for j in range(len(whole)) if j < t // block]
            chosen = best(
                [float((q[h, n] @ means[j][0]).detach()) if j in past else -inf for j in range(len(whole))], top
            )
            seen = [s for s in range(M) if s <= t and (s // block in chosen or s // block not in past)]
            scores = [q[h, n] @ k[h, s] / D**0.5 for s in seen]
            scores += [q[h, n] @ means[j][0] / D**0.5 + log(block) for j in past if j not in chosen]
            values = [v[h, s] for s in seen] + [means[j][1] for j in past if j not in chosen]
            weights = torch.stack(scores).softmax(0) if scores else None
            out.append(torch.zeros(D, dtype=q.dtype) if weights is None else weights @ torch.stack(values))
    return torch.stack(out).view(H, N, D)


def vsa(
    q: Tensor, k: Tensor, v: Tensor, *, grid: tuple[int, ...], cube: tuple[int, ...], top: int
) -> tuple[Tensor, Tensor]:
    """VSA's two outputs (H, N, D) for one batch entry, cube by cube."""
    k, v = grouped(k, len(q)), grouped(v, len(q))
    tokens = list(product(*map(range, grid)))
    cubes: dict[tuple[int, ...], list[int]] = {}
    for token, where in enumerate(tokens):
        cubes.setdefault(tuple(x // size for x, size in zip(where, cube, strict=True)), []).append(token)
    members = list(cubes.values())
    means = [torch.stack([x[:, each].mean(1) for each in members], 1) for x in (q, k, v)]
    scores = means[0] @ means[1].mT * q.shape[-1] ** -0.5
    coarse, fine = torch.zeros_like(q), torch.zeros_like(q)
    for head in range(len(q)):
        for row, own in enumerate(members):
            best = scores[head, row].topk(min(top, len(members))).indices.tolist()
            read = [token for each in best for token in members[each]]
            coarse[head, own] = scores[head, row].softmax(-1) @ means[2][head]
            pairs = q[head, own] @ k[head, read].mT * q.shape[-1] ** -0.5
            fine[head, own] = pairs.softmax(-1) @ v[head, read]
    return coarse, fine
