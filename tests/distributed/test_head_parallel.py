"""Head parallelism: many ranks, each with some heads of the whole sequence, are one rank."""

import os
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.distributed import Sharding, traffic
from flexdilated.distributed.group._ranks import Ranks
from flexdilated.distributed.heads._heads import HeadSplit, attend_heads
from flexdilated.testing import MEMORY_LAYOUTS, laid_out
from tests.support.agreement import TIGHT
from tests.support.rank_worker import set_group_timeout
from tests.support.ranks import on_ranks, outcomes_on_ranks

D = 4
LONGNET = masks.longnet([8, 16, 40], [1, 2, 4])
PATTERNS = {
    "mixture": LONGNET & masks.causal(),
    "not causal": LONGNET,
    "grouped": masks.longnet([8, 16], [1, 3], heads="grouped"),
    "set": masks.local_window(left=5, right=0) | masks.global_tokens(2),
    "wide": masks.local_window(left=150, right=0),
    "nothing": masks.local_window(left=0, right=0) & ~masks.every(),
}


@dataclass(frozen=True)
class Problem:
    """One call: sizes, pattern by name, and who holds which tokens."""

    sharding: Sharding
    num_heads: int
    num_kv_heads: int
    pattern: str = "mixture"
    sinks: bool = False
    dtype: torch.dtype = torch.float64
    rounded: bool = False
    engine: str | None = None
    layouts: tuple[str, ...] = (MEMORY_LAYOUTS[0],) * 4  # in memory, of q, k, v and the gradient of out on each rank

    def tensors(self) -> list[Tensor]:
        """q, k, v of the whole sequence, maybe sinks; the same on every rank."""
        generator = torch.Generator().manual_seed(0)
        N, heads = self.sharding.num_tokens, (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        shapes = [(2, H, N, D) for H in heads] + [(self.num_heads,)] * self.sinks
        found = [self._as_asked(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]
        return [*map(laid_out, found[:3], self.layouts), *found[3:]]

    def _as_asked(self, x: Tensor) -> Tensor:
        """In the problem's dtype, maybe of numbers that bfloat16 can hold."""
        return (x.bfloat16() if self.rounded else x).to(self.dtype)

    def cotangents(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        shape = (2, self.num_heads, self.sharding.num_tokens)
        grad_out, grad_lse = (
            torch.randn(each, generator=generator, dtype=torch.float64) for each in ((*shape, D), shape)
        )
        return laid_out(self._as_asked(grad_out), self.layouts[3]), grad_lse


def ranks_of() -> Ranks:
    return Ranks.of(init_device_mesh("cpu", (dist.get_world_size(),)))


def one_rank(problem: Problem) -> list[Tensor]:
    """out, lse and all gradients of the whole sequence."""
    leaves = [x.requires_grad_() for x in problem.tensors()]
    sinks = leaves[3] if problem.sinks else None
    options = {"enable_gqa": True, "sinks": sinks, "return_lse": True}
    out, lse = fd.attend(*leaves[:3], PATTERNS[problem.pattern], **options)
    return [out.detach(), lse.detach(), *_gradients(problem, out, lse, leaves, slice(None))]


def this_rank(problem: Problem) -> list[Tensor]:
    """The same of this rank's shard; the gradient of the sinks summed over ranks."""
    ranks = ranks_of()
    held = problem.sharding.positions(ranks.rank)
    *tensors, sinks = problem.tensors() if problem.sinks else (*problem.tensors(), None)
    leaves = [laid_out(x[:, :, held], layout) for x, layout in zip(tensors, problem.layouts, strict=False)]
    leaves = [x.requires_grad_() for x in (*leaves, *([] if sinks is None else [sinks]))]
    options = {"enable_gqa": True, "sinks": leaves[3] if problem.sinks else None, "return_lse": True}
    options["engine"] = problem.engine
    where = {"ranks": ranks, "sharding": problem.sharding}
    out, lse = attend_heads(*leaves[:3], PATTERNS[problem.pattern], **where, **options)
    grads = _gradients(problem, out, lse, leaves, held)
    if problem.sinks:
        dist.all_reduce(grads[3])
    return [out.detach(), lse.detach(), *grads]


def _gradients(problem: Problem, out: Tensor, lse: Tensor, leaves: list[Tensor], held) -> list[Tensor]:
    grad_out, grad_lse = (x[:, :, held] for x in problem.cotangents())
    grad_out = laid_out(grad_out, problem.layouts[3])
    grad_lse = grad_lse.masked_fill(lse == -torch.inf, 0.0).to(lse.dtype)
    return list(torch.autograd.grad((out, lse), leaves, (grad_out, grad_lse)))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any number of tokens on 1 to 4 ranks: in either order, of unequal lengths, ranks without tokens."""
    W, N = draw(st.integers(1, 4)), draw(st.integers(1, 50))
    lengths = None
    if draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, N), min_size=W - 1, max_size=W - 1)))
        lengths = tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, N], strict=True))
    sharding = Sharding(N, W, draw(st.sampled_from(["contiguous", "zigzag"])), lengths)
    H = W * draw(st.integers(2 if W == 1 else 1, 3))
    G = draw(st.sampled_from([G for G in range(1, H + 1) if H % G == 0]))
    features = {"sinks": draw(st.booleans()), "engine": draw(st.sampled_from([None, "reference"]))}
    features["layouts"] = tuple(draw(st.sampled_from(MEMORY_LAYOUTS)) for _ in range(4))
    return Problem(sharding, H, G, draw(st.sampled_from(sorted(PATTERNS))), **features)


@given(problems())
def test_many_ranks_are_one(problem: Problem) -> None:
    """Output, lse and all gradients, for any sharding, also with fewer key/value heads than ranks."""
    whole = one_rank(problem)
    for rank, found in enumerate(on_ranks(problem.sharding.num_ranks, this_rank, problem)):
        held = problem.sharding.positions(rank)
        expected = [x if x.dim() == 1 else x[:, :, held] for x in whole]
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, **TIGHT)


def test_heads_that_fit_no_groups() -> None:
    """12 query heads on 6 ranks, 4 key/value heads: some ranks read one of them, some two unequally."""
    problem = Problem(Sharding(30, 6), 12, 4)
    assert {tuple(HeadSplit(12, 4, 6).read_by(rank)) for rank in range(6)} == {(0, 0), (0, 1)}
    uneven = Problem(Sharding(30, 2), 6, 2)
    assert HeadSplit(10, 5, 2).read_by(0) == [0, 0, 1, 1, 2]
    for each in (problem, uneven, Problem(Sharding(30, 2, "zigzag"), 10, 5)):
        whole, W = one_rank(each), each.sharding.num_ranks
        for rank, found in enumerate(on_ranks(W, this_rank, each)):
            for one, other in zip(found, whole, strict=True):
                assert_close(one, other[:, :, each.sharding.positions(rank)], **TIGHT)


def errors(problem: Problem, found: list[Tensor], truth: list[Tensor]) -> list[float]:
    """How far each result is from the truth, relative to the truth's norm."""
    return [float((x.double() - y).norm() / y.norm()) for x, y in zip(found, truth, strict=True)]


@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_gradients_of_shared_heads_are_as_exact_as_on_one_rank(num_kv_heads: int) -> None:
    """In bfloat16, where several ranks have one key/value head: what they add up has not been rounded before."""
    sharding = Sharding(320, 8)
    problem = Problem(sharding, 8, num_kv_heads, dtype=torch.bfloat16, pattern="wide")
    truth = one_rank(replace(problem, dtype=torch.float64, rounded=True))
    parts = on_ranks(8, this_rank, problem)
    joined = [torch.cat([part[i] for part in parts], dim=2) for i in range(len(truth))]
    alone, many = (errors(problem, found, truth) for found in (one_rank(problem), joined))
    assert all(w < 1.1 * one for w, one in zip(many, alone, strict=True)), (alone, many)


def counted(problem: Problem) -> tuple[dict, dict, dict]:
    """Bytes sent and received, and transfers, of a forward and of the backward, by role."""
    ranks = ranks_of()
    leaves = [x[:, :, problem.sharding.positions(ranks.rank)].requires_grad_() for x in problem.tensors()]
    traffic().reset()
    out, lse = attend_heads(
        *leaves, PATTERNS[problem.pattern], ranks=ranks, sharding=problem.sharding, enable_gqa=True, return_lse=True
    )
    forward = {name: dict(getattr(traffic(), name)) for name in ("sent", "received", "transfers")}
    traffic().reset()
    (out.sum() + lse.sum()).backward()
    return forward, {name: dict(getattr(traffic(), name)) for name in ("sent", "received", "transfers")}, {}


def test_bytes_and_transfers_are_the_fewest() -> None:
    """Each head of a token goes once to each rank that computes with it, and comes back once; in two transfers each."""
    N, W = 20, 4
    problem = Problem(Sharding(N, W, "zigzag", (8, 2, 3, 7)), num_heads=8, num_kv_heads=2)
    on_ranks(W, this_rank, problem)  # the check that all ranks make this call is behind
    number = 2 * 8  # bytes of one number of both batch entries
    for rank, (forward, backward, _) in enumerate(on_ranks(W, counted, problem)):
        length = problem.sharding.length(rank)
        # 2 query heads a rank, and one head of keys and of values; and 2 of output, where the lse is one number more.
        brought, returned = (2 + 1 + 1) * D * number, 2 * (D + 1) * number
        sent = 3 * length * brought + (N - length) * returned
        received = (N - length) * brought + 3 * length * returned
        assert (forward["sent"]["heads"], forward["received"]["heads"]) == (sent, received)
        assert (backward["sent"]["heads"], backward["received"]["heads"]) == (received, sent)
        assert forward["transfers"]["heads"] == backward["transfers"]["heads"] == 3
        assert set(backward["sent"]) == {"heads"}


def refusal(num_heads: int, num_kv_heads: int, length: int, sharding: Sharding, options: dict) -> str:
    """What a call answers that does not fit; nothing is sent before that."""
    q, k, v = (torch.ones(1, H, length, D) for H in (num_heads, num_kv_heads, num_kv_heads))
    traffic().reset()
    with pytest.raises((ValueError, TypeError)) as error:
        attend_heads(q, k, v, LONGNET, ranks=ranks_of(), sharding=sharding, **options)
    assert not traffic().sent["heads"]
    return str(error.value)


EVEN = Sharding(8, 4)
BAD = {
    "heads": (
        (6, 6, 2, EVEN, {}),
        "multiple of the number of ranks; got 6 heads and 4 ranks: 6 heads go on 1 or 2 or 3",
    ),
    "grouped": ((4, 2, 2, EVEN, {}), "unequal query and key/value heads need enable_gqa=True; got 4 and 2"),
    "tokens": ((4, 4, 3, EVEN, {}), "the sharding gives rank 0 of 4 2 of 8 tokens; got 3 queries and 3 keys"),
    "other ranks": ((4, 4, 4, Sharding(8, 2), {}), "the sharding must be over the ranks of the mesh, 4; got 2"),
    "sinks": ((4, 4, 2, EVEN, {"sinks": torch.zeros(3)}), "one logit for each head of q, shape (4,); got (3,)"),
}


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD)
def test_what_does_not_fit_is_refused_before_anything_is_sent(call, message) -> None:
    assert message in on_ranks(4, refusal, *call)[0]


def disagree() -> str:
    ranks = ranks_of()
    x = torch.ones(1, 2, 4, D)
    pattern = masks.causal() if ranks.rank else masks.every()
    with pytest.raises(ValueError, match="pattern") as error:
        attend_heads(x, x, x, pattern, ranks=ranks, sharding=Sharding(8, 2))
    return str(error.value)


def test_ranks_that_disagree_are_told_in_what() -> None:
    first, second = on_ranks(2, disagree)
    assert "causal" in first
    assert "causal" in second


def die() -> None:
    ranks = ranks_of()
    x = torch.ones(1, 2, 4, D)
    call = {"ranks": ranks, "sharding": Sharding(8, 2)}
    attend_heads(x, x, x, masks.causal(), **call)
    set_group_timeout(5)
    if ranks.rank == 1:
        os._exit(7)
    with pytest.raises(dist.DistError, match="the exchange of heads failed"):
        attend_heads(x, x, x, masks.causal(), **call)


def test_a_peer_that_dies_is_an_error_in_time() -> None:
    """Without the group's timeout the survivor would be ended where it waits."""
    survivor, dead = outcomes_on_ranks(2, die)
    assert survivor.error is None, survivor.error
    assert "exit code 7" in str(dead.error)


def compiled(backend: str) -> float:
    """The greatest difference between a compiled call's output and gradients and an eager one's."""
    ranks = ranks_of()
    problem = Problem(Sharding(20, 2, "zigzag"), 4, 2)
    held = problem.sharding.positions(ranks.rank)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pattern = PATTERNS["mixture"]
        return attend_heads(2 * q, k, v, pattern, ranks=ranks, sharding=problem.sharding, enable_gqa=True).sin()

    results = []
    for run in (call, torch.compile(call, fullgraph=True, backend=backend)):
        leaves = [x[:, :, held].requires_grad_() for x in problem.tensors()]
        out = run(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out.sum(), leaves)])
    return max(float((one - other).abs().max()) for one, other in zip(*results, strict=True))


def test_compiles_without_a_graph_break() -> None:
    assert max(on_ranks(2, compiled, "aot_eager")) < 1e-12
