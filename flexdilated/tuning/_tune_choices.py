"""The ways that won a measurement, by call: kept for the process, and beside the stored constants of the device."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..engines._call_key import CallKey
from ..masks.plan_cache._debug_log import Written, is_told
from ..masks.planning._choice import Choice
from ..masks.planning.machine._machine import BUILTIN
from ..masks.planning.machine._machine_file import write_json
from ..masks.planning.machine._machine_in_use import machine_of
from ..masks.text._plain_json import read_json
from ._tune import Trials, measure
from ._tune_trial import Inputs

FORMAT, VERSION = "flexdilated choices", 1
_MOST_STORED = 1000
_log = logging.getLogger("flexdilated")


class Sight(NamedTuple):
    """A call as measuring sees it: what it computes, on which kind of device, of which dtype and head dim."""

    call: CallKey
    kind: str
    dtype: str
    head_dim: int

    @classmethod
    def of(cls, call: CallKey, q: Tensor) -> Sight:
        return cls(call, q.device.type, str(q.dtype), q.shape[-1])


class Won(NamedTuple):
    """What won, and whether the backward was measured too."""

    choice: Choice
    backward: bool


_lock = threading.Lock()
_won: dict[Sight, Won] = {}
_sources: set[str] = set()


def chosen(call: CallKey, q: Tensor) -> Choice | None:
    """The way that won for such a call; None where nothing was measured."""
    source = machine_of(q.device.type).source
    if source not in _sources:
        _load(source)
    won = _won.get(Sight.of(call, q)) if _won else None
    return None if won is None else won.choice


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
    sight = Sight.of(call, q)
    won = _won.get(sight)
    if won is None or (backward and not won.backward):
        found = measure(
            call.bound(), Inputs.like(q, k, v), backward=backward, engine=engine, block_size=call.block_size
        )
        remember(sight, found, backward=backward)


def remember(sight: Sight, found: Trials, *, backward: bool) -> Path | None:
    """Compute such calls in the way that won from now on; returns the file where that is stored, if there is one."""
    with _lock:
        _won[sight] = Won(found.choice, backward)
    if is_told():
        times = ", ".join(f"{each.name} {1e3 * each.times.median_s:.3g} ms" for each in found.all)
        what = f"{sight.call.num_heads:,} heads, {sight.call.num_queries:,} queries, {sight.call.num_keys:,} keys"
        _log.debug("autotune measured %s, %s: %s", Written(sight.call.pattern), what, times)
    path = choices_path(machine_of(sight.kind).source)
    if path is not None:
        try:
            write_json(path, _to_data())
        except OSError as error:
            _log.warning("what autotune found is kept for this process only: %s: %s", path, error.strerror)
            return None
    return path


def forget_choices() -> None:
    """Forget all that won; what is stored is read anew."""
    with _lock:
        _won.clear()
        _sources.clear()


def num_measured() -> int:
    """The calls for which a measurement chose the way, stored ones included as far as they were read."""
    return len(_won)


def choices_path(source: str) -> Path | None:
    """Beside the file of the constants in use; None where these come from no file."""
    path = Path(source)
    return path.with_suffix(".choices.json") if source != BUILTIN and path.is_file() else None


def _load(source: str) -> None:
    """Read the choices beside a file of constants, once. What is no such file is not used, which is logged."""
    path, read = choices_path(source), {}
    if path is not None and path.is_file():
        try:
            read = _from_data(read_json(path.read_bytes()))
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            _log.warning("stored choices are not used: %s holds none of this version (%s)", path, error)
    with _lock:
        for sight, won in read.items():
            _won.setdefault(sight, won)
        _sources.add(source)


def _to_data() -> dict[str, Any]:
    with _lock:
        latest = list(_won.items())[-_MOST_STORED:]
    choices = [
        {
            "call": list(sight.call),
            "at": list(sight[1:]),
            "together": won.choice.together,
            "ways": won.choice.ways,
            "backward": won.backward,
        }
        for sight, won in latest
    ]
    return {"format": FORMAT, "version": VERSION, "choices": choices}


def _from_data(data: Any) -> dict[Sight, Won]:
    if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (FORMAT, VERSION):
        raise ValueError(f"needed {FORMAT!r}, version {VERSION}")
    read = {}
    for each in data["choices"]:
        kind, dtype, head_dim = each["at"]
        pattern, *fields = each["call"]
        ways = tuple((str(layout), tuple(map(int, sides))) for layout, sides in each["ways"])
        choice = Choice(bool(each["together"]), ways)
        sight = Sight(CallKey.of(pattern, *fields), str(kind), str(dtype), int(head_dim))
        read[sight] = Won(choice, bool(each["backward"]))
    return read
