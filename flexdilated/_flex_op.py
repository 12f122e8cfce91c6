"""The flex engine's entry: its program from the cache, or, inside torch.compile, from a store the trace can read."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ._call_key import CallKey
from ._flex import FlexProgram, make_flex_program, run_flex
from ._score_mod import ScoreMod
from .masks import cache
from .masks._options import Allowed
from .masks._planner import plan

# Programs that compiled graphs refer to, kept for as long as the process: a graph reads its tables from here.
_traced: dict[tuple[CallKey, str], FlexProgram] = {}


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
        _prepare(q, *key)
        program = _traced[(key, q.device.type)]
        return run_flex(program, q, k, v, direct=True, **options)
    return run_flex(_program(key, q.device), q, k, v, direct=False, **options)


@torch.library.custom_op("flexdilated::prepare_flex", mutates_args=())
def _prepare(
    q: Tensor,
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
def _(q, *key):
    *sizes, block_size = key
    found = CallKey._make((sizes[0], *(int(size) for size in sizes[1:]), tuple(block_size)))
    if (found, q.device.type) not in _traced:
        with unset_fake_temporarily():
            _traced[(found, q.device.type)] = _program(found, q.device)
    return q.new_empty(0)


def _program(key: CallKey, device: torch.device) -> FlexProgram:
    """The cached program for these sizes on this device."""

    def build() -> FlexProgram:
        # Terms that share rows are merged by their lse, which FlexAttention on CPU does not give.
        allowed = Allowed(shared_rows=device.type != "cpu", windows=False)
        best = plan(key.bound(), device=device, layout=key.layout, allowed=allowed)
        sides = key.block_size
        return make_flex_program(best, key.layout, num_kv_heads=key.num_kv_heads, block_size=sides, device=device)

    return cache().get(
        ("flex", key, device), build, lambda program: program.nbytes, pattern=key.pattern, device=device
    )
