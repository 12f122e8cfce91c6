"""Dense attention written in full, and the same with one mistake each: those that real libraries made.

Each takes q (B, H, N, D), k and v (B, G, N, D). `Dense(rule)` is right; a rule is that of `tests.support.oracle`.
"""

import functools
import time
from typing import Any

import torch
from torch import Tensor, nn

import flexdilated as fd
from flexdilated import masks
from tests.support import oracle


class Dense(nn.Module):
    """Right: one softmax over the multiset of allowed pairs."""

    def __init__(self, *rules: oracle.Rule) -> None:
        super().__init__()
        self.rules = rules

    def branch_times(self, q: Tensor, k: Tensor) -> list[Tensor]:
        """(H, N, M) for each branch."""
        heads, queries, keys = range(q.shape[1]), torch.arange(q.shape[2]), torch.arange(k.shape[2])
        return [oracle.counts(rule, heads, len(heads), queries, keys) for rule in self.rules]

    def times(self, q: Tensor, k: Tensor) -> Tensor:
        return sum(self.branch_times(q, k), torch.zeros((), dtype=torch.int64))

    def expand(self, x: Tensor, num_heads: int) -> Tensor:
        return x.repeat_interleave(num_heads // x.shape[1], dim=1)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * q.shape[-1] ** -0.5

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (self.expand(x, q.shape[1]) for x in (k, v))
        return self.weights(self.scores(q, k), self.times(q, k)) @ v

    def weights(self, scores: Tensor, times: Tensor) -> Tensor:
        logits = scores + times.clamp(min=1).to(scores.dtype).log()
        logits = logits.masked_fill(times == 0, -torch.inf)
        weights = (logits - logits.detach().amax(-1, keepdim=True).nan_to_num(neginf=0.0)).exp()
        total = weights.sum(-1, keepdim=True)
        return weights / total.masked_fill(total == 0, 1.0)


class SoftmaxOverHeads(Dense):
    """The head dim where the keys should be (darcstar's "improved" classes)."""

    def weights(self, scores, times):
        return scores.masked_fill(times == 0, -torch.inf).softmax(1).nan_to_num(0.0)


class CausalLeak(Dense):
    """The mask ends one key late."""

    def times(self, q, k):
        times = super().times(q, k)
        return times | torch.eye(times.shape[-1], dtype=times.dtype).roll(1, 1).triu(1)


class DividedByAll(Dense):
    """Divides by the sum over all positions and heads (fkodom)."""

    def forward(self, q, k, v):
        out = super().forward(q, k, v)
        return out / out.sum((1, 2), keepdim=True)


class ZeroPadding(Dense):
    """Zeros that fill the sequence up to a multiple of 4 take part in the softmax (torchscale)."""

    def forward(self, q, k, v):
        k, v = (self.expand(x, q.shape[1]) for x in (k, v))
        extra = -k.shape[2] % 4
        times = torch.nn.functional.pad(self.times(q, k), (0, extra), value=1)
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, extra)) for x in (k, v))
        return self.weights(self.scores(q, k), times) @ v


class DetachedMerge(Dense):
    """The weights by which branches are merged carry no gradient (torchscale)."""

    def forward(self, q, k, v):
        parts, sums = [], []
        k, v = (self.expand(x, q.shape[1]) for x in (k, v))
        scores = self.scores(q, k)
        for times in self.branch_times(q, k):
            parts.append(self.weights(scores, times) @ v)
            sums.append(scores.masked_fill(times == 0, -torch.inf).logsumexp(-1))
        shares = torch.stack(sums).softmax(0).nan_to_num(0.0).detach()
        return (shares[..., None] * torch.stack(parts)).sum(0)


class OtherShards(Dense):
    """Sequence parallelism in which a rank attends to the shards before its own, and not to its own (torchscale)."""

    def times(self, q, k):
        first = torch.arange(q.shape[2]) < -(-q.shape[2] // 2)  # of two ranks
        return super().times(q, k) * (first != first[:, None])


class NaNOnEmptyRows(Dense):
    """A row of -inf through softmax."""

    def weights(self, scores, times):
        return (scores + times.to(scores.dtype).log()).softmax(-1)


class StaleMask(Dense):
    """Keeps the mask of its longest call, and cuts the last rows and columns out of it for a shorter one."""

    kept: Tensor | None = None

    def times(self, q, k):
        n = q.shape[2]
        if self.kept is None or self.kept.shape[-1] < n:
            self.kept = super().times(q, k)
        return self.kept[:, -n:, -n:]


class MixedBatch(Dense):
    """Values are centred over the batch."""

    def forward(self, q, k, v):
        return super().forward(q, k, v - v.mean(0))


class InPlace(Dense):
    """Scales its argument."""

    def forward(self, q, k, v):
        return super().forward(q.mul_(2.0), k, v / 2) if q.is_leaf and not q.requires_grad else super().forward(q, k, v)


class WideHalf(Dense):
    """Computes in float32, and does not come back."""

    def forward(self, q, k, v):
        return super().forward(q.float(), k.float(), v.float())


class WideSums(Dense):
    """Right: weights and sums in float32, and the output in the dtype that came in."""

    def forward(self, q, k, v):
        k, v = (self.expand(x, q.shape[1]) for x in (k, v))
        scores = self.scores(q.float(), k.float()).masked_fill(self.times(q, k) == 0, -torch.inf)
        return self.summed(scores, v.float(), q.dtype).to(q.dtype)

    def summed(self, scores, v, dtype):
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return weights @ v / self.denominator(weights, dtype)[..., None]

    def denominator(self, weights, dtype):
        return weights.sum(-1)


class HalfDenominators(WideSums):
    """The denominator is summed in the dtype that came in."""

    def denominator(self, weights, dtype):
        return functools.reduce(lambda total, part: (total + part).to(dtype), weights.unbind(-1)).float()


class GrowingState(Dense):
    """Registers its mask as a buffer when it is first called."""

    def times(self, q, k):
        times = super().times(q, k)
        self.register_buffer("mask", times)
        return times


class BreaksGraphs(Dense):
    """Asks a tensor for its value."""

    def forward(self, q, k, v):
        return super().forward(q, k, v) if float(q.detach().sum()) != 1e9 else v


class GraphEachLength(Dense):
    """Keeps a mask for each length in a dict that tracing looks into."""

    def __init__(self, *rules):
        super().__init__(*rules)
        self.seen: dict[int, int] = {}

    def forward(self, q, k, v):
        n = q.shape[2]
        self.seen[n] = self.seen.get(n, 0)
        ones = torch.ones(n, n, dtype=torch.bool)
        return self.weights(self.scores(q, k), ones.tril().long()) @ v


# What two processes are given, which import it: modules over ranks.


def over_ranks(mesh: Any) -> nn.Module:
    """Right for a window of three keys."""
    return fd.BlockSparseAttention(masks.local_window(left=2, right=0), mesh=mesh, enable_gqa=True)


def without_ranks(mesh: Any) -> nn.Module:
    """Each rank sees its own tokens alone."""
    return fd.BlockSparseAttention(masks.local_window(left=2, right=0), enable_gqa=True)


class WithoutGradients(nn.Module):
    """Keys get no gradient."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.inner = over_ranks(mesh)

    def forward(self, q, k, v):
        return self.inner(q, k.detach(), v)


def raises_on_a_rank(mesh: Any) -> nn.Module:
    if mesh.get_rank() == 1:
        raise ZeroDivisionError("by this rank\nand no other")
    time.sleep(3600)
    return over_ranks(mesh)
