"""The backward of a ring on one device: a rank's queries meet the shards in turn, as these would come to it.

What a ring computes on an accelerator: for each shard the forward again, and the gradients of its output and lse, which
are those of the whole rows times the shard's weight in them. What it sends is left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

import flexdilated as fd
from flexdilated.engines._placed_call import WholeRows

from .._longnets import LongNet
from .._problem import Attention, Problem
from .._timing import Job

# H heads, N tokens of all ranks, L of a shard, D head dim; the batch is 1

Whole = Float[Tensor, "1 H N D"]


@dataclass(frozen=True)
class RingRank:
    """A rank's queries, and the shards that they need keys of, its own first."""

    spec: LongNet
    queries: range
    shards: tuple[range, ...]

    def whole(self, out: Whole, lse: Tensor, grad: Whole) -> WholeRows:
        """This rank's rows over all keys."""
        mine = slice(self.queries.start, self.queries.stop)
        own_out, own_lse, own_grad = (x[:, :, mine].contiguous() for x in (out, lse, grad))
        return WholeRows(own_out, own_lse, own_grad, None)

    def gradients(self, q: Whole, k: Whole, v: Whole, rows: WholeRows) -> list[tuple[slice, Tensor]]:
        """The shares of dq, and of dk and dv of each shard, with the tokens that they belong to; dq is summed up."""
        mine = slice(self.queries.start, self.queries.stop)
        queries, total = q[:, :, mine].contiguous(), None
        found = []
        for shard in self.shards:
            there = slice(shard.start, shard.stop)
            with torch.enable_grad():
                parts = (queries, k[:, :, there], v[:, :, there])
                leaf_q, leaf_k, leaf_v = (x.detach().requires_grad_() for x in parts)
                out, lse = self._attend(leaf_q, leaf_k, leaf_v, shard)
            weighted = rows.gradients_of(out.detach(), lse.detach())
            dq, dk, dv = torch.autograd.grad((out, lse), (leaf_q, leaf_k, leaf_v), weighted)
            total = dq.float() if total is None else total.add_(dq)
            found.append((there, torch.stack((dk, dv))))
        assert total is not None
        return [(mine, total), *found]

    def job(self, name: str, problem: Problem, forward: Callable[[], tuple[Whole, Tensor]]) -> Job:
        """This rank's share of one backward; the clock runs when `forward` has given out and lse of all rows."""
        q, k, v = problem.q, problem.k, problem.v
        return Job(name, lambda rows: self.gradients(q, k, v, rows), lambda: self.whole(*forward(), problem.grad))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, shard: range) -> tuple[Tensor, Tensor]:
        """Positions are counted as in a rank's own call: ranks that lie alike share what is compiled."""
        period = lcm(*self.spec.segment_lengths)
        start = min(self.queries.start, shard.start) // period * period
        q_offset, k_offset = self.queries.start - start, shard.start - start
        return fd.attend(q, k, v, self.spec.pattern(), return_lse=True, q_offset=q_offset, k_offset=k_offset)


def ring_ranks(spec: LongNet, shards: Sequence[tuple[range, range]]) -> tuple[RingRank, ...]:
    """From each rank's queries and the stretch of keys that these reach."""
    held = [queries for queries, _ in shards]
    found = []
    for queries, keys in shards:
        others = [shard for shard in held if shard != queries and shard.start < keys.stop and keys.start < shard.stop]
        found.append(RingRank(spec, queries, (queries, *others)))
    return tuple(found)


def as_attention(spec: LongNet, ranks: Sequence[RingRank]) -> Attention:
    """One call forward, and all ranks' backward: what is checked."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = _Ring.apply(q, k, v, spec, ranks)
        assert isinstance(out, Tensor)
        return out

    return attend


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, spec: LongNet, ranks: Sequence[RingRank]) -> Tensor:
        out, lse = fd.attend(q, k, v, spec.pattern(), return_lse=True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ranks = ranks
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dkv = torch.zeros_like(q, dtype=torch.float32), torch.zeros(2, *k.shape, device=k.device)
        for rank in ctx.ranks:
            (mine, own), *shares = rank.gradients(q, k, v, rank.whole(out, lse, grads[0]))
            dq[:, :, mine] += own
            for there, share in shares:
                dkv[:, :, :, there] += share
        return dq.to(q.dtype), *dkv.to(k.dtype).unbind(0), None, None
