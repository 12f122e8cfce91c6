"""The check at set-up that all ranks make the same call.

Every rank computes the plans of all ranks. If their arguments differ, their messages do not match, upon which gloo ends
the process and NCCL waits. The check uses the group's key-value store, not a collective: a rank in a check cannot be
matched with another rank's transfers, and both ranks end within the group's timeout.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import DistError, DistNetworkError, ProcessGroup, get_backend_config

from ..._torch_private import graph_constant
from ...masks.core import Expression
from ...masks.patterns import names
from ._ranks import Ranks, group_of, timeout_of
from ._traffic import record

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # as in the repr of a function: it differs between processes
_AGREED = "agreed"


@dataclass
class _Checks:
    """Checks made so far by a group: the digests agreed on, and the number of checks, including failed ones."""

    agreed: set[str] = field(default_factory=set)
    count: int = 0

    @property
    def next_place(self) -> str:
        """Prefix of the next check's keys in the store; every rank makes every check, so their numbers agree."""
        return f"flexdilated/agreement/{self.count}"


_checks: WeakKeyDictionary[ProcessGroup, _Checks] = WeakKeyDictionary()


def check_agreement(
    ranks: Ranks, facts: Mapping[str, object], once: Callable[[], Mapping[str, object]] | None = None
) -> None:
    """Compare facts between ranks when they first occur; facts that have been agreed on cost one look-up.

    facts: names and hashable values, compared by `repr`. once: returns further facts that are slow to compute or may
    change later; they are compared only that first time. All ranks must make equal checks in one order.
    Raises ValueError on all ranks, with the facts that differ and the values of each rank; DistError if some rank does
    not make the check within the group's timeout.
    """
    group = group_of(ranks.name)
    checks = _checks.setdefault(group, _Checks())
    digest, written = _written(tuple(facts.items()))
    if ranks.size == 1 or digest in checks.agreed:
        return
    place = checks.next_place
    checks.count += 1
    first, written = _written((*facts.items(), *once().items())) if once is not None else (digest, written)
    try:
        verdict = _verdict(ranks, place, first, written)
    except DistNetworkError as error:
        raise DistError(
            f"rank {ranks.rank} of {ranks.size}: the check that all ranks make the same call failed: the process that "
            "keeps the group's store does not answer any more; it may have died"
        ) from error
    if verdict != _AGREED:
        raise ValueError(verdict)
    checks.agreed.add(digest)


def values_of(pattern: Expression, tensors: Sequence[Tensor]) -> dict[str, object]:
    """Digests of the values of a pattern's run-time tensors; `tensors` are ordered by name."""
    return {f"run-time tensor {name!r}": _digest(x) for name, x in zip(names(pattern), tensors, strict=True)}


def begun_elsewhere(ranks: Ranks) -> str:
    """One sentence on the ranks that wait at a check that this rank has not reached, with their facts; "" if none."""
    group = group_of(ranks.name)
    place = _checks.setdefault(group, _Checks()).next_place
    store = group.get_group_store()
    try:
        there = [rank for rank in ranks.others if store.check([f"{place}/{rank}"])]
        calls = [f"rank {rank}: {as_call(store.get(f'{place}/{rank}').decode())}" for rank in there]
    except RuntimeError:  # the process that serves the store may be the one that died
        return ""
    return f"Meanwhile other ranks have begun a call with other arguments ({'; '.join(calls)})." if calls else ""


def check_device(ranks: Ranks, tensor: Tensor) -> None:
    """Raises ValueError if the ranks cannot send this tensor from its device."""
    config = _backends(ranks.name)
    kinds = [part.partition(":")[0] for part in config.split(",")]
    if tensor.device.type != ranks.device_type or tensor.device.type not in kinds:
        raise ValueError(
            f"tensors must be on the mesh's kind of device, and its process group must serve that kind; got a tensor "
            f"on {tensor.device.type}, a mesh of {ranks.device_type} devices and a process group of {config}"
        )


@graph_constant  # torch.compile cannot trace the look-up of a group
def _backends(group: str) -> str:
    """Backend of each kind of device, such as "cpu:gloo,cuda:nccl"."""
    return get_backend_config(group_of(group))


def _digest(x: Tensor) -> str:
    values = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tuple(x.shape)} of {x.dtype} with digest {blake2b(values, digest_size=8).hexdigest()}"


@lru_cache(maxsize=1024)
def _written(facts: tuple[tuple[str, object], ...]) -> tuple[str, str]:
    """(digest of the facts, the facts as JSON)."""
    text = json.dumps({name: _ADDRESS.sub("", repr(value)) for name, value in facts})
    return blake2b(text.encode(), digest_size=16).hexdigest(), text


def _verdict(ranks: Ranks, place: str, digest: str, written: str) -> str:
    """The verdict for all ranks: each posts its facts and the last compares, so a rank makes only a few requests."""
    store = group_of(ranks.name).get_group_store()
    store.set(f"{place}/{ranks.rank}", written)
    store.add(f"{place}/{digest}", 1)
    if store.add(f"{place}/come", 1) == ranks.size:
        verdict = _AGREED
        if store.add(f"{place}/{digest}", 0) != ranks.size:
            verdict = disagreement([json.loads(store.get(f"{place}/{rank}")) for rank in range(ranks.size)])
        store.set(f"{place}/verdict", verdict)
    else:
        _wait_for_verdict(ranks, place, written)
        verdict = store.get(f"{place}/verdict").decode()
    if store.add(f"{place}/read", 1) == ranks.size and verdict == _AGREED:
        for key in (*range(ranks.size), digest, "come", "verdict", "read"):
            store.delete_key(f"{place}/{key}")
    record("set-up", sent=len(written), received=len(verdict))
    return verdict


def _wait_for_verdict(ranks: Ranks, place: str, written: str) -> None:
    timeout = timeout_of(ranks)
    try:
        group_of(ranks.name).get_group_store().wait([f"{place}/verdict"], timeout)
    except RuntimeError as error:  # FileStore raises no specific class on timeout
        raise DistError(
            f"rank {ranks.rank} of {ranks.size}: the check that all ranks make the same call failed: "
            f"{_who_is_absent(ranks, place)} did not answer within the timeout of the process group, "
            f"{timeout.total_seconds():g} s. A peer may have died or hang, or not make this rank's new call: "
            f"{as_call(written)}"
        ) from error


def _who_is_absent(ranks: Ranks, place: str) -> str:
    store = group_of(ranks.name).get_group_store()
    try:
        absent = [rank for rank in ranks.others if not store.check([f"{place}/{rank}"])]
    except RuntimeError:
        return "the process that keeps the group's store"
    return named(absent) or "a rank that came"


_SHOWN = 8  # values, or runs of ranks, in a message, in case many ranks differ


def disagreement(facts: Sequence[dict[str, str]]) -> str:
    """Error text on facts that differ and the ranks with each value; facts[rank] maps names to that rank's values."""
    differing = []
    for name in dict.fromkeys(name for has in facts for name in has):
        holders: defaultdict[str, list[int]] = defaultdict(list)
        for rank, has in enumerate(facts):
            holders[has.get(name, "nothing")].append(rank)
        if len(holders) > 1:
            differing.append(f"{name}: {_who_has_what(holders)}")
    return f"all ranks must make the same call; they disagree in {'. And in '.join(differing)}"


def _who_has_what(holders: dict[str, list[int]]) -> str:
    """Text of the values and the ranks that have them, most frequent value first."""
    ordered = sorted(holders.items(), key=lambda holder: -len(holder[1]))
    shown = [f"{named(who)} {'has' if len(who) == 1 else 'have'} {value}" for value, who in ordered[:_SHOWN]]
    return "; ".join(shown + [f"{len(ordered) - _SHOWN} more values"] * (len(ordered) > _SHOWN))


def named(ranks: Sequence[int]) -> str:
    """Text of ascending ranks with runs joined, such as "ranks 0 to 2, 5"; "" for no ranks."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    shown = ", ".join(texts[:_SHOWN] + [f"{len(texts) - _SHOWN} more runs"] * (len(texts) > _SHOWN))
    return shown and f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def as_call(facts: str) -> str:
    """Facts in JSON as keyword arguments, such as "num_tokens=8, dtype=torch.float32"."""
    return ", ".join(f"{name}={value}" for name, value in json.loads(facts).items())
