"""Receptive field: number of tokens that influence a token through the layers of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Any

import torch

from ..attended import attended_keys, rules_of_heads
from ..core import Bound, Pattern, Ranges, union_of
from ._pair_counts import alike_heads

_FEW_TOKENS = 256  # up to this number all tokens are followed
_SAMPLES, _SEED = 8, 0
_MOST_LAYERS = 64
# Searches for the keys of one range of queries in one group of heads, over all sampled tokens: about a second.
_MOST_SEARCHES = 1 << 9
_MOST_LISTED = 1 << 23  # tokens up to which a bool for each of them is held
_MOST_ROWS = 1 << 16  # rows of tables that are read, over all sampled tokens: milliseconds


@dataclass(frozen=True)
class ReceptiveField:
    """Numbers of tokens that influence a token through 1, 2, ... layers of a pattern, for each of `tokens`.

    A token reaches the tokens that influence it: itself through 0 layers, and through n layers also all tokens that its
    keys, in any head, reach through n - 1 layers. Heads are mixed between layers, and there are residual connections.

    tokens: indices of the examined tokens.
    reached: for each of `tokens`, the numbers of tokens that it reaches through 1, 2, 3, ... layers, itself included;
        they end with the last number found that is larger than the one before, which is 1 for no layer. () if none is.
    finished: for each of `tokens`, True if further layers are known to reach no more tokens.

    In a `Description`, all of up to 256 tokens are examined and `finished`; of more tokens, `tokens` is a sample: one
    drawn at random from each of 8 equal parts.
    """

    num_tokens: int
    tokens: tuple[int, ...]
    reached: tuple[tuple[int, ...], ...]
    finished: tuple[bool, ...]

    @property
    def exact(self) -> bool:
        """True if all tokens were examined, each until its number of reached tokens grows no further."""
        return len(self.tokens) == self.num_tokens and all(self.finished)

    @property
    def layers_at_least(self) -> int:
        """Number of layers after which no token reaches more tokens, if `exact`; else a lower bound on it."""
        return max(map(len, self.reached))

    @property
    def growth(self) -> tuple[tuple[int, float, float], ...]:
        """(layers, mean number of tokens reached, standard error of the mean) for 1 to `layers_at_least` layers.

        The standard error is 0 if all tokens were examined, or only one.
        """
        found = []
        for layers in range(1, self.layers_at_least + 1):
            sizes = [[1, *sizes][: layers + 1][-1] for sizes in self.reached]
            sampled = 1 < len(sizes) < self.num_tokens
            found.append((layers, fmean(sizes), stdev(sizes) / sqrt(len(sizes)) if sampled else 0.0))
        return tuple(found)

    def to_data(self) -> dict[str, Any]:
        """Return all fields and derived numbers as a dict for JSON."""
        growth = [
            {"layers": layers, "mean_reached": mean, "standard_error": error} for layers, mean, error in self.growth
        ]
        facts = {"exact": self.exact, "layers_at_least": self.layers_at_least}
        return {**asdict(self), **facts, "growth": growth}


def receptive_field_of(bound: Bound) -> ReceptiveField:
    """Return the receptive field of a bound pattern. Raises ValueError unless queries and keys have equal positions."""
    if not bound.is_self_attention:
        raise ValueError(
            "a receptive field needs queries and keys that are the same tokens; got "
            f"{bound.num_queries} queries from {bound.q_offset} on and {bound.num_keys} keys from {bound.k_offset} on"
        )
    few = bound.num_queries <= _FEW_TOKENS
    return follow_tokens(bound, bound.num_queries if few else _SAMPLES, dense=few)


def follow_tokens(bound: Bound, number: int, *, dense: bool = False) -> ReceptiveField:
    """Return the receptive field of `number` randomly drawn tokens, or of all if there are no more than `number`.

    dense: True to multiply (tokens, tokens) matrices; False to read the rows of tables, or use ranges of positions.

    Layers are followed until no token reaches further tokens; unless `dense`, only up to 64 layers or a limit of work.
    """
    tokens = _examined_tokens(bound.num_queries, number)
    heads = [first + bound.head_offset for first, *_ in alike_heads(bound)]
    reached: list[list[int]] = [[1] for _ in tokens]
    growing = set(range(len(tokens)))
    layers = _reached_from_matrices(bound, tokens) if dense else _reached_from_lists_or_ranges(bound, tokens, heads)
    for sizes in layers:
        growing = {index for index in growing if sizes[index] > reached[index][-1]}
        for index in growing:
            reached[index].append(sizes[index])
        if not growing:
            break
    finished = tuple(index not in growing for index in range(len(tokens)))
    return ReceptiveField(bound.num_queries, tuple(tokens), tuple(tuple(each[1:]) for each in reached), finished)


def _reached_from_matrices(bound: Bound, tokens: Sequence[int]) -> Iterator[list[int]]:
    """Yield, for 1, 2, ... layers without end, the number of tokens that each of `tokens` reaches."""
    mask_mod, token = bound.mask_mod(), torch.arange(bound.num_queries)
    relation = torch.eye(len(token), dtype=torch.bool)
    for head, *_ in alike_heads(bound):
        relation |= mask_mod(torch.tensor(0), torch.tensor(head), token[:, None], token)
    known, step = torch.eye(len(token), dtype=torch.float32)[list(tokens)], relation.float()
    while True:
        known = (known @ step > 0).float()
        yield known.sum(1).long().tolist()


def _reached_from_lists_or_ranges(bound: Bound, tokens: Sequence[int], heads: Sequence[int]) -> Iterator[list[int]]:
    rules = rules_of_heads(bound.pattern, heads, bound.num_heads_global)
    nowhere = torch.zeros(1, dtype=torch.bool)
    if bound.num_queries > _MOST_LISTED or any(rule.keys_of(nowhere) is None for rule in rules):
        return _reached_from_ranges(bound, tokens, heads)
    return _reached_from_lists(bound, tokens, rules)


def _reached_from_lists(bound: Bound, tokens: Sequence[int], rules: Iterable[Pattern]) -> Iterator[list[int]]:
    """Yield, for 1, 2, ... layers, the number of tokens that each of `tokens` reaches, from lists of keys.

    rules: the distinct rules of single heads; `keys_of` of each must return keys, not None.

    Ends after 64 layers, or before the keys of more than 65,536 queries are read in all.
    """
    first, read = bound.q_offset, 0
    known = torch.zeros(len(tokens), first + bound.num_queries, dtype=torch.bool)
    known[torch.arange(len(tokens)), first + torch.tensor(tokens)] = True
    fresh = known.clone()  # tokens that the last layer reached first: rows of the others have been read
    for _ in range(_MOST_LAYERS):
        read += int(fresh.sum())
        if read > _MOST_ROWS:
            return
        for queries, reached in zip(fresh, known, strict=True):
            seen = torch.stack([keys for rule in rules if (keys := rule.keys_of(queries)) is not None]).any(0)
            seen[:first] = False
            torch.logical_and(seen, ~reached, out=queries)
            reached |= seen
        yield known.sum(1).tolist()


def _reached_from_ranges(bound: Bound, tokens: Sequence[int], heads: Sequence[int]) -> Iterator[list[int]]:
    """Yield, for 1, 2, ... layers, the number of tokens that each of `tokens` reaches, from ranges of positions.

    heads: one global head of each group of heads with equal rules.

    Ends after 64 layers, or before more than 512 searches in all, each for the keys of one range in one of `heads`.
    """
    keys = (range(bound.k_offset, bound.k_offset + bound.num_keys),)
    known: list[Ranges] = [(range(bound.q_offset + token, bound.q_offset + token + 1),) for token in tokens]
    growing, searches = set(range(len(tokens))), 0
    for _ in range(_MOST_LAYERS):
        searches += len(heads) * sum(len(known[index]) for index in growing)
        if searches > _MOST_SEARCHES:
            return
        for index in sorted(growing):
            own = {"queries": known[index], "keys": keys, "heads": heads, "num_heads_global": bound.num_heads_global}
            further = union_of([*known[index], *attended_keys(bound.pattern, **own)])
            if sum(map(len, further)) == sum(map(len, known[index])):
                growing.remove(index)
            known[index] = further
        yield [sum(map(len, each)) for each in known]


def _examined_tokens(size: int, most: int) -> list[int]:
    """Return the indices of all `size` tokens if there are at most `most`.

    Otherwise, return one index from each of `most` equal parts, drawn at random with a fixed seed.
    """
    if size <= most:
        return list(range(size))
    shares = torch.rand(most, generator=torch.Generator().manual_seed(_SEED), dtype=torch.float64)
    return ((torch.arange(most) + shares) * size / most).long().tolist()
