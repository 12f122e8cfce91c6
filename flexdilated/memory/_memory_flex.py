"""The flex engine as a function of q, k and v in which every allocation outside the compiled kernel can be seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engines import CallKey, FlexStep, allowed_on, make_flex_program, run_flex
from ..masks.core import Expression
from ..masks.planning import plan

_SIDES = (128, 128)  # the engine's own


def flex_attention_of(
    key: CallKey, rule: Expression, *, device: str
) -> tuple[Callable[..., tuple[Tensor, Tensor]], int]:
    """(q, k, v) -> (out, lse) by the engine's own steps, with a stand-in for the kernel; and its tables' bytes.

    The plan is that of the device; tables and rows are built on the CPU, where no such device is needed.
    """
    best = plan(key.bound(rule), device=device, allowed=allowed_on(torch.device(device)))
    sizes = {"num_kv_heads": key.num_kv_heads, "block_size": _SIDES}
    program = make_flex_program(best, key.layout, **sizes, device=torch.device("cpu"))
    program = replace(program, steps=tuple(map(_with_stand_in, program.steps)))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = run_flex(program, q, k, v, scale=1.0, return_lse=True, direct=False)
        assert lse is not None
        return out, lse

    return attention, program.nbytes


class _Aux(NamedTuple):
    lse: Tensor


def _with_stand_in(step: FlexStep) -> FlexStep:
    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, _Aux]:
        out, lse = _Kernel.apply(q, k, v)
        return out, _Aux(lse)

    return replace(step, call=call)


class _Kernel(torch.autograd.Function):
    """What FlexAttention keeps and returns: out as q lies, lse in float32, and in the backward delta besides."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, _, lse = ctx.saved_tensors
        delta = torch.empty_like(lse)
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        del delta
        return grads
