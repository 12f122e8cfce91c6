"""The module under examination: made, called, and fed with cases of rising length."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..masks import Mixture, Pattern
from ._module_calls import Calls
from ._problem import Problem
from ._tried_values import KINDS, values

# B batch, H query heads, G key/value heads, N tokens, D head dim


class Failure(Exception):
    """A check failed; the message is the detail."""


class DoesNotApply(Exception):
    """There is nothing for this check to see; the message says why."""


@dataclass(frozen=True)
class Subject:
    """What makes a module, what it claims to compute, and the sizes at which that is looked at."""

    factory: Callable[[], Any]
    pattern: Pattern | Mixture
    calls: Calls
    num_heads: int
    num_kv_heads: int
    head_dim: int
    lengths: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    seed: int

    def module(self) -> Any:
        """A new one, in the dtype and on the device of the checks if it is an `nn.Module`."""
        module = self.factory()
        if not callable(module):
            raise TypeError(f"factory must return something to call; got {type(module).__name__}")
        return module.to(device=self.device, dtype=self.dtype) if isinstance(module, nn.Module) else module

    def alike(self, module: Any) -> Any:
        """A copy that was never called."""
        try:
            return copy.deepcopy(module)
        except Exception as error:  # whatever holds what cannot be copied raises
            raise DoesNotApply(f"the module cannot be copied: {type(error).__name__}: {error}") from error

    def inputs(self, num_tokens: int, kind: str = KINDS[0], *, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of this kind, the same for the same arguments."""
        heads, seed = (self.num_heads, self.num_kv_heads), self.seed + 1_000 * num_tokens + KINDS.index(kind)
        drawn = values(kind, *heads, num_tokens, self.head_dim, batch=batch, seed=seed)
        q, k, v = (x.to(self.dtype).to(self.device) for x in drawn)
        return q, k, v

    def problem(self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | Mixture | None = None) -> Problem:
        """What the module claims to compute of these."""
        return Problem.of(q, k, v, self.pattern if pattern is None else pattern)

    def run(self, module: Any, q: Tensor, k: Tensor, v: Tensor, *more: Tensor, call: str = "plain"):
        """(out (B, H, N, D), lse (B, H, N) or None) of one of the calls."""
        calls = self.calls
        function = getattr(calls, call)
        given = calls.into_layout(q)
        result = function(module, given, *(calls.into_layout(x) for x in (k, v)), *more)
        first, *others = result if isinstance(result, tuple | list) and result else (result,)
        out = _compared(first, given)
        lse = next((x for x in others if isinstance(x, Tensor) and x.shape == q.shape[:3]), None)
        # With as many tokens as heads it may be weights, averaged over heads: (B, N, N).
        taken = calls.layout != "BNE" and q.shape[1] != q.shape[2]
        return calls.out_of_layout(out, self.num_heads), lse if taken else None

    def cases(self) -> Iterator[tuple[int, str]]:
        """(length, kind of values), in the order of length; all kinds where there is one length only."""
        others = KINDS[1:]
        for index, length in enumerate(self.lengths):
            yield length, KINDS[0]
            for kind in others if len(self.lengths) == 1 else (others[index % len(others)],):
                yield length, kind

    def in_dtype(self, dtype: torch.dtype) -> Subject:
        return replace(self, dtype=dtype)

    def table(self, num_tokens: int) -> Tensor:
        """(H, N, N): how often each pair is allowed; the first batch entry's."""
        return self.problem(*self.inputs(num_tokens, batch=1)).times()[0]

    @property
    def spread(self) -> tuple[int, ...]:
        """A few of the lengths: of the shortest, the longest, and some between."""
        step = max(1, len(self.lengths) // 4)
        return tuple(dict.fromkeys((*self.lengths[1::step][:4], self.lengths[-1])))


def _compared(out: object, q: Tensor) -> Tensor:
    """The output, if it can be compared, else Failure; q in the module's layout."""
    if not isinstance(out, Tensor):
        raise Failure(f"the output must be a tensor; got {type(out).__name__}")
    if out.shape != q.shape:
        raise Failure(f"the output must have the shape of q, {tuple(q.shape)}; got {tuple(out.shape)}")
    if not out.dtype.is_floating_point:
        raise Failure(f"the output must be of floating point numbers; got {out.dtype}")
    if out.device != q.device:
        raise Failure(f"the output must be on the device of q, {q.device}; got {out.device}")
    return out
