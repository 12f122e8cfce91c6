"""The odd cases that a device's kernels have to get right before any figure counts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flexdilated import masks

Expression = masks.Pattern | masks.Mixture


def _nothing(_: str) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Call:
    """One call of attend. `options` makes its tensors for a device; `keys` and `kv_heads` are q's by default."""

    pattern: Expression
    tokens: int
    dtype: str = "bfloat16"
    head_dim: int = 64
    heads: int = 4
    kv_heads: int | None = None
    keys: int | None = None
    batch: int = 1
    options: Callable[[str], Mapping[str, Any]] = _nothing
    through_lse: bool = False
    in_layout: bool = False
    transposed: bool = False
    compiled: bool = False

    @property
    def has_score_mod(self) -> bool:
        return "score_mod" in self.options("cpu")


@dataclass(frozen=True)
class Case:
    """Calls in this order in one process. `about` names the figures that it bears on, if any."""

    name: str
    calls: tuple[Call, ...]
    about: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether any way can run it: one that is no more than q, k, v and a pattern."""
        odd = (call.in_layout or call.compiled or call.through_lse or call.options("cpu") for call in self.calls)
        return not any(odd)


def _alibi(device: str) -> Mapping[str, Any]:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)

    def score_mod(score, b, h, q_idx, k_idx):
        return score - slopes[h] * (q_idx - k_idx).abs()

    return {"score_mod": score_mod}


def _sinks(device: str) -> Mapping[str, Any]:
    return {"sinks": torch.tensor([0.0, 1.5, -2.0, 4.0], device=device)}


def _lengths(device: str) -> Mapping[str, Any]:
    return {"bindings": {"lengths": torch.tensor([333, 500], device=device)}}


def _packing(*lengths: int) -> Callable[[str], Mapping[str, Any]]:
    def make(device: str) -> Mapping[str, Any]:
        ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        return {"bindings": {"documents": ids.to(device)}}

    return make


def _shifted(_: str) -> Mapping[str, Any]:
    return {"q_offset": 900, "k_offset": 256}


_WINDOW = masks.local_window(left=100, right=37)
_NARROW = masks.local_window(left=9, right=0)
_LONGNET = masks.longnet(segment_lengths=(64, 256), dilation_rates=(1, 4))
_CAUSAL = _LONGNET & masks.causal()
_UNEVEN = masks.longnet(segment_lengths=(100, 333), dilation_rates=(3, 7))
_BOTH_KINDS = (masks.local_window(left=300, right=300) | masks.global_tokens(130)) & masks.causal()
_REAL = _LONGNET & masks.lengths("lengths")
_ANEW = _CAUSAL.per_document("documents")
_WINDOW_CALL = Call(_WINDOW, 1000, "float32")


CASES = (
    Case("window, odd length", (_WINDOW_CALL,), "set"),
    Case("causal, head dim 128", (Call(masks.causal(), 777, head_dim=128),), "set"),
    Case("blocks of tokens", (Call(masks.blockwise(masks.local_window(left=2, right=1), 128), 1024),), "set"),
    Case("partial and full lists of unlike width", (Call(_BOTH_KINDS, 1500, "float32"),), "set"),
    Case("one token", (Call(_WINDOW, 1), Call(_CAUSAL, 1)), "longnet"),
    Case("no pair at all", (Call(masks.dilated(4, 8, 5), 130, heads=2),), "set"),
    Case("hidden rows, rate not dividing segment", (Call(masks.dilated(100, 7, 3), 1023, "float32", 48),), "longnet"),
    Case("mixture, causal, head dim 128", (Call(_CAUSAL, 1100, head_dim=128, heads=8),), "longnet"),
    Case("mixture, rates not dividing segments", (Call(_UNEVEN, 1000, "float32", heads=5),), "longnet"),
    Case("mixture, head dim 48", (Call(_LONGNET, 700, head_dim=48),), "longnet"),
    Case("mixture, grouped keys", (Call(_CAUSAL, 640, heads=8, kv_heads=2),), "longnet"),
    Case("gradient through lse", (Call(_LONGNET, 640, "float32", through_lse=True),), "longnet"),
    Case("later queries, later keys", (Call(_CAUSAL, 300, "float32", keys=944, options=_shifted),), "offsets"),
    Case("already in the layout", (Call(_CAUSAL, 640, in_layout=True),)),
    Case("tokens outermost in memory", (Call(_CAUSAL, 640, transposed=True),)),
    Case("other parameters, same code", (_WINDOW_CALL, replace(_WINDOW_CALL, pattern=_NARROW))),
    Case("other lengths, same pattern", tuple(Call(_CAUSAL, tokens, "float32") for tokens in (640, 515, 1290))),
    Case("in one compiled graph", (Call(_CAUSAL, 500, compiled=True),)),
    Case("sinks", (Call(_CAUSAL, 515, options=_sinks),)),
    Case("score_mod", (Call(_WINDOW, 515, "float32", options=_alibi),)),
    Case("lengths of a batch", (Call(_REAL, 500, batch=2, options=_lengths),)),
    Case("documents", (Call(_ANEW, 600, options=_packing(1, 250, 349)), Call(_ANEW, 600, options=_packing(500, 100)))),
)  # fmt: skip


def draw(call: Call, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of the output, the same on every device."""
    generator = torch.Generator().manual_seed(call.tokens)
    keys, kv_heads = call.keys or call.tokens, call.kv_heads or call.heads
    shapes = [(call.heads, call.tokens), (kv_heads, keys), (kv_heads, keys), (call.heads, call.tokens)]
    drawn = [torch.randn(call.batch, *shape, call.head_dim, generator=generator) for shape in shapes]
    q, k, v, grad = (x.to(device, getattr(torch, call.dtype)) for x in drawn)
    if call.transposed:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    return q, k, v, grad
