"""Triton's kernels of single keys, in its interpreter, against the dense definition in float64."""

from __future__ import annotations

from importlib import import_module
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines import Call, Features
from flexdilated.engines.flex import _listed_keys
from flexdilated.engines.flex._portable_op import portable_run
from flexdilated.memory import LiveBytes
from tests.interpreted.emulated_cuda import host_reads, require
from tests.interpreted.test_kernels import counted

require(interpreted=True)
_gathered_keys = import_module("flexdilated.engines.kernels._gathered_keys")  # needs Triton

NAME = "listed_keys"
QUICK = {1, *range(3, 9), 10}


def noise(draw: Random, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """Values in one of several memory layouts."""
    order = draw.choice([(0, 1, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3), (0, 1, 3, 2)])[: len(shape)]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(draw.randrange(1 << 30)))
    return torch.empty_permuted(shape, order if len(shape) == 4 else (0,), dtype=dtype).copy_(values)


def drawn_table(draw: Random, shape: tuple[int, ...], num_keys: int) -> tuple[Any, dict[str, Tensor], Tensor]:
    """(pattern, its table by name, its pairs): keys in any order, some repeated, -1, and numbers that are no keys."""
    seed, most = torch.Generator().manual_seed(draw.randrange(1 << 30)), draw.choice([1, 5, 40])
    table = torch.randint(0, num_keys, (*shape, most), generator=seed)
    none = torch.rand(table.shape, generator=seed) < draw.choice([0.1, 0.7])
    none |= torch.rand(shape, generator=seed)[..., None] < 0.2
    pairs = torch.zeros(*shape, num_keys + 1, dtype=torch.bool)
    pairs.scatter_(-1, table.masked_fill(none, num_keys), True)
    table = table.masked_fill(none, -1).to(draw.choice([torch.int32, torch.int64]))
    if table.dtype == torch.int64:
        table.masked_fill_(none & (torch.rand(none.shape, generator=seed) < 0.5), draw.choice([num_keys, 1 << 40]))
    return masks.selected_keys("table", most=most), {"table": table}, pairs[..., :-1]


def drawn_matrix(draw: Random, shape: tuple[int, ...], num_keys: int) -> tuple[Any, dict[str, Tensor], Tensor]:
    """(pattern, nothing, its pairs): few keys in most rows, many in some."""
    seed = torch.Generator().manual_seed(draw.randrange(1 << 30))
    lengths = ((1 - torch.rand(shape, generator=seed)) ** -0.9 - 0.5).long()
    pairs = torch.rand(*shape, num_keys, generator=seed).argsort(-1) < lengths[..., None]
    earlier = pairs.new_zeros(*shape[:2], num_keys - shape[2], num_keys)  # a matrix has rows from position 0 on
    return masks.sparse(torch.cat([earlier, pairs], 2).float().to_sparse()), {}, pairs


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed in QUICK else pytest.mark.thorough) for seed in range(150)]
)
def test_drawn_calls_match_the_definition(seed: int, monkeypatch) -> None:
    """Outputs, lse and gradients, with other pairs beside the table and any of its shapes, in parts of the queries."""
    draw = Random(seed)
    batch, groups, group, tokens = (draw.choice(some) for some in ((1, 2), (1, 2), (1, 3, 20), (9, 33)))
    heads, later, dtype = groups * group, draw.choice([0, 0, 7]), draw.choice([torch.float32, torch.float16])
    dims, keys = draw.choice([(16, 16), (16, 16), (32, 24), (80, 72), (24, 192)]), tokens + later
    shape = draw.choice([1, batch]), draw.choice([1, groups, heads]), tokens
    own, tensors, pairs = draw.choice([drawn_table, drawn_matrix])(draw, shape, keys)
    ids = torch.arange(keys) // torch.randint(3, 9, (batch, 1), generator=torch.Generator().manual_seed(seed))
    window, documents = masks.local_window(left=3, right=0), masks.documents("ids")
    every_other = masks.dilated(6, 2, "interleaved")  # others for each head
    rules = [("", own), ("&", masks.causal()), ("&", documents), ("&", every_other), ("|", window), ("+", window)]
    how, beside = draw.choice(rules)
    if beside is documents:
        tensors["ids"] = draw.choice([ids, ids[0]])

    def combined(pattern: Any) -> Any:
        if how == "|":
            return pattern | beside
        return pattern + beside if how == "+" else pattern & beside if how else pattern

    earlier = pairs.new_zeros(*pairs.shape[:2], later, keys)
    dense = masks.mask(torch.cat([earlier, pairs], 2).repeat_interleave(heads // pairs.shape[1], 1))
    shapes = (batch, heads, tokens, dims[0]), (batch, groups, keys, dims[0]), (batch, groups, keys, dims[1]), (heads,)
    leaves = [noise(draw, each, dtype) for each in shapes[: draw.choice([3, 4])]]
    sent = noise(draw, (batch, heads, tokens, dims[1])), noise(draw, (batch * heads * tokens,)).view(batch, heads, -1)
    engine = draw.choice([None, "flex", "portable"])
    monkeypatch.setattr(_listed_keys, "_ENTRIES_AT_ONCE", draw.choice([1 << 21, 7]))
    launched = []
    for name in ("attend_part", "add_gradients_of_part"):
        launch = getattr(_gathered_keys, name)
        monkeypatch.setattr(_gathered_keys, name, lambda *x, launch=launch: (launched.append(launch), launch(*x)))

    def results(pattern: Any, device: str, dtype: torch.dtype, engine: str | None, given: list[Tensor]) -> list[Tensor]:
        x = [each.to(device, dtype).requires_grad_() for each in given]
        options = {"sinks": x[3]} if len(x) > 3 else {}
        bound = {name: values.to(device) for name, values in tensors.items() if name in pattern.text}
        options |= {"bindings": bound or None, "enable_gqa": True, "q_offset": later, "return_lse": True}
        out, lse = fd.attend(*x[:3], pattern, engine=engine, **options)
        grads = torch.autograd.grad((out, lse), x, (sent[0].to(out), sent[1].to(lse)))
        return [each.detach().cpu().double() for each in (out, lse, *grads)]

    truth = results(combined(dense), "cpu", torch.float64, "reference", leaves)
    if how in ("", "&"):  # keys that no query sees may be anything
        unseen = ~pairs.flatten(0, 2).any(0)
        leaves[1:3] = [x.clone().masked_fill_(unseen[:, None], torch.nan) for x in leaves[1:3]]
    with np.errstate(divide="ignore", invalid="ignore"):  # compilers compute both sides of a choice
        found = results(combined(own), "cuda", dtype, engine, leaves)
    assert len(launched) >= 2
    near = {"rtol": 2e-4, "atol": 2e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 3e-2}
    for true, got in zip(truth, found, strict=True):
        torch.testing.assert_close(got, true, **near)


ALONE, BESIDE = "selected_keys('table', most=5)", "selected_keys('table', most=5) | causal()"


@pytest.mark.parametrize("pattern", [ALONE, pytest.param(BESIDE, marks=pytest.mark.thorough)])
def test_a_graph_computes_what_an_eager_call_does(pattern: str) -> None:
    read = masks.parse(pattern)

    def attend(x: Tensor, table: Tensor) -> Tensor:
        return fd.attend(x, x, x, read, bindings={"table": table})

    table, found = torch.randint(-1, 40, (1, 2, 40, 5)).to("cuda"), []
    for function in (attend, torch.compile(attend, fullgraph=True)):
        x = noise(Random(0), (1, 2, 40, 16), torch.float32).to("cuda").requires_grad_()
        with np.errstate(divide="ignore", invalid="ignore"):
            out = function(x, table)
            found.append([each.detach().cpu() for each in (out, *torch.autograd.grad(out.square().sum(), x))])
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)


INDEXED = masks.causal() & masks.selected_keys("table", most=2048)


def indexed_call(queries: int, keys: int, most: int, heads: int, dims: tuple[int, int]) -> tuple[list[Tensor], Tensor]:
    """(q, k, v, table) of the last queries of a sequence, each with `most` of the keys."""
    k, q = torch.randn(1, 1, keys, dims[0]).half().to("cuda"), torch.randn(1, heads, queries, dims[0]).half().to("cuda")
    table = torch.stack([torch.randperm(keys)[:most] for _ in range(queries)])
    return [q, k, k[..., : dims[1]]], table[None, None].to("cuda")


@pytest.mark.parametrize(
    ("keys", "most", "heads", "dims"),
    [(500, 64, 24, (48, 32)), pytest.param(131_072, 2048, 128, (576, 512), marks=pytest.mark.thorough)],
)
def test_a_query_reads_its_keys_and_little_else(keys, most, heads, dims, record_property) -> None:
    x, table = indexed_call(2, keys, most, heads, dims)
    pattern, later = masks.causal() & masks.selected_keys("table", most=most), keys - 2
    with counted() as moved, torch.no_grad():
        fd.attend(*x, pattern, bindings={"table": table}, q_offset=later, enable_gqa=True)
    least = 2 * 2 * most * sum(dims) * x[0].itemsize
    figure = {"figure": round(sum(moved) / least, 3), "target": 1.5}
    what = f"{keys:,} tokens, {most:,} keys a query, {heads} heads over one, dims {dims[0]} and {dims[1]}"
    record_property(f"{NAME}: bytes moved over one gathered read and write, {what}", figure)
    assert 0.5 <= figure["figure"] <= figure["target"]


class _Launches(TorchDispatchMode):
    """Counts operations that compute something on the device."""

    number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not function.is_view
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("keys", [4096, pytest.param(131_072, marks=pytest.mark.thorough)])
def test_a_part_takes_few_launches_and_bounded_memory(keys, record_property, monkeypatch) -> None:
    """A table on the device is put in order there, some queries at a time; the host reads none of it."""
    monkeypatch.setattr(_gathered_keys, "attend_part", lambda *arguments: None)
    found = []
    for parts in (2, 4):
        (q, k, v), table = indexed_call(1024 * parts, keys, 2048, 1, (16, 16))
        call = Call.at(q, k, INDEXED.text, q_offset=keys - len(q[0, 0]), num_heads_global=1)
        run, before = portable_run(call, q, [table], Features(1.0)), host_reads()
        with LiveBytes(q, k, table) as live, _Launches() as launches, torch.no_grad():
            out, _ = run.forward(q, k, v)
        memory = live.peak - sum(each.nbytes for each in (q, k, table, out))
        found.append((launches.number, memory, host_reads() - before))
    (two, less, _), (four, more, reads) = found
    figures = {"launches a part": ((four - two) // 2 + 1, 12)}  # one of them attention itself
    figures |= {"MB of memory": (round(more / 1e6, 1), 256)}
    for name, (figure, target) in figures.items():
        what = f"{NAME}: {name}, {keys:,} tokens, 2,048 keys a query"
        record_property(what, {"figure": figure, "target": target})
        assert figure <= target
    assert reads == 0
    assert more <= 1.1 * less
