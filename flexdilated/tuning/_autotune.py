"""Measuring a call when it is first made, for `attend(autotune=True)`."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..engines import CallKey, TuningKey, TuningResult, chosen, remember, result_of
from ..masks.plan_cache import PatternText, debug_wanted
from ._tune import Trials, measure
from ._tune_trial import Inputs

_log = logging.getLogger("flexdilated")


def autotune(call: CallKey, q: Tensor, k: Tensor, v: Tensor, *, engine: str, has_bindings: bool) -> None:
    """Measure the ways to compute this call, unless that was done, and remember the fastest.

    Measured is forward and backward where q, k or v wants a gradient, else forward. Nothing is measured inside a graph
    that is being traced. Raises ValueError for what cannot be tuned, RuntimeError where two ways disagree.
    """
    if engine == "reference":
        raise ValueError("autotune chooses among the ways of 'tiles' and 'flex'; got engine='reference', which has one")
    if call.rate > 1:
        raise ValueError(f"autotune needs tokens in natural order; got a layout of rate {call.rate}")
    if has_bindings:
        raise ValueError("autotune needs a pattern without run-time tensors: each batch of these is another rule")
    if torch.compiler.is_compiling() or isinstance(q, FakeTensor):
        return
    backward = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    chosen(call, q)  # what is stored counts as measured
    key = TuningKey.of(call, q)
    known = result_of(key)
    if known is None or (backward and not known.backward):
        found = measure(
            call.bound(), Inputs.like(q, k, v), backward=backward, engine=engine, block_size=call.block_size
        )
        keep(key, found, backward=backward)


def keep(key: TuningKey, found: Trials, *, backward: bool) -> Path | None:
    """Compute such calls in the fastest way found from now on; returns the file where it is stored, if any."""
    if debug_wanted():
        times = ", ".join(f"{each.name} {1e3 * each.times.median_s:.3g} ms" for each in found.all)
        what = f"{key.call.num_heads:,} heads, {key.call.num_queries:,} queries, {key.call.num_keys:,} keys"
        _log.debug("autotune measured %s, %s: %s", PatternText(key.call.pattern), what, times)
    return remember(key, TuningResult(found.choice, backward))
