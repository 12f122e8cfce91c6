"""Many short documents: exact whatever their lengths, in kernel calls that grow with distinct lengths alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain, islice
from math import isqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import flexdilated as fd
from flexdilated import masks
from flexdilated._validate import run_time_tensors
from flexdilated.engines import WholeRows
from flexdilated.engines._call import Call
from flexdilated.engines.aten import _tile_blocks
from flexdilated.engines.aten._aten_op import attention, gradients
from flexdilated.engines.kernels import _kernel
from flexdilated.masks.planning._planner import plan
from flexdilated.masks.planning.lowering import _windows

pytestmark = pytest.mark.usefixtures("without_masks")

CAUSAL = masks.causal()
FORMS: dict[str, Callable[[Tensor], masks.Pattern | masks.Mixture]] = {
    "causal": lambda ids: CAUSAL & masks.documents(ids),
    "full": masks.documents,
    "window": lambda ids: masks.local_window(left=2, right=1) & masks.documents(ids),
    "longnet": lambda ids: masks.longnet([4, 8], [1, 2]) & CAUSAL & masks.documents(ids),
    "longnet anew": lambda ids: (masks.longnet([4, 8], [1, 2]) & CAUSAL).per_document(ids),
    "anew and causal": lambda ids: masks.dilated(6, 3).per_document(ids) & CAUSAL,
    "strided": lambda ids: masks.strided(3) & CAUSAL & masks.documents(ids),
    "some keys": lambda ids: CAUSAL & masks.documents(ids) & masks.visible_keys(torch.arange(ids.shape[-1]) % 2 > 0),
    "without": lambda ids: CAUSAL & ~masks.documents(ids),
    "chunked": lambda ids: masks.chunked(7) & masks.documents(ids),
}


def lists_of_lengths(num_tokens: int) -> st.SearchStrategy[list[int]]:
    """Equal, all of one token, growing by one, or any, which fill so many tokens."""
    equal = st.integers(1, num_tokens).map(lambda length: [length] * (-(-num_tokens // length)))
    growing = st.permutations(range(1, isqrt(2 * num_tokens) + 2))
    drawn = st.lists(st.integers(1, 9), min_size=num_tokens, max_size=num_tokens)
    return st.one_of(equal, growing, drawn)


@st.composite
def packings(draw: st.DrawFn, num_tokens: int, batch: int) -> Tensor:
    """Ids of shape (tokens,) or (batch, tokens), some with padding."""
    rows = draw(st.sampled_from([1, batch]))
    ids = []
    for _ in range(rows):
        lengths = draw(lists_of_lengths(num_tokens))
        each = chain.from_iterable([index] * length for index, length in enumerate(lengths))
        row = torch.tensor(list(islice(each, num_tokens)) or [0])
        row = torch.cat([row, torch.full((num_tokens - len(row),), -1)])
        ids.append(row.masked_fill(row == draw(st.integers(-1, 3)), -1))
    return torch.stack(ids) if rows > 1 else ids[0]


@settings(max_examples=12)
@given(st.data(), st.sampled_from(list(FORMS)), st.sampled_from([0, 3]), st.sampled_from([1, 4096]))
def test_out_lse_and_gradients_are_the_dense_rule(data, form, most_lists, enough_slots):
    """Of any packing: windows apart, as folds or, where they are of too many kinds, in one list of blocks."""
    batch, heads, kv_heads = data.draw(st.sampled_from([(1, 2, 2), (2, 4, 2), (3, 2, 1)]), label="sizes")
    num_tokens = data.draw(st.integers(1, 40), label="tokens")
    pattern = FORMS[form](data.draw(packings(num_tokens, batch), label="ids"))
    order = data.draw(st.sampled_from([(0, 1, 2, 3), (0, 2, 1, 3)]), label="dims in memory")
    x = [randn(batch, count, num_tokens, 8, order=order) for count in (heads, kv_heads, kv_heads)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_windows, "_MOST_LISTS", most_lists)
        patch.setattr(_windows, "_ENOUGH_SLOTS", enough_slots)
        masks.cache().clear()
        found = results(x, pattern, None)
    assert_close(found, results(x, pattern, "reference"), rtol=1e-9, atol=1e-9)


def randn(*shape: int, order: tuple[int, ...]) -> Tensor:
    """Numbers whose dims lie in this order in memory."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn([shape[dim] for dim in order], generator=generator, dtype=torch.float64)
    return x.permute([order.index(dim) for dim in range(len(shape))])


def results(x: list[Tensor], pattern: masks.Pattern | masks.Mixture, engine: str | None) -> list[Tensor]:
    q, k, v = (each.detach().requires_grad_() for each in x)
    out, lse = fd.attend(q, k, v, pattern, enable_gqa=True, return_lse=True, engine=engine)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    seen = lse.masked_fill(lse == -torch.inf, 0.0)
    gradients = torch.autograd.grad((out * weights).sum() + seen.square().sum(), (q, k, v))
    return [out.detach(), lse.detach(), *gradients]


@settings(max_examples=12)
@given(st.data(), st.integers(1, 6), st.integers(1, 5), st.integers(1, 5))
def test_entries_are_one_sequence_only_where_the_rule_repeats(data, tokens, times, rate):
    """Of segments that are longer than an entry, or shorter: a multiple of one is the same place in every entry."""
    segment = tokens * times if data.draw(st.booleans(), label="longer") else max(1, tokens // times)
    batch = data.draw(st.integers(2, 4), label="batch")
    rows = st.lists(st.integers(0, 1), min_size=tokens, max_size=tokens).map(torch.tensor)
    ids = torch.stack([data.draw(rows, label="ids").cumsum(0) for _ in range(batch)])
    pattern = masks.dilated(segment, rate, "interleaved") & masks.documents(ids)
    x = [randn(batch, 2, tokens, 8, order=(0, 1, 2, 3)) for _ in range(3)]
    assert_close(results(x, pattern, None), results(x, pattern, "reference"), rtol=1e-9, atol=1e-9)


class Dispatched(TorchDispatchMode):
    """Counts the operations of torch that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def work(monkeypatch: pytest.MonkeyPatch, pattern: masks.Pattern, *, batch: int, num_tokens: int) -> Counter[str]:
    """What the engine does in a forward and a backward with an empty cache: kernel calls, and operations of torch."""
    done: Counter[str] = Counter()

    def counted(name: str, kernel: Callable) -> Callable:
        def run(*args, **options):
            done[name] += 1
            return kernel(*args, **options)

        return run

    masks.cache().clear()
    key = Call(pattern.text, 1, 1, num_tokens, num_tokens, 0, 0, 0, 1, 1, ())
    bindings = run_time_tensors(pattern, None)
    q, k, v = (torch.zeros(batch, 1, num_tokens, 1) for _ in range(3))
    with monkeypatch.context() as patch:
        for module in (_kernel, _tile_blocks):
            for name in ("flash_forward", "flash_backward"):
                patch.setattr(module, name, counted(name, getattr(module, name)))
        with Dispatched() as dispatched:  # of the op's own functions: inside of an op no mode sees anything
            out, lse = attention(key, q, k, v, None, bindings, 1.0)
            gradients(key, q, k, v, bindings, WholeRows(out, lse, torch.ones_like(out), None), 1.0)
    return done + Counter({"operations": dispatched.count})


@pytest.mark.parametrize("length", [1, 17, 128])
def test_equal_documents_cost_what_chunks_cost(monkeypatch, length):
    """Kernel calls at most twice those of the same rule written with numbers; planning by a bounded number of ops."""
    num_tokens = 8_192
    ids = torch.arange(num_tokens) // length
    chunks = work(monkeypatch, CAUSAL & masks.chunked(length), batch=1, num_tokens=num_tokens)
    for pattern in (CAUSAL & masks.documents(ids), CAUSAL.per_document(ids)):
        found = work(monkeypatch, pattern, batch=1, num_tokens=num_tokens)
        assert found["flash_forward"] <= 2 * chunks["flash_forward"]
        assert found["flash_backward"] <= 2 * chunks["flash_backward"]
        assert found["operations"] <= 2 * chunks["operations"] + 300


@pytest.mark.parametrize("form", ["window", "longnet anew", "strided", "some keys", "chunked"])
def test_work_grows_with_lengths_that_differ(monkeypatch, form):
    """Sixteen times as many documents of the same lengths, in another order: as many terms and operations."""
    lengths, done, terms = torch.tensor([1, 2, 5, 6] * 6), [], []
    for times in (1, 16):
        order = torch.randperm(times * len(lengths), generator=torch.Generator().manual_seed(times))
        ids = torch.arange(len(order)).repeat_interleave(lengths.repeat(times)[order])
        pattern, num_tokens = FORMS[form](ids), len(ids)
        terms.append(len(plan(pattern.bind(num_heads=1, num_queries=num_tokens, num_keys=num_tokens)).terms))
        done.append(work(monkeypatch, pattern, batch=1, num_tokens=num_tokens)["operations"])
    assert terms[1] <= 2 * terms[0]
    assert done[1] <= 4 * done[0]


def test_short_sequences_of_a_batch_are_one_program(monkeypatch):
    """Padded to one size with lengths of their own: as many kernel calls and operations for any number of them."""
    found = [
        work(monkeypatch, CAUSAL & masks.lengths(torch.arange(batch) % 16 + 1), batch=batch, num_tokens=16)
        for batch in (32, 256)
    ]
    assert [each["flash_forward"] for each in found] == [each["flash_backward"] for each in found] == [16, 16]
    assert found[1]["operations"] <= 1.5 * found[0]["operations"]
