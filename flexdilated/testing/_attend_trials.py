"""Does `attend` compute a pattern? Drawn sizes and values against the definition in float64, then a smaller failure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .._attend import attend
from ..masks import Mixture, Pattern
from ._closeness import assert_attention_close
from ._inputs import KINDS, lengths_for, shrunk, takes, values
from ._problem import tokens

_HEAD_DIMS = (1, 3, 8, 16)


@dataclass(frozen=True)
class Trial:
    """One call: H query heads on G key/value heads, and whether queries are the last few of the tokens only."""

    num_heads: int
    num_kv_heads: int
    num_tokens: int
    num_queries: int
    head_dim: int
    batch: int
    kind: str
    seed: int

    def smaller(self) -> Iterator[Trial]:
        """The same with fewer tokens, one batch entry, all queries, ordinary values."""
        for length in range(1, self.num_tokens):
            yield replace(self, num_tokens=length, num_queries=min(length, self.num_queries))
        if self.batch > 1:
            yield replace(self, batch=1)
        if self.num_queries < self.num_tokens:
            yield replace(self, num_queries=self.num_tokens)
        if self.kind != KINDS[0]:
            yield replace(self, kind=KINDS[0])

    def __str__(self) -> str:
        last = "" if self.num_queries == self.num_tokens else f", the last {self.num_queries} of them queries"
        sizes = f"batch {self.batch}, {self.num_heads} heads on {self.num_kv_heads}, head dim {self.head_dim}"
        return f"{tokens(self.num_tokens)}{last}, {sizes}, {self.kind}, seed {self.seed}"


def attend_trials(
    pattern: Pattern | Mixture, *, num_heads: int, max_tokens: int, examples: int, seed: int
) -> Iterator[Trial]:
    """Trials whose lengths lie around multiples of the pattern's own numbers."""
    lengths = lengths_for(pattern, num_heads, max_tokens=max_tokens, examples=max_tokens)
    groups = [number for number in range(1, num_heads + 1) if num_heads % number == 0]
    generator = torch.Generator("cpu").manual_seed(seed)

    def one_of(choices):
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    for index in range(examples):
        length = one_of(lengths)
        queries = one_of(range(1, length + 1)) if one_of(range(4)) == 3 else length
        sizes = (num_heads, one_of(groups), length, queries, one_of(_HEAD_DIMS), one_of((1, 2)))
        yield Trial(*sizes, one_of((KINDS[0], *KINDS)), seed + index)


def run_trial(pattern: Pattern | Mixture, trial: Trial) -> None:
    """AssertionError, with the smallest trial that fails too, where output, lse or a gradient is wrong."""

    def fails(trial: Trial) -> bool:
        return takes(pattern, trial.num_heads, trial.num_tokens) and _error(pattern, trial) is not None

    if fails(trial):
        smallest = shrunk(trial, Trial.smaller, fails)
        raise AssertionError(f"{pattern!r}: attend must be the definition; for {smallest}: {_error(pattern, smallest)}")


def _error(pattern: Pattern | Mixture, trial: Trial) -> str | None:
    q, k, v = _tensors(trial)
    first = trial.num_tokens - trial.num_queries
    out, lse = attend(q, k, v, pattern, enable_gqa=True, q_offset=first, return_lse=True)
    try:
        assert_attention_close(out, q, k, v, pattern, lse=lse, gradients=True, q_offset=first)
    except AssertionError as error:
        return str(error)
    return None


def _tensors(trial: Trial) -> tuple[Tensor, Tensor, Tensor]:
    heads = (trial.num_heads, trial.num_kv_heads)
    q, k, v = values(trial.kind, *heads, trial.num_tokens, trial.head_dim, batch=trial.batch, seed=trial.seed)
    q = q[:, :, trial.num_tokens - trial.num_queries :]
    q, k, v = (x.float().contiguous().requires_grad_() for x in (q, k, v))
    return q, k, v
