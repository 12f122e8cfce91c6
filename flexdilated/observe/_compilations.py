"""What torch.compile has done in this process: graphs, compilations again, graph breaks, frames it gave up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from .._torch_private import compiler_records
from ..engines import num_flex_functions

# Names under which torch adds up its seconds: of what runs forward, and of backwards that it compiles later.
_TIMED = ("_compile.compile_inner", "backward._backward_impl")
_SHOWN = 100  # characters of a reason


@dataclass(frozen=True)
class Compilation:
    """One function that torch compiled, or tried to.

    `reason` says why what was compiled before did not serve, None for the first time; `failure` says why torch
    gave up, None where it did not.
    """

    function: str
    reason: str | None
    failure: str | None
    seconds: float


@dataclass(frozen=True)
class Compilations:
    """torch.compile in this process, whoever called it, since it started or its counters were cleared.

    graphs: compiled, forward and backward as one. found_on_disk: of these, taken from torch's cache of an earlier
        process.
    seconds: spent on compiling.
    graph_breaks: (reason, times), the most frequent first.
    left_to_eager: times that torch gave a function up, which then runs as it is written. Past `recompile_limit`
        compilations of one function it does that too.
    flex_functions: those that engine "flex", called eagerly, has had compiled. It never runs one uncompiled.
    latest: what torch remembers of the compilations one by one: the last 64 of them.
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
        """All of them, for whatever reason."""
        return sum(times for _, times in self.graph_breaks)

    @property
    def recompilations(self) -> tuple[Compilation, ...]:
        """Those of the latest that compiled a function again."""
        return tuple(each for each in self.latest if each.reason is not None and each.failure is None)

    @property
    def failures(self) -> tuple[Compilation, ...]:
        """Those of the latest that torch gave up."""
        return tuple(each for each in self.latest if each.failure is not None)

    def __str__(self) -> str:
        """A table of the numbers, and one of the reasons if there are any."""
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
    """What torch.compile has done so far in this process.

    Reads torch's own counters, which other code may clear; `torch._dynamo.utils.counters.clear()` starts the
    counts anew, but for the seconds, the flex functions and the latest.

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
    """torch names a function where it compiles it; where it gives one up, the time before tells the name."""
    names: dict[str, str] = {}
    for record in records:
        if record.co_name:
            names[_frame(record)] = f"{record.co_name} ({record.co_filename}:{record.co_firstlineno})"
        where = names.get(_frame(record), "a function not named")
        failure = None if record.fail_type is None else f"{record.fail_type}: {record.fail_reason}"
        yield Compilation(where, record.recompile_reason, failure, record.entire_frame_compile_time_s or 0.0)


def _frame(record: Any) -> str:
    """Which function: an id such as "3/1" is its number, and how often it was compiled before."""
    return (record.compile_id or "").rpartition("/")[0]


def _short(reason: str | None) -> str:
    """The first line, cut to what a terminal shows."""
    line = (reason or "").partition("\n")[0]
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 1]}…"
