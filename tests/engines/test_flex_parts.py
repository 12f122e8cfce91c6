"""More elements than a kernel can count, in parts of the heads; and how little a call moves and holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines import Features, _operands
from flexdilated.engines._call import Call
from flexdilated.engines._operands import within_reach
from flexdilated.engines.flex import _flex_op
from flexdilated.engines.flex._flex import run_flex
from flexdilated.engines.flex._flex_op import allowed_on, heads_of_part, kv_head_parts
from flexdilated.engines.flex._program import make_flex_program
from flexdilated.masks import Layout
from flexdilated.masks.planning import plan
from tests.support.dense_flex import dense_flex
from tests.support.ladders import LONGNET_5

PATTERN = masks.longnet([8, 32], [1, 4]) & masks.causal()


def on_meta(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def test_a_million_tokens_of_many_heads():
    """Parts as large as may be; CPU tensors are never parted."""
    million = 1 << 20
    q, k = on_meta(1, 32, million, 128), on_meta(1, 8, million, 128)
    parts = kv_head_parts(q, k, k)
    assert parts == [range(begin, begin + 3) if begin < 6 else range(6, 8) for begin in (0, 3, 6)]
    assert all(heads_of_part(q, part, 8).numel() < 1 << 31 for part in parts)
    assert kv_head_parts(*[on_meta(1, 8, million, 128)] * 3) == [range(8)]
    q, k = (torch.empty(1).expand(4, heads, million, 128) for heads in (32, 8))
    assert kv_head_parts(q, k, k) == [range(8)]
    q, v = on_meta(1, 32, million, 16), on_meta(1, 8, million, 128)
    assert kv_head_parts(q, q[:, :8], v) == parts, "an output as wide as v"


def test_one_head_that_is_too_large():
    q, k = on_meta(64, 8, 1 << 20, 128), on_meta(64, 2, 1 << 20, 128)
    with pytest.raises(ValueError, match=r"at most 2147483647 elements.*got 34359738368.*parts of the batch.*head_off"):
        kv_head_parts(q, k, k)
    # Keys count too, where they are more than queries.
    with pytest.raises(ValueError, match="got 2147483648"):
        kv_head_parts(on_meta(128, 1, 1, 16), *[on_meta(128, 1, 1 << 20, 16)] * 2)


def test_views_that_reach_too_far_are_copied(monkeypatch):
    """Of two batch entries the second one's heads lie behind all heads of the first; a projection holds q, k and v."""
    monkeypatch.setattr(_operands, "_FAR_REACHING", False)
    q = on_meta(2, 16, 1 << 20, 128)
    assert within_reach(heads_of_part(q, range(3, 6), 16), is_flash=False).is_contiguous()
    assert within_reach(heads_of_part(q[:1], range(3, 6), 16), is_flash=False).storage_offset() == 3 << 27
    sizes = {"vocab_size": 8, "embed_dim": 1024, "depth": 1, "num_heads": 8}
    config = fd.LongNetConfig(**sizes, segment_lengths=(2048,), dilation_rates=(1,))
    model = fd.LongNet(config).to("meta", torch.bfloat16)
    handed: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flexdilated.nn._longnet_block.attend", lambda *qkv, **_: (handed.extend(qkv[:3]), qkv[0])[1])
        model(torch.zeros(1, 1 << 20, dtype=torch.int64, device="meta"))
    assert max(map(reach, handed)) > 1 << 31, "or this test needs another model"
    assert max(reach(within_reach(x, is_flash=False)) for x in handed) < 1 << 31
    monkeypatch.setattr(_operands, "_FAR_REACHING", True)
    assert all(within_reach(x, is_flash=False) is x for x in handed)
    assert max(reach(within_reach(x, is_flash=True)) for x in handed) < 1 << 31


def reach(x: Tensor) -> int:
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def slanted(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
    """Every index moves the score, so that one taken for another shows."""
    return score * 0.5 + (q_idx - k_idx) * 0.01 * (h + 1)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_parts_are_the_whole(monkeypatch, limit):
    """Grouped heads with offsets of their own, a score_mod by head, sinks, and heads that are not the first."""
    B, H, G, N, D = 2, 6, 3, 50, 4
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, heads, N, D, dtype=torch.float64) for heads in (H, G, G))
    sinks = torch.randn(H, dtype=torch.float64)
    key = Call(PATTERN.text, H, G, N, N, 0, 0, 2, 9, 1, (16, 16))
    seen: list[Call] = []

    def stand_in(q: Tensor, k: Tensor, v: Tensor, bindings: list[Tensor], key: Call, features: Features) -> Any:
        seen.append(key)
        return run_flex(_flex_op.static_program(key, q.device), q, k, v, features, dense_flex)

    monkeypatch.setattr(_flex_op, "_flex", stand_in)
    monkeypatch.setattr(_flex_op, "MOST_ELEMENTS", limit * B * (H // G) * N * D)
    elsewhere = SimpleNamespace(device=torch.device("cuda"), shape=q.shape, numel=q.numel)
    monkeypatch.setattr(_flex_op, "kv_head_parts", lambda q, k, v, copies=1: kv_head_parts(elsewhere, k, v))
    options = {"scale": 0.5, "score_mod": slanted, "return_lse": True}
    out, lse = _flex_op.flex(q, k, v, [], key, Features(0.5, slanted, sinks))
    assert [each.num_kv_heads for each in seen] == {1: [1, 1, 1], 2: [2, 1], 3: [3]}[limit]
    where = {"head_offset": 2, "num_heads_global": 9, "enable_gqa": True}
    exact = fd.attend(q, k, v, PATTERN, engine="reference", sinks=sinks, **where, **options)
    assert_close((out, lse), exact)


@pytest.mark.parametrize("pattern", [masks.longnet(*LONGNET_5), masks.longnet(*LONGNET_5) & masks.causal()])
def test_a_million_tokens_hold_little(pattern):
    """All that a call keeps on an accelerator, tables included, is small beside q: 2 GiB in bfloat16."""
    N, H = 1 << 20, 8
    bound = pattern.bind(num_heads=H, num_queries=N, num_keys=N)
    chosen = plan(bound, device="cuda", allowed=allowed_on(torch.device("cuda")))
    options = {"num_kv_heads": H, "block_size": (128, 128), "device": torch.device("meta")}
    program = make_flex_program(chosen, Layout(N), **options)
    assert program.nbytes < (2 << 30) / 256
    assert sum(step.nbytes for step in program.steps) < 1 << 12
