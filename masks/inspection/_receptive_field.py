"""Receptive field: number of tokens that a token reaches through the layers of a model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from ..core import Bound, Ranges, union_of
from ..needs import needed_keys
from ._pair_counts import drawn_tokens, groups_of, mean_of

# N tokens

_FEW_TOKENS = 256  # up to this number all tokens are followed
_SAMPLES = 8
_MOST_LAYERS = 64
# Searches for the keys of one range of queries in one group of heads, over all sampled tokens: about a second.
_MOST_SEARCHES = 1 << 9


@dataclass(frozen=True)
class ReceptiveField:
    """Number of tokens that each of the followed `tokens` reaches, by number of layers with one pattern.

    A token reaches itself, and with each layer all tokens that its keys in any head reach: heads are mixed between
    layers, and residual connections keep the tokens reached before. `reached`: for each of `tokens`, the number that it
    reaches after 1, 2, 3, ... layers, itself included, while this number grows. `finished`: for each of `tokens`, True
    if it will reach no more. Indices count from the first token.

    Up to 256 tokens are all followed, and all numbers are exact. Otherwise `tokens` is a sample: one drawn at random
    from each of 8 equal parts.
    """

    num_tokens: int
    tokens: tuple[int, ...]
    reached: tuple[tuple[int, ...], ...]
    finished: tuple[bool, ...]

    @property
    def exact(self) -> bool:
        """True if all tokens were followed until they reach no more."""
        return len(self.tokens) == self.num_tokens and all(self.finished)

    @property
    def layers_at_least(self) -> int:
        """Lower bound on the number of layers after which no token reaches more; equal to it if `exact`."""
        return max(map(len, self.reached))

    @property
    def growth(self) -> tuple[tuple[int, float, float], ...]:
        """(layers, mean number of tokens reached, standard error) by number of layers; unbiased, error 0 if exact."""
        found = []
        for layers in range(1, self.layers_at_least + 1):
            sizes = [[1, *sizes][: layers + 1][-1] for sizes in self.reached]
            found.append((layers, *mean_of(sizes, self.num_tokens)))
        return tuple(found)

    def to_data(self) -> dict[str, Any]:
        """All fields and derived numbers as plain data, for JSON."""
        growth = [
            {"layers": layers, "mean_reached": mean, "standard_error": error} for layers, mean, error in self.growth
        ]
        facts = {"exact": self.exact, "layers_at_least": self.layers_at_least}
        return {**asdict(self), **facts, "growth": growth}


def receptive_field_of(bound: Bound) -> ReceptiveField:
    """Receptive field of a bound pattern. Raises ValueError unless queries and keys have equal positions."""
    if not bound.is_self_attention:
        raise ValueError(
            "a receptive field needs queries and keys that are the same tokens; got "
            f"{bound.num_queries} queries from {bound.q_offset} on and {bound.num_keys} keys from {bound.k_offset} on"
        )
    return _of_all(bound) if bound.num_queries <= _FEW_TOKENS else follow_tokens(bound, _SAMPLES)


def _of_all(bound: Bound) -> ReceptiveField:
    """Receptive field of all tokens, by powers of the one-layer relation."""
    size = bound.num_queries
    known, reached = torch.eye(size, dtype=torch.float32), torch.zeros(0, size, dtype=torch.int64)
    step = _one_layer_of_all(bound).float()
    while not torch.equal(known, further := (known @ step > 0).float()):
        known, reached = further, torch.cat([reached, further.sum(1).long()[None]])
    sizes = [list(dict.fromkeys([1, *column]))[1:] for column in reached.T.tolist()]
    return ReceptiveField(size, tuple(range(size)), tuple(map(tuple, sizes)), (True,) * size)


def _one_layer_of_all(bound: Bound) -> Bool[Tensor, "N N"]:
    """True where a token (row) reaches another (column) in one layer."""
    mask_mod, token = bound.mask_mod(), torch.arange(bound.num_queries)
    found = torch.eye(len(token), dtype=torch.bool)
    for group in groups_of(bound):
        found |= mask_mod(torch.tensor(0), torch.tensor(group.heads[0]), token[:, None], token)
    return found


def follow_tokens(bound: Bound, number: int) -> ReceptiveField:
    """Follow `number` sampled tokens layer by layer, for at most about a second."""
    tokens = tuple(drawn_tokens(bound.num_queries, number))
    known: list[Ranges] = [(range(bound.q_offset + token, bound.q_offset + token + 1),) for token in tokens]
    reached: list[list[int]] = [[] for _ in tokens]
    growing, searches, rules = set(range(len(tokens))), 0, len(groups_of(bound))
    for _ in range(_MOST_LAYERS):
        searches += rules * sum(len(known[index]) for index in growing)
        if not growing or searches > _MOST_SEARCHES:
            break
        for index in sorted(growing):
            size, known[index] = sum(map(len, known[index])), _one_layer(bound, known[index])
            if sum(map(len, known[index])) == size:
                growing.remove(index)
            else:
                reached[index].append(sum(map(len, known[index])))
    finished = tuple(index not in growing for index in range(len(tokens)))
    return ReceptiveField(bound.num_queries, tokens, tuple(map(tuple, reached)), finished)


def _one_layer(bound: Bound, known: Ranges) -> Ranges:
    """Positions reached after one more layer."""
    keys = (range(bound.k_offset, bound.k_offset + bound.num_keys),)
    # One head for each group with equal rules.
    heads = [group.heads[0] + bound.head_offset for group in groups_of(bound)]
    seen = needed_keys(bound.pattern, queries=known, keys=keys, heads=heads, num_heads_global=bound.num_heads_global)
    return union_of([*known, *seen])
