"""Where the time of a call goes, by kinds of PyTorch's operators, as shares of the whole."""

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

from torch.profiler import ProfilerActivity, profile

# What an operator's own time counts as, by the first of these that is in its name.
_KINDS = {
    "kernel": ("flash_attention",),
    "moves": ("copy_", "index_select", "aten::index", "aten::cat", "clone", "constant_pad"),
    "sums": ("add_", "aten::sum"),
    "merges": ("lerp", "sigmoid", "logaddexp", "aten::sub"),
    "masks": ("where", "any", "bitwise_not", "masked_fill", "aten::eq"),
    "fills": ("fill_", "zero_"),
}
_ORDER = ("kernel", "masks", "sums", "merges", "moves", "fills")  # masked_fill_ is no fill_, index_add_ no index
KINDS = (*_KINDS, "rest")


def parts_of(prepare: Callable[[], Any], work: Callable[[Any], object], *, runs: int = 2) -> Mapping[str, float]:
    """The share of each of KINDS, of the quickest run; they sum to 1. `prepare` is not looked at.

    kernel: attention itself. moves: gathers, copies, rows put in their place. sums: gradients added up. merges: of
    branches, by lse. fills: memory that starts at zero. rest: what no listed operator spends, Python and views.
    """
    return min((_run(prepare(), work) for _ in range(runs)), key=lambda run: run[0])[1]


def _run(given: Any, work: Callable[[Any], object]) -> tuple[float, Mapping[str, float]]:
    """(seconds, shares) of one run."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        start = perf_counter()
        work(given)
        whole = perf_counter() - start
    seconds = dict.fromkeys(_KINDS, 0.0)
    for event in profiled.key_averages():
        kind = _kind(event.key)
        if kind is not None:
            seconds[kind] += event.self_cpu_time_total / 1e6
    shares = {kind: spent / whole for kind, spent in seconds.items()}
    return whole, {**shares, "rest": 1.0 - sum(shares.values())}


def _kind(name: str) -> str | None:
    return next((kind for kind in _ORDER if any(part in name for part in _KINDS[kind])), None)
