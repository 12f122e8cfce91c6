"""One attention call, its dense float64 definition, and texts of its numbers, keys and branches for reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from .._validate import check_score_mod, check_sinks, check_sizes, check_tensors, check_zero_keys, resolve_scale
from ..engines import ScoreMod, modified_scores, multiplicity, reference_attention, with_zero_keys
from ..masks import Bound, Mixture, Pattern
from ..masks.core import Extent, require_expression, shortened

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim


@dataclass(frozen=True, eq=False)
class Problem:
    """q (B, H, N, D), k and v (B, G, M, D), and the bound pattern, with one or more branches.

    `pattern` is the original pattern, with the zero keys of its padding; `bound` has none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bound: Bound
    pattern: Pattern | Mixture
    scale: float
    score_mod: ScoreMod | None = None
    sinks: Tensor | None = None

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pattern: Pattern | Mixture,
        *,
        scale: float | None = None,
        score_mod: ScoreMod | None = None,
        sinks: Tensor | None = None,
        bindings: Mapping[str, Tensor] | None = None,
        q_offset: int = 0,
        k_offset: int = 0,
        head_offset: int = 0,
        num_heads_global: int | None = None,
    ) -> Problem:
        """Problem of the arguments of `attend`; raises the errors of `attend`."""
        require_expression(pattern)
        check_tensors(q, k, v, enable_gqa=True)
        check_sinks(sinks, q)
        check_score_mod(score_mod)
        where = {"q_offset": q_offset, "k_offset": k_offset, "head_offset": head_offset}
        heads = check_sizes(pattern, q, **where, num_heads_global=num_heads_global)
        sizes = {"num_heads": q.shape[1], "num_queries": q.shape[2], "num_keys": k.shape[2], "batch": q.shape[0]}
        rule = pattern
        if pattern.varies:
            tensors = {**pattern.given_tensors(), **(bindings or {})}
            rule = pattern.resolve(tensors, Extent(q_offset + q.shape[2], k_offset + k.shape[2]))
        bound = rule.bind(**sizes, **where, num_heads_global=heads)
        check_zero_keys(pattern, score_mod, q.shape[2], k.shape[2], q_offset=q_offset, k_offset=k_offset)
        return cls(q, k, v, bound, pattern, resolve_scale(scale, q.shape[-1]), score_mod, sinks)

    def wide(self, *, requires_grad: bool = False) -> Problem:
        """Copy in float64, detached from the graph."""
        q, k, v = (x.detach().double().requires_grad_(requires_grad) for x in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v, sinks=None if self.sinks is None else self.sinks.detach().double())

    def attention(self) -> tuple[Tensor, Tensor]:
        """(out, lse) by the definition, differentiable."""
        options = {"scale": self.scale, "score_mod": self.score_mod, "sinks": self.sinks}
        out, lse = reference_attention(self.q, self.k, self.v, self.bound, **options)
        return with_zero_keys(out, lse, self.zero_keys()) if self.pattern.pads else (out, lse)

    def zero_keys(self) -> Tensor:
        """(H, N): number of zero keys of padding in each row."""
        bound, device = self.bound, self.q.device
        heads = torch.arange(bound.num_heads, device=device)[:, None] + bound.head_offset
        queries = torch.arange(bound.num_queries, device=device) + bound.q_offset
        return self.pattern.zero_keys(heads, queries, num_heads=bound.num_heads_global, num_tokens=bound.num_keys)

    def times(self) -> Tensor:
        """(B, H, N, M): number of branches that allow each pair."""
        return multiplicity(self.bound, self.q.device).expand(*self.q.shape[:3], self.k.shape[2])

    def for_query_heads(self, x: Tensor) -> Tensor:
        """k or v with one head for each query head: h reads h // (H / G)."""
        return x.repeat_interleave(self.q.shape[1] // x.shape[1], dim=1)

    def scores(self) -> Tensor:
        """(B, H, N, M): scores of all pairs, allowed or not."""
        scores = (self.q @ self.for_query_heads(self.k).mT) * self.scale
        return scores if self.score_mod is None else modified_scores(scores, self.score_mod, self.bound)


_RUNS = 8
_SHOWN = 200
_BRANCHES = 6


def number(x: Tensor | float) -> str:
    """Text with five digits."""
    return f"{x.detach().item() if isinstance(x, Tensor) else x:.5g}"


def rough(x: Tensor) -> str:
    """Text with two digits, for an error."""
    return f"{x.detach().item():.2g}"


def tokens(length: int) -> str:
    """Number of tokens as text."""
    return "1 token" if length == 1 else f"{length} tokens"


def num_lengths(lengths: Sequence[int]) -> str:
    """Number of lengths as text."""
    return "1 length" if len(lengths) == 1 else f"{len(lengths)} lengths"


def runs(positions: Sequence[int]) -> str:
    """Ascending positions as runs: "0 to 3, 7"; "none" without any."""
    if not positions:
        return "none"
    starts = [0, *(index + 1 for index, (a, b) in enumerate(pairwise(positions)) if b != a + 1), len(positions)]
    written = [
        str(positions[start]) if stop - start == 1 else f"{positions[start]} to {positions[stop - 1]}"
        for start, stop in pairwise(starts)
    ]
    return ", ".join(written[:_RUNS]) + (f" and {len(written) - _RUNS} runs more" if len(written) > _RUNS else "")


def branch_lines(problem: Problem, b: int, h: int, q: int) -> list[str]:
    """Lines with the keys that each branch allows for this row."""
    branches = problem.bound.pattern.branches()
    lines = []
    for index, branch in enumerate(branches[:_BRANCHES]):
        bound = replace(problem.bound, pattern=branch)
        allowed = multiplicity(bound, problem.q.device).expand(problem.q.shape[0], -1, -1, -1)[b, h, q]
        label = "keys" if len(branches) == 1 else f"branch {index}"
        lines.append(f"{label:<9} {runs(allowed.nonzero().flatten().tolist())}: {shortened(repr(branch), _SHOWN)}")
    if len(branches) > _BRANCHES:
        lines.append(f"          and {len(branches) - _BRANCHES} branches more")
    return lines
