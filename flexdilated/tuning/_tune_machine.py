"""Measuring a device's constants with small problems, each dominated by one kind of work."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import torch

from ..engines import side_of
from ..masks.core import Bound, Pattern, device_kind, every
from ..masks.orders import Compact, Layout
from ..masks.patterns import causal, dilated, local_window, neighborhood, random_blocks
from ..masks.planning import (
    CPU,
    BlockRates,
    Machine,
    MachineKey,
    Measured,
    Option,
    Plan,
    compact_terms,
    computed_pairs,
    shared_terms,
)
from ..masks.planning.machine import builtin_machine
from ._tune import Inputs, Run, Times, interleave, trial

_HEAD_DIM = 64
KINDS = ("neighbouring", "plain", "masked")  # in the order of the rates in BlockRates
_CHECKED_ROWS = 16
_LAUNCHES = 50
# Relative; a larger deviation from the definition is an error, not rounding.
_LARGEST_ERROR = {torch.float32: 1e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the problems: tokens and heads for block lists, half the tokens for dense ones, and keys per list."""

    num_tokens: int
    num_heads: int
    listed_keys: int


ON_CPU, ON_ACCELERATOR = Sizes(8192, 2, 1024), Sizes(32768, 16, 4096)


def usual_dtype(kind: str) -> torch.dtype:
    """The dtype in which constants of this kind of device are measured, as in `Operands.usual_on`."""
    return device_kind(kind).dtype


@dataclass(frozen=True)
class _Work:
    """A run, and its amount of work: FLOP, bytes or calls."""

    run: Run
    amount: float


def measure_machine(device: torch.device, *, seconds: float, sizes: Sizes | None = None) -> Measured:
    """The constants of this device with their spread; `seconds` bounds the timed rounds beyond the first three.

    Raises RuntimeError if an output differs from the definition, ValueError for a device that is neither a CPU nor
    CUDA.
    """
    key = MachineKey.of(device.type)
    works = _works(device, sizes or (ON_CPU if device_kind(device).on_host else ON_ACCELERATOR))
    for work in works.values():
        work.run()  # compiles, and fills caches
    timed = dict(zip(works, interleave([w.run for w in works.values()], seconds=seconds, device=device), strict=True))
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    spread = {name: round(times.spread, 3) for name, times in timed.items()}
    return Measured(key, _constants(works, timed, device), now, versions, spread)


def _constants(works: Mapping[str, _Work], timed: Mapping[str, Times], device: torch.device) -> Machine:
    builtin = builtin_machine(device.type)

    def rate(name: str) -> float:
        return works[name].amount / timed[name].median_s

    return Machine(
        dense_flops_per_s=rate("dense"),
        causal_flops_per_s=rate("causal"),
        blocks=tuple(BlockRates(n, *(rate(f"{kind} blocks of {n}") for kind in KINDS)) for n in builtin.sides),
        bytes_per_s=rate("copies"),
        launch_s=1 / rate("launch"),
        backward_ratio=max(timed["dense, forward and backward"].median_s / timed["dense"].median_s - 1, 0.1),
        calls_a_list=builtin.calls_a_list,
        source=f"measured on {MachineKey.of(device.type)}",
    )


def _works(device: torch.device, sizes: Sizes) -> dict[str, _Work]:
    builtin = builtin_machine(device.type)
    tokens, few = sizes.num_tokens, sizes.num_tokens // 2
    window = local_window(left=sizes.listed_keys - 1, right=0)
    works = {
        "dense": _attention(every(), few, sizes, device),
        "dense, forward and backward": _attention(every(), few, sizes, device, backward=True),
        "causal": _attention(causal(), few, sizes, device),
        "copies": _copies(tokens, sizes.num_heads, device),
        "launch": _launches(device),
    }
    for block in builtin.sides:
        count = max(1, sizes.listed_keys // block)
        listed = (window, random_blocks(tokens, block=block, count=count), _scattered(tokens, block))
        for kind, pattern in zip(KINDS, listed, strict=True):
            works[f"{kind} blocks of {block}"] = _attention(pattern, tokens, sizes, device, block=block)
    return works


def _scattered(tokens: int, block: int) -> Pattern:
    """Partial blocks in several parts of each row: windows in a grid whose rows are several blocks wide."""
    width = min(4 * block, tokens // 8)
    return neighborhood((tokens // width, width), (3, width // 16))


def _attention(
    pattern: Pattern, tokens: int, sizes: Sizes, device: torch.device, *, block: int = 128, backward: bool = False
) -> _Work:
    """Attention by the pattern in natural order, checked; work is the forward's FLOP as the cost model counts them."""
    bound = pattern.bind(num_heads=sizes.num_heads, num_queries=tokens, num_keys=tokens)
    (term,) = shared_terms(pattern, 1, bound, 1)
    term = replace(term, block_side=block)
    order = Layout(tokens)
    shape = {"num_kv_heads": sizes.num_heads, "head_dim": _HEAD_DIM, "dtype": usual_dtype(device.type)}
    x = Inputs.of(bound, **shape, device=device)
    option = Option(pattern, 1, "natural", (term,), CPU, order, x.operands)
    engine = device_kind(device).engine
    alone = Plan(bound, order, (term,), ((option,),))
    run = trial(alone, x, engine=engine, backward=backward, block_size=(block, block))
    _check(bound, x, run)
    return _Work(run, 4.0 * _HEAD_DIM * computed_pairs(term))


def _check(bound: Bound, x: Inputs, run: Run) -> None:
    """Raise RuntimeError unless some rows of the output agree with the definition in float64."""
    rows = torch.linspace(0, bound.num_queries - 1, _CHECKED_ROWS).long()
    head, key = torch.arange(bound.num_heads)[:, None, None], torch.arange(bound.num_keys)[None, None, :]
    allowed = bound.mask_mod()(torch.tensor(0), head, rows[None, :, None], key)
    q, k, v = x.q[0].cpu().double()[:, rows], x.k[0].cpu().double(), x.v[0].cpu().double()
    scores = (q @ k.transpose(1, 2) * _HEAD_DIM**-0.5).masked_fill(~allowed, -torch.inf)
    exact = scores.softmax(-1).nan_to_num() @ v
    error = float((run()[0][0].cpu().double()[:, rows] - exact).norm() / exact.norm())
    if not error <= _LARGEST_ERROR[x.q.dtype]:
        raise RuntimeError(f"{bound.pattern} is {error:.1e} away from its definition: nothing is measured on that")


def _launches(device: torch.device) -> _Work:
    """Many launches of a kernel with almost no work."""
    alone = _attention(every(), 16, Sizes(16, 1, 16), device)

    def run() -> tuple[torch.Tensor, ...]:
        return [alone.run() for _ in range(_LAUNCHES)][-1]

    return _Work(run, _LAUNCHES)


def _copies(tokens: int, num_heads: int, device: torch.device) -> _Work:
    """Gather one branch's q, k and v, and merge its output, for one token in 4 of each segment."""
    bound = dilated(tokens, 4).bind(num_heads=num_heads, num_queries=tokens, num_keys=tokens)
    terms = compact_terms(dilated(tokens, 4), 1, bound) or []
    sides = [side_of(term.q, Layout(tokens), term.heads) for term in terms if isinstance(term.q, Compact)]
    q, k, v = torch.zeros(3, 1, num_heads, tokens, _HEAD_DIM, dtype=usual_dtype(device.type), device=device)
    out, lse = torch.zeros(q.shape, device=device), torch.zeros(q.shape[:-1], device=device)

    def run() -> tuple[torch.Tensor, ...]:
        for each in sides:
            parts = [each.take(one) for one in (q, k, v)]
            each.merge(out, lse, parts[0], each.take(lse))
        return (out,)

    slots = sum(term.q.num_slots * term.folds * len(term.heads) for term in terms)
    return _Work(run, (4 * 2 + 3) * slots * _HEAD_DIM * q.element_size())
