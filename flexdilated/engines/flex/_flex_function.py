"""flex_attention compiled: a function of its own for each use, so that none meets torch's limit of compilations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import pad

from ...masks.planning import Term

Call = Callable[..., Any]

# Functions made to compile, by device type.
_made: Counter[str] = Counter()


@lru_cache(maxsize=256)
def compiled_flex(term: Term, block_size: tuple[int, int], device: torch.device) -> Call:
    """flex_attention compiled for a term, under code objects of its own, which outlive the tables in the plan cache.

    torch counts recompilations by code object and, past a limit that all callers of it share, gives up. So each
    term has its own, and on CPU each size of its operands: sizes are static there, where dynamic ones can
    generate C++ that does not build.
    """
    own: dict[Hashable, Call] = {}

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        if device.type == "cpu":
            q, k = widened(q), widened(k)
        kind = (q.shape, k.shape, q.dtype, options["scale"]) if device.type == "cpu" else q.dtype
        if kind not in own:
            own[kind] = _compiled(device)
        return own[kind](q, k, v, **options)

    return call


def widened(x: Tensor) -> Tensor:
    """For CPU kernels: head dims below 24 are filled up with zeros.

    For fewer, torch 2.13's template multiplies 16 keys at once where a ragged end leaves any multiple of its vectors'
    length: it reads beyond the keys and writes over the maxima of the first queries, whose results become 0 or NaN.
    """
    return pad(x, (0, 24 - x.shape[-1])) if x.shape[-1] < 24 else x


def num_flex_functions() -> int:
    """How many functions have been made to compile so far."""
    return _made.total()


def _compiled(device: torch.device) -> Call:
    _made[device.type] += 1
    code = _call_flex.__code__.replace(co_name=f"flex_attention_on_{device.type}")
    own = FunctionType(code, _call_flex.__globals__, code.co_name)
    return torch.compile(own, fullgraph=True, dynamic=False if device.type == "cpu" else None)


def _call_flex(q, k, v, **options):
    if not torch.compiler.is_compiling():
        raise RuntimeError(
            "engine 'flex' needs torch.compile, which is switched off here or gave up (TORCH_COMPILE_DISABLE, "
            "TORCHDYNAMO_DISABLE, set_stance and suppress_errors do that): uncompiled, flex_attention forms all pairs. "
            "On CPU engine='tiles' compiles nothing; engine='reference' is dense, for small inputs"
        )
    return flex_attention(q, k, v, **options)
