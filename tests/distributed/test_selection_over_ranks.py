"""Blocks chosen over ranks: the tables, rows and gradients of one rank that has all tokens."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import flexdilated as fd
from flexdilated import masks
from flexdilated.distributed import Sharding, traffic
from tests.selection.cases import Case, cases
from tests.selection.test_selected_attention import Gate, table_of
from tests.support.agreement import TIGHT
from tests.support.ranks import on_ranks
from tests.support.sharded_cases import DRAWN, line, summed

# B batch, H query heads, G key/value heads, N tokens, D head dim

B, H, G, N, D = 2, 4, 2, 47, 4
SHARDINGS = {
    "contiguous": Sharding(N, 3),
    "zigzag": Sharding(N, 3, "zigzag"),
    "ragged": Sharding(N, 3, shard_lengths=(24, 0, 23)),
    "ragged zigzag": Sharding(N, 3, "zigzag", (0, 31, 16)),
}


def gate(seed: int = 0) -> Gate:
    torch.manual_seed(seed)
    return Gate(D)


def selectors() -> dict[str, tuple[dict[str, Any], str, dict[str, Any]]]:
    """Name -> (options of the selector, gradient, options of the call), of what is not drawn."""
    few, first, own = fd.TopK(2), {"query_block": 4, "query_summary": "first"}, {"always": masks.chunked(4)}
    coarse = fd.BlockSelector(block=8, query_block=8, query_summary="first", choose=few, share="group")
    hidden = {"within": masks.visible_keys("shown"), "bindings": {"shown": torch.arange(N) % 5 > 0}}
    sinks = torch.linspace(-1, 1, H, dtype=torch.float64)
    return {
        "mass": ({"choose": few, "scorer": "mass", "share": "all"}, "none", {"sinks": sinks, "scale": 0.7}),
        "coarse": ({"choose": few, "coarse": coarse, **first, **own}, "none", {}),
        "bias": ({"choose": few, **first, **own}, "bias", {"sinks": sinks, **hidden}),
        "gate": ({"choose": few, "scorer": gate(), **own}, "bias", {}),
        "gate of rows": ({"choose": few, "scorer": gate(), "share": "group", **first, **own}, "bias", {}),
    }


def drawn(seed: int = 1) -> list[Tensor]:
    """q, k, v and the gradient of the output, of all tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, heads, N, D, dtype=torch.float64, generator=generator) for heads in (H, G, G, H)]


def rows_of(sharding: Sharding, side: int) -> Tensor:
    """Of a whole choice, the rows that are this rank's."""
    return (sharding.positions(dist.get_rank()) // side).unique()


def assert_is_one_rank(
    options: dict[str, Any],
    gradient: str,
    call: dict[str, Any],
    shardings: Sequence[Sharding],
    whole: list[Tensor],
    run: Any = None,
) -> None:
    """Tables to the bit, output and gradients to rounding; density and cut are those of this rank's rows."""
    selector, (*inputs, grad) = fd.BlockSelector(**options), whole
    parameters = tuple(selector.parameters())
    inputs = [x.clone().requires_grad_() for x in inputs]
    given = {"enable_gqa": True, "return_selection": True, **call}
    out, chosen = fd.SelectedAttention(selector, gradient)(*inputs, **given)
    expected = torch.autograd.grad((out * grad).sum(), (*inputs, *parameters))
    bindings = dict(call.get("bindings") or {})
    within = selector.rule(call.get("within"))
    case = Case(options | {"within": within}, *(x.detach() for x in inputs[:2]), 0, bindings)
    seen, read = case.table(within), table_of(case, chosen.blocks)
    for sharding in shardings:
        held, rows = sharding.positions(dist.get_rank()), rows_of(sharding, selector.query_block)
        shards = [x.detach()[:, :, held].requires_grad_() for x in inputs]
        many = fd.SelectedAttention(selector, gradient, mesh=line(), sharding=sharding)
        mine, found = (many if run is None else partial(run, many))(*shards, **given)
        assert found.blocks.equal(chosen.blocks[:, :, rows])
        assert_close(found.scores, chosen.scores[:, :, rows], **TIGHT)
        assert_close(mine, out[:, :, held], **TIGHT)
        got = torch.autograd.grad((mine * grad[:, :, held]).sum(), (*shards, *parameters))
        for one, other in zip(got[:3], expected[:3], strict=True):
            assert_close(one, other[:, :, held], **TIGHT)
        for one, other in zip(got[3:], expected[3:], strict=True):
            assert_close(summed(one), other, **TIGHT)
        density = read[:, :, held].sum().double() / seen[:, :, held].sum().clamp(min=1)
        assert_close(found.density, density, **TIGHT)
        assert_close(summed(found.cut * len(rows)) / chosen.blocks.shape[2], chosen.cut, **TIGHT)


def all_selectors() -> None:
    for place, (options, gradient, call) in enumerate(selectors().values()):
        sharding = list(SHARDINGS.values())[place % len(SHARDINGS)]
        assert_is_one_rank({"block": 4, **options}, gradient, call, [sharding], drawn())


def all_cases(drawn_cases: list[tuple[Case, str, Sharding]]) -> None:
    for case, gradient, sharding in drawn_cases:
        grad = torch.randn(case.q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        whole = [case.q, case.k, case.k.roll(1, 2), grad]
        assert_is_one_rank(case.options, gradient, {"bindings": case.bindings}, [sharding], whole)


@st.composite
def sharded(draw: st.DrawFn) -> tuple[Case, str, Sharding]:
    case = draw(cases().filter(lambda case: case.q_offset == 0 and case.k.shape[2] == case.q.shape[2]))
    tokens, side = case.q.shape[2], case.options["query_block"]
    if case.options["query_summary"] == "mean" and side > 1:
        case = replace(case, options=case.options | {"within": masks.every(), "future_in_choice": False}, bindings={})
    ends = sorted(draw(st.integers(0, -(-tokens // side)), label="end of a shard") * side for _ in range(2))
    ends = [0, *(min(end, tokens) for end in ends), tokens]
    lengths = [end - begin for begin, end in pairwise(ends)]
    order = "zigzag" if side == 1 and draw(st.booleans(), label="zigzag") else "contiguous"
    return case, draw(st.sampled_from(["none", "bias"])), Sharding(tokens, 3, order, lengths)


@DRAWN
@given(st.lists(sharded(), min_size=2, max_size=4))
def test_drawn_choices_are_those_of_one_rank(drawn_cases) -> None:
    """Rules with tensors, of each head, of rows that see nothing; shards of whole rows, some of none."""
    on_ranks(3, all_cases, drawn_cases)


def prefill() -> None:
    """Rows that look with all of their queries, which later ones are among: without gradients."""
    options = {"choose": fd.TopP(0.5, most=2), "scorer": "antidiagonal", "stride": 2, "query_block": 4}
    selector = fd.BlockSelector(block=4, **options, future_in_choice=True)
    sharding, (q, k, v, _) = SHARDINGS["zigzag"], drawn()
    held = sharding.positions(dist.get_rank())
    out, chosen = fd.SelectedAttention(selector)(q, k, v, enable_gqa=True, return_selection=True)
    many = fd.SelectedAttention(selector, mesh=line(), sharding=sharding)
    mine, found = many(*(x[:, :, held] for x in (q, k, v)), enable_gqa=True, return_selection=True)
    assert found.blocks.equal(chosen.blocks[:, :, rows_of(sharding, 4)])
    assert_close(mine, out[:, :, held], **TIGHT)


def distilled() -> None:
    """Shares of the loss add up: rows of one query and of several, with a teacher or not; some have no candidate."""
    q, k, v, other = drawn()
    several = {"query_block": 4, "query_summary": "first", "share": "group"}
    for rows, name in (({}, "zigzag"), (several, "zigzag"), ({}, "ragged"), (several, "ragged")):
        sharding = SHARDINGS[name]
        held = sharding.positions(dist.get_rank())
        selector = fd.BlockSelector(block=4, scorer=gate(), choose=fd.TopK(2), always=masks.chunked(4), **rows)
        for teacher in (None, (other, v)):
            loss = fd.SelectedAttention(selector, "distill").distill_loss(q, k, enable_gqa=True, teacher=teacher)
            (expected,) = torch.autograd.grad(loss, selector.scorer.weight)
            many = fd.SelectedAttention(selector, "distill", mesh=line(), sharding=sharding)
            mine = None if teacher is None else tuple(x[:, :, held] for x in teacher)
            share = many.distill_loss(*(x[:, :, held] for x in (q, k)), enable_gqa=True, teacher=mine)
            (got,) = torch.autograd.grad(share, selector.scorer.weight)
            assert_close(summed(share), loss.detach(), **TIGHT)
            assert_close(summed(got), expected, **TIGHT)


def checkpointed(attention: nn.Module, *given: Tensor, **call) -> Any:
    return checkpoint(attention, *given, use_reentrant=False, **call)


def checkpoints() -> None:
    """Everyone gathers again, also the rank without tokens, which has nothing to compute again."""
    for gradient in ("none", "bias"):
        options = {"block": 4, "scorer": gate() if gradient == "bias" else "mean", "choose": fd.TopK(2)}
        assert_is_one_rank(options, gradient, {}, [SHARDINGS["ragged"]], drawn(), run=checkpointed)


def traced(attention: nn.Module, *given: Tensor, **call: Any) -> Any:
    run = torch.compile(attention, fullgraph=True, backend="eager") if dist.get_rank() == 1 else attention
    return run(*given, **call)


def graphs() -> None:
    """Tables and density too: of a rank with two runs, and without tokens."""
    options, gradient, call = selectors()["bias"]
    shardings = [SHARDINGS["ragged zigzag"], SHARDINGS["ragged"]]
    assert_is_one_rank({"block": 4, **options}, gradient, {"sinks": call["sinks"]}, shardings, drawn(), run=traced)


@pytest.mark.parametrize(
    "function",
    [all_selectors, prefill, distilled, checkpoints, pytest.param(graphs, marks=pytest.mark.thorough)],
    ids=lambda function: function.__name__,
)
def test_choices_rows_and_gradients_are_those_of_one_rank(function) -> None:
    """A rank without tokens has its part in all of them."""
    on_ranks(3, function)


def gathered_bytes(sharding: Sharding) -> tuple[list[int], set[str]]:
    """Received and sent in a forward, and in its backward; received for a loss, also with a teacher; and for what."""
    q, k, v, _ = drawn()
    held = sharding.positions(dist.get_rank())
    q, k, v = (x[:, :, held].float().requires_grad_() for x in (q, k, v))
    many = fd.SelectedAttention(fd.BlockSelector(block=4, choose=fd.TopK(2)), mesh=line(), sharding=sharding)
    counted, (got, gone) = [], (traffic().received, traffic().sent)
    traffic().reset()
    out = many(q, k, v, enable_gqa=True)
    counted += [got["shards"], gone["shards"]]
    out.sum().backward()
    counted += [got["shards"] - counted[0], gone["shards"] - counted[1]]
    taught = fd.SelectedAttention(
        fd.BlockSelector(block=4, scorer=gate().float(), choose=fd.TopK(2)), "distill", mesh=line(), sharding=sharding
    )
    for teacher in (None, (q, k)):
        before = got["shards"]
        taught.distill_loss(q, k, enable_gqa=True, teacher=teacher)
        counted.append(got["shards"] - before)
    return counted, {role for role, number in got.items() if number}


def test_what_travels_is_all_keys_and_values() -> None:
    """Forward 2 · B · G · (N − L) · D numbers come and (W − 1) · L go to others; backward the other way round."""
    token_bytes = 2 * B * G * D * 4
    for sharding in SHARDINGS.values():
        for rank, (counted, roles) in enumerate(on_ranks(3, gathered_bytes, sharding)):
            others, own = (N - sharding.length(rank)) * token_bytes, 2 * sharding.length(rank) * token_bytes
            # A loss needs the keys alone, and of each other rank the number of its rows.
            assert counted == [others, own, own, others, others // 2 + 16, others + 16]
            assert roles <= {"shards", "set-up"}
