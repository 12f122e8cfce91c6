"""Record of torch.compile in this process: graphs, recompilations, graph breaks, and frames left to eager."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from .._torch_private import compiler_records
from ..engines import num_flex_functions

# Names under which torch sums its seconds: compilation of forward frames, and of backwards compiled later.
_TIMED = ("_compile.compile_inner", "backward._backward_impl")
_SHOWN = 100  # characters of a reason that are shown


@dataclass(frozen=True)
class Compilation:
    """One function that torch compiled, or tried to compile.

    reason: why earlier compilations did not serve; None for the first one. failure: why torch gave up; None if it did
    not.
    """

    function: str
    reason: str | None
    failure: str | None
    seconds: float


@dataclass(frozen=True)
class Compilations:
    """Record of torch.compile in this process, for all callers, since it started or its counters were cleared.

    graphs: compiled, counting forward and backward as one. found_on_disk: number of these loaded from torch's cache of
        an earlier process.
    seconds: spent on compiling.
    graph_breaks: (reason, times), the most frequent first.
    left_to_eager: how often torch gave up compiling a function, which then runs eagerly. That includes functions that
        exceed `recompile_limit`.
    flex_functions: functions compiled for eager calls of engine "flex", which never runs uncompiled.
    latest: the last 64 compilations, which is what torch remembers.
    """

    graphs: int
    found_on_disk: int
    seconds: float
    graph_breaks: tuple[tuple[str, int], ...]
    left_to_eager: int
    flex_functions: int
    latest: tuple[Compilation, ...]

    @property
    def num_graph_breaks(self) -> int:
        """Number of graph breaks, summed over reasons."""
        return sum(times for _, times in self.graph_breaks)

    @property
    def recompilations(self) -> tuple[Compilation, ...]:
        """Entries of `latest` that recompiled a function."""
        return tuple(each for each in self.latest if each.reason is not None and each.failure is None)

    @property
    def failures(self) -> tuple[Compilation, ...]:
        """Entries of `latest` in which torch gave up."""
        return tuple(each for each in self.latest if each.failure is not None)

    def __str__(self) -> str:
        """A table of the numbers, and a table of the reasons if any."""
        return "\n\n".join(text for text in (self.numbers(), self._reasons()) if text)

    def numbers(self) -> str:
        """The table of the numbers alone."""
        rows = [
            ("graphs compiled", f"{self.graphs:,}"),
            ("found on disk", f"{self.found_on_disk:,}"),
            ("time to compile", f"{self.seconds:,.1f} s"),
            ("compiled again", f"{len(self.recompilations):,}"),
            ("graph breaks", f"{self.num_graph_breaks:,}"),
            ("left to eager", f"{self.left_to_eager:,}"),
            ("flex functions", f"{self.flex_functions:,}"),
        ]
        return tabulate(rows, tablefmt="plain", disable_numparse=True, colalign=("left", "right"))

    def _reasons(self) -> str:
        rows = [("compiled again", each.function, _short(each.reason)) for each in self.recompilations]
        rows += [("left to eager", each.function, _short(each.failure)) for each in self.failures]
        rows += [("graph break", f"{times} times", _short(reason)) for reason, times in self.graph_breaks]
        return tabulate(rows, ("what", "where", "why"), disable_numparse=True) if rows else ""


def compilations() -> Compilations:
    """Record of torch.compile in this process so far.

    Reads torch's own counters, which other code may clear; `torch._dynamo.utils.counters.clear()` resets all counts
    except seconds, flex_functions and latest.

    >>> compilations = fd.compilations()  # print it
    """
    found = compiler_records()
    if found is None:
        return Compilations(0, 0, 0.0, (), 0, num_flex_functions(), ())
    counters, seconds, records = found
    frames = counters.get("frames", {})
    breaks = sorted(counters.get("graph_break", {}).items(), key=lambda item: -item[1])
    return Compilations(
        graphs=counters.get("stats", {}).get("unique_graphs", 0),
        found_on_disk=counters.get("aot_autograd", {}).get("autograd_cache_hit", 0),
        seconds=sum(sum(seconds.get(name, ())) for name in _TIMED),
        graph_breaks=tuple(breaks),
        left_to_eager=frames.get("total", 0) - frames.get("ok", 0),
        flex_functions=num_flex_functions(),
        latest=tuple(_latest([record for record in records if record.is_forward is not False])),
    )


def _latest(records: list[Any]) -> Iterator[Compilation]:
    """torch records a function's name when it compiles it, not when it gives up, so names come from earlier records."""
    names: dict[str, str] = {}
    for record in records:
        if record.co_name:
            names[_frame(record)] = f"{record.co_name} ({record.co_filename}:{record.co_firstlineno})"
        where = names.get(_frame(record), "a function not named")
        failure = None if record.fail_type is None else f"{record.fail_type}: {record.fail_reason}"
        yield Compilation(where, record.recompile_reason, failure, record.entire_frame_compile_time_s or 0.0)


def _frame(record: Any) -> str:
    """Number of the function: its compile id without the count of compilations, "3" for "3/1"."""
    return (record.compile_id or "").rpartition("/")[0]


def _short(reason: str | None) -> str:
    """First line, cut to _SHOWN characters."""
    line = (reason or "").partition("\n")[0]
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 1]}…"
