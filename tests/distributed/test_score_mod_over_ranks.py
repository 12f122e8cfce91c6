"""A score_mod over ranks gets positions in the whole sequence; each rank has its share of its tensors' gradients."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.distributed import Sharding, _attend
from flexdilated.engines import ScoreMod
from flexdilated.engines.flex import _flex_op
from tests.distributed.test_distributed_attend import shards
from tests.distributed.test_dropout_over_ranks import SEED, mixtures
from tests.distributed.test_schedules import DRAWN
from tests.engines.test_flex import dense_flex
from tests.support.agreement import TIGHT
from tests.support.ranks import on_ranks
from tests.support.sharded_cases import (
    NAMES,
    ShardedCase,
    Shares,
    call,
    compiled_on_the_last,
    leaves_of,
    line,
    sharded_cases,
    tensors_for,
    together,
)

# B batch, H query heads, N tokens of all ranks

DISTANCES = 7


def captured(num_heads: int) -> list[Tensor]:
    """A table of biases (H, distances) and slopes (H,), which are trained."""
    generator = torch.Generator().manual_seed(3)
    shapes = (num_heads, DISTANCES), (num_heads,)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def reading(table: Tensor, slopes: Tensor) -> ScoreMod:
    """A function that reads all of its arguments."""
    return reading_held([table, slopes])


def reading_held(held: list[Tensor]) -> ScoreMod:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        table, slopes = held
        return score * (1 + 0.1 * b) + table[h, (q_idx - k_idx) % DISTANCES] - slopes[h].cos() * 0.01 * k_idx

    return score_mod


def results(
    case: ShardedCase, own: list[Tensor], learned: list[Tensor], out: Tensor, lse: Tensor, here: Any = slice(None)
) -> Shares:
    """(out, lse, dq, dk, dv) of some tokens, and the other gradients in one row, which are sums over the ranks.

    A rank without tokens has gradients of q, k, v and sinks, and none of what the score_mod captures.
    """
    grad_out, grad_lse = (x[:, :, here] for x in case.cotangents)
    sent = (out * grad_out).sum() + (lse * grad_lse).masked_fill(lse == -torch.inf, 0.0).sum() * case.through_lse
    found = torch.autograd.grad(sent, own, retain_graph=True)
    found += torch.autograd.grad(sent, learned, allow_unused=True, materialize_grads=True)
    return Shares((out.detach(), lse.detach(), *found[:3]), torch.cat([x.flatten() for x in found[3:]]), {}, {})


def run(cases: list[ShardedCase], way: dict[str, Any]) -> list[Shares]:
    """Return this rank's shares of every case."""
    shares = []
    for case in cases:
        own, learned = leaves_of(case), captured(case.num_heads_global or case.tensors[0].shape[1])
        torch.manual_seed(SEED + dist.get_rank())
        held = [*learned]
        found = call(case, *own, score_mod=reading_held(held), **way)
        held.clear()  # the backward needs them no more
        shares.append(results(case, own, learned, *found, case.sharding.positions(dist.get_rank())))
    return shares


def by_flex(cases: list[ShardedCase], way: dict[str, Any]) -> list[Shares]:
    """Return them by engine "flex" with a dense kernel."""
    engine = {"choose_engine": lambda *_, **__: "flex", "placed_engine": lambda *_: "flex"}
    kernel = {"_in_parts": _flex_op._flex, "run_flex": partial(_flex_op.run_flex, kernel=dense_flex)}
    with patch.multiple(_attend, **engine), patch.multiple(_flex_op, **kernel):
        return run(cases, way)


def assert_many_are_one(cases: list[ShardedCase], dropout_p: float = 0.0, *, run: Any = run, **way: Any) -> None:
    by_rank = on_ranks(cases[0].sharding.num_ranks, run, cases, way | {"dropout_p": dropout_p})
    for place, case in enumerate(cases):
        own = [x.clone().requires_grad_() for x in case.tensors]
        learned = captured(case.num_heads_global or own[0].shape[1])
        heads = {"head_offset": case.head_offset, "num_heads_global": case.num_heads_global, "enable_gqa": True}
        options = {"sinks": own[3] if own[3:] else None, "engine": "reference", "return_lse": True, **heads}
        torch.manual_seed(SEED)
        found = fd.attend(*own[:3], case.pattern, score_mod=reading(*learned), dropout_p=dropout_p, **options)
        truth = results(case, own, learned, *found)
        many = together(case, [shares[place] for shares in by_rank])
        for name, one, other in zip(NAMES, many, (*truth.parts, truth.sinks), strict=True):
            assert_close(one, other, **TIGHT, msg=lambda text, at=(name, case, way): f"{at}: {text}")


@pytest.mark.parametrize("W", [2, 3])
@pytest.mark.parametrize("schedule", ["exchange", "auto", "heads"])
@DRAWN
@given(data=st.data())
def test_many_ranks_are_one(W: int, schedule: str, data: st.DataObject) -> None:
    """With drawn patterns and mixtures, head groups, shardings, sinks, dropout, and values of another head dim."""
    cases = data.draw(st.lists(sharded_cases(W, by_heads=schedule == "heads"), min_size=3, max_size=5))
    assert_many_are_one(cases, data.draw(st.sampled_from([0.0, 0.4])), schedule=schedule)


SPLITS = Sharding(48, 2, "zigzag"), Sharding(48, 3, shard_lengths=(30, 0, 18))


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_mixtures(split: Sharding) -> None:
    """With sinks, run-time tensors, and a rank without tokens."""
    tensors = tensors_for(6, 3, 48, B=2, D=4, E=3, sinks=True)
    patterns = [pattern for name, pattern in mixtures().items() if name != "zero padding"]
    assert_many_are_one([ShardedCase(each, torch.empty(0), split, tensors) for each in patterns], schedule="exchange")


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_flex(split: Sharding) -> None:
    documents = masks.longnet([8, 48], [1, 4]).per_document(masks.documents(torch.arange(48) // 19))
    tensors = tensors_for(4, 2, 48, B=2, D=4, sinks=True)
    cases = [ShardedCase(each, torch.empty(0), split, tensors) for each in (documents, masks.causal())]
    assert_many_are_one(cases, 0.4, run=by_flex, schedule="exchange")


def of_own_queries() -> None:
    """A table of this rank's queries alone, which fails for all others."""
    own = Sharding(96, dist.get_world_size()).positions(dist.get_rank())
    table = torch.randn(len(own), dtype=torch.float64).requires_grad_()

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return score * torch.where(q_idx >= own[0], table[q_idx - own[0]], torch.nan)

    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, len(own), 8, dtype=torch.float64))
    out = fd.distributed.attend(q, k, v, masks.causal(), mesh=line(), score_mod=score_mod)
    out.sum().backward()
    assert table.grad is not None
    assert table.grad.isfinite().all()


def test_a_rank_is_asked_about_its_own_queries() -> None:
    on_ranks(3, of_own_queries)


def compiled() -> float:
    """Return the largest difference of outputs and gradients between one graph and eager mode, on this rank."""
    torch.compiler.reset()  # other tests in this process compiled the same method
    module = fd.BlockSparseAttention(masks.longnet((16, 64), (1, 4)) & masks.causal(), mesh=line())
    leaves, learned, results = shards(Sharding(100, 2), torch.float64), captured(4), []
    for function in (module, compiled_on_the_last(module, backend="aot_eager")):
        out = function(*leaves, score_mod=reading(*learned))
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), [*leaves, *learned])])
    return max(float((x - y).abs().max()) for x, y in zip(*results, strict=True))


@pytest.mark.slow
def test_a_graph_is_as_eager_code() -> None:
    assert max(on_ranks(2, compiled)) < 1e-12


def with_bindings_in_a_graph() -> list[str]:
    """Return the errors of a graph that must be whole, and of one that may break."""
    ids, errors = torch.arange(100)[None] // 23, []
    options = {"mesh": line(), "score_mod": reading(*captured(4)), "bindings": {"ids": ids}}
    attend = partial(fd.distributed.attend, pattern=masks.documents("ids") & masks.causal(), **options)
    for fullgraph in (True, False):
        torch.compiler.reset()
        with pytest.raises(Exception, match="run-time tensors over ranks need engine") as error:
            torch.compile(attend, fullgraph=fullgraph, backend="eager")(*shards(Sharding(100, 2)))
        errors.append(str(error.value))
    return errors


def test_run_time_tensors_are_refused_in_a_graph() -> None:
    for errors in on_ranks(2, with_bindings_in_a_graph):
        assert all("give the pattern its values, or take the call out of the graph" in error for error in errors)


def distribute(**options: Any) -> None:
    fd.distributed.attend(*shards(Sharding(100, 2)), masks.causal(), mesh=line(), **options)


def rings() -> str:
    learned = captured(4)
    with pytest.raises(ValueError, match="write schedule='exchange'") as error:
        distribute(schedule="ring", score_mod=reading(*learned))
    return str(error.value)


def test_a_ring_says_what_to_write() -> None:
    assert on_ranks(2, rings) == ["a ring computes parts of rows without score_mod: write schedule='exchange'"] * 2


def alone_with_one() -> str:
    score_mod = reading(*captured(4)) if dist.get_rank() else None
    with pytest.raises(ValueError, match="disagree") as error:
        distribute(score_mod=score_mod)
    return str(error.value)


def test_a_rank_without_one_is_an_error_on_all() -> None:
    for words in on_ranks(2, alone_with_one):
        assert "disagree in score_mod: rank 0 has score_mod=False; rank 1 has score_mod=True" in words
