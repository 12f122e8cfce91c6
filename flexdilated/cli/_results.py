"""Results of a demo run, as the one table and as JSON."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from ..masks.plan_cache._cache_stats import CacheStats
from ._attention_time import LONGEST_DENSE, AttentionTime
from ._out import replace


@dataclass(frozen=True, kw_only=True)
class Results:
    """What a run found. Bits are per byte, on the validation windows.

    Densities are shares of all (query, key) pairs: of those that branches allow, once for each branch, and
    of those in computed blocks; `waste` is the second over the first. `time` is None where it was not taken.
    """

    before: float
    after: float
    unigram: float
    bigram: float
    parameters: int
    steps: int
    seconds: float
    ended_by: str
    context: int
    time: AttentionTime | None
    density: float
    block_density: float
    waste: float
    cache: CacheStats


def table(results: Results) -> str:
    """Every result with its name, for people."""
    rows = [*_bits_rows(results), *_training_rows(results), *_time_rows(results)]
    rows += [*_density_rows(results), *_cache_rows(results.cache)]
    return tabulate(rows, headers=["measure", "value"], disable_numparse=True, colalign=("left", "right"))


def save_report(path: Path, results: Results, *, config: dict[str, Any], losses: list[float]) -> None:
    """Everything the table shows, what it came from, and the loss of every step, as JSON."""
    report = {"config": config, "versions": versions(), "results": asdict(results), "history": losses}
    text = json.dumps(report, indent=2)
    replace(path, lambda partial: partial.write_text(text + "\n", encoding="utf-8"))


def versions() -> dict[str, str]:
    """What the numbers depend on besides the configuration."""
    return {
        "flexdilated": _own_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()),
    }


def _own_version() -> str:
    try:
        return version("flexdilated")
    except PackageNotFoundError:
        return "a checkout that is not installed"


def _bits_rows(results: Results) -> list[list[str]]:
    return [
        ["validation bits per byte, before", f"{results.before:.3f}"],
        ["validation bits per byte, after", f"{results.after:.3f}"],
        ["byte unigram", f"{results.unigram:.3f}"],
        ["byte bigram", f"{results.bigram:.3f}"],
        ["better than the unigram by", f"{results.unigram - results.after:.3f}"],
        ["better than the bigram by", f"{results.bigram - results.after:.3f}"],
    ]


def _training_rows(results: Results) -> list[list[str]]:
    return [
        ["parameters", f"{results.parameters:,}"],
        ["training steps", f"{results.steps:,}"],
        ["training bytes", f"{results.steps * results.context:,}"],
        ["training seconds", f"{results.seconds:.0f}"],
        ["training ended by", results.ended_by],
    ]


def _time_rows(results: Results) -> list[list[str]]:
    what = f"attention forward + backward at {results.context:,} tokens"
    if results.time is None:
        return [[what, f"not timed (interrupted, or above {LONGEST_DENSE:,} tokens)"]]
    return [
        [f"{what}, LongNet", f"{results.time.longnet_ms:.1f} ms"],
        [f"{what}, dense SDPA", f"{results.time.dense_ms:.1f} ms"],
        ["LongNet faster by", f"{results.time.speed_up:.1f}x"],
    ]


def _density_rows(results: Results) -> list[list[str]]:
    return [
        ["density, pairs of all pairs", f"{results.density:.3%}"],
        ["density, computed in blocks", f"{results.block_density:.3%}"],
        ["computed / useful pairs", f"{results.waste:.3f}"],
    ]


def _cache_rows(stats: CacheStats) -> list[list[str]]:
    return [
        ["plan cache, hits and misses", f"{stats.hits:,} and {stats.misses:,} ({stats.hit_rate:.1%} hits)"],
        ["plan cache, entries", f"{stats.entries:,}, {stats.bytes / 2**20:.2f} MiB"],
        ["plan cache, time to build", f"{1e3 * stats.build_seconds:.0f} ms"],
    ]
