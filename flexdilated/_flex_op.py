"""The flex engine's entry: its program from the cache, or, inside torch.compile, from a store the trace can read."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ._call_key import CallKey
from ._flex import FlexProgram, run_flex
from ._flex_program import blank_program, run_time_program, static_program
from ._flex_tables import flex_tables, with_tables
from ._score_mod import ScoreMod

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
    options = {"scale": scale, "score_mod": score_mod, "sinks": sinks, "return_lse": return_lse}
    if torch.compiler.is_compiling():
        # Tracing can read a plain dict but not build a plan; the op's shape rule runs while tracing, and can.
        _prepare(q, bindings, *key)
        program = _traced[(key, tuple([tuple(each.shape) for each in bindings]), q.device.type)]
        program = with_tables(program, flex_tables(q, bindings, *key)) if bindings else program
        return run_flex(program, q, k, v, direct=True, **options)
    program = run_time_program(key, q.device, bindings, len(q)) if bindings else static_program(key, q.device)
    return run_flex(program, q, k, v, direct=False, **options)


@torch.library.custom_op("flexdilated::prepare_flex", mutates_args=())
def _prepare(
    q: Tensor,
    bindings: list[Tensor],
    pattern: str,
    num_heads: int,
    num_kv_heads: int,
    num_queries: int,
    num_keys: int,
    q_offset: int,
    k_offset: int,
    head_offset: int,
    num_heads_global: int,
    rate: int,
    block_size: list[int],
) -> Tensor:
    """Nothing at run time; while tracing, its shape rule puts the program of these sizes where the trace finds it."""
    return q.new_empty(0)


@_prepare.register_fake
def _(q, bindings, *key):
    found, batch = CallKey.of(*key), int(q.shape[0])
    shapes = tuple(tuple(map(int, each.shape)) for each in bindings)
    if (found, shapes, q.device.type) not in _traced:
        with unset_fake_temporarily():
            made = blank_program(found, q.device, bindings, batch) if bindings else static_program(found, q.device)
        while len(_traced) >= _MOST_TRACED:
            del _traced[next(iter(_traced))]
        _traced[(found, shapes, q.device.type)] = made
    return q.new_empty(0)
