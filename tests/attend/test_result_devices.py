"""Results lie on the device of the operands: the ops' own code, run on tensors that have no numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines import WholeRows
from flexdilated.engines._call import Call
from flexdilated.engines._rows import program_of_rows
from flexdilated.engines.aten._aten_op import aten, aten_backward
from flexdilated.engines.kernels import _kernel_cuda

META = torch.device("meta")
PATTERNS = {
    "every pair": masks.every(),
    "keys after the queries": masks.causal(),
    "no pair": masks.dilated(64, 40, 35),
    "rows without keys": masks.dilated(8, 2),
    "branches": masks.longnet([8, 32], [1, 4]) & masks.causal(),
}


@pytest.fixture(autouse=True)
def kernels_without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of a device's kernels, results of the right shape."""

    def forward(q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        assert q.device == k.device == v.device
        return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)

    def backward(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **options: object):
        assert len({x.device for x in (grad_out, q, k, v, out, lse)}) == 1
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    monkeypatch.setattr(_kernel_cuda, "forward", forward)
    monkeypatch.setattr(_kernel_cuda, "backward", backward)


def on_meta(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
def test_aten(name: str, with_sinks: bool):
    M = 40 if name == "keys after the queries" else 32
    q, k, v = on_meta(1, 2, 32, 8), on_meta(1, 2, M, 8), on_meta(1, 2, M, 8)
    sinks = on_meta(2) if with_sinks else None
    key = Call(PATTERNS[name].text, 2, 2, 32, M, 0, 0, 0, 2, 1, ())
    options = (*key.arguments, 1.0)
    out, lse = aten._init_fn(q, k, v, sinks, [], *options)
    assert (out.device, lse.device) == (META, META)
    grads = aten_backward._init_fn(out, torch.empty_like(lse), q, k, v, out, lse, [], *options)
    assert [grad.device for grad in grads] == [META] * 3


def test_few_rows():
    """As a cache has them, rows without keys included, forward and backward."""
    q, k, out = on_meta(1, 2, 3, 8), on_meta(1, 2, 32, 8), on_meta(1, 2, 3, 8, dtype=torch.float32)
    for name, pattern in PATTERNS.items():
        key = Call(pattern.text, 2, 2, 3, 32, 1, 0, 0, 2, 1, ())
        program = program_of_rows(key, None, META)
        found = program.forward(q, k, k, 1.0)
        found += program.backward(q, k, k, WholeRows(out, out[..., 0], out, None), 1.0)
        assert [each.device for each in found] == [META] * 5, name


def test_a_cache_whose_queries_see_no_key():
    """More of them than go row by row: what sinks are joined to lies where they do."""
    x, cache = on_meta(1, 2, 32, 8), fd.KVCache(PATTERNS["no pair"] & masks.causal(), num_heads=2)
    assert cache.attend(x, x, x, sinks=on_meta(2)).device == META
