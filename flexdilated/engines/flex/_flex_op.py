"""The flex engine's entry: its program from the cache, or, inside torch.compile, from a store the trace can read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...masks.core import own_modes
from .._call_key import CallKey
from .._flat_op import flat_op
from .._operands import readable
from .._score_mod import ScoreMod
from .._tuned import chosen
from ._flex import FlexProgram, run_flex
from ._flex_parts import heads_of_part, joined, key_of_part, kv_head_parts
from ._flex_program import blank_program, run_time_program, static_program
from ._flex_tables import flex_tables, with_tables

# Programs that compiled graphs refer to: a graph reads its tables from here, at every run. The oldest go first; a
# graph whose program has gone is traced anew.
_traced: dict[tuple[CallKey, tuple[tuple[int, ...], ...], str], FlexProgram] = {}
_MOST_TRACED = 256


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bindings: list[Tensor],
    key: CallKey,
    *,
    scale: float,
    score_mod: ScoreMod | None,
    sinks: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """(out, lse if asked for). Works eagerly, where each term is compiled alone, and under fullgraph=True."""
    if q.device.type == "cpu":
        # FlexAttention refuses here whatever requires a gradient, even under torch.no_grad().
        q, k, v = q.detach(), k.detach(), v.detach()
    q, k, v = readable(q), readable(k), readable(v)
    options = {"scale": scale, "score_mod": score_mod, "return_lse": return_lse}
    parts = kv_head_parts(q, k)
    if len(parts) == 1:
        return _flex(q, k, v, bindings, key, sinks=sinks, **options)
    found = []
    for part in parts:
        some_q, some_k, some_v = (heads_of_part(x, part, k.shape[1]) for x in (q, k, v))
        some_sinks = None if sinks is None else heads_of_part(sinks, part, k.shape[1])
        found.append(_flex(some_q, some_k, some_v, bindings, key_of_part(key, part), sinks=some_sinks, **options))
    return joined(found)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, bindings: list[Tensor], key: CallKey, **options: Any
) -> tuple[Tensor, Tensor | None]:
    if torch.compiler.is_compiling():
        # Tracing can read a plain dict but not build a plan; the op's shape rule runs while tracing, and can.
        _prepare(q, bindings, *key)
        program = _traced[(key, tuple([tuple(each.shape) for each in bindings]), q.device.type)]
        program = with_tables(program, flex_tables(q, bindings, *key)) if bindings else program
        return run_flex(program, q, k, v, direct=True, **options)
    if bindings:
        program = run_time_program(key, q.device, bindings, len(q))
    else:
        program = static_program(key, q.device, chosen(key, q))
    return run_flex(program, q, k, v, direct=False, **options)


@flat_op("flexdilated::prepare_flex")
def _prepare(q: Tensor, bindings: list[Tensor], key: CallKey) -> Tensor:
    """Nothing at run time; while tracing, its shape rule puts the program of these sizes where the trace finds it."""
    return q.new_empty(0)


@_prepare.register_fake
def _(q, bindings, *key):
    found, batch = CallKey.of(*key), int(q.shape[0])
    shapes = tuple(tuple(map(int, each.shape)) for each in bindings)
    if (found, shapes, q.device.type) not in _traced:
        with own_modes():
            if bindings:
                made = blank_program(found, q.device, bindings, batch)
            else:
                made = static_program(found, q.device, chosen(found, q))
        while len(_traced) >= _MOST_TRACED:
            del _traced[next(iter(_traced))]
        _traced[(found, shapes, q.device.type)] = made
    return q.new_empty(0)
