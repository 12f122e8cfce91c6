"""The check at set-up that all ranks make the same call.

Every rank computes everyone's plan, so ranks that disagree send what nobody expects, which gloo answers by ending the
process and NCCL by waiting. The check goes through the group's key-value store, not through a collective: a rank that
checks what the others do not never meets their transfers, and both sides end within the group's timeout.
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

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # of a function, say: it differs from process to process
_AGREED = "agreed"


@dataclass
class _Checks:
    """What a group's ranks have compared so far: the digests agreed on, and the number of checks, failed ones too."""

    agreed: set[str] = field(default_factory=set)
    count: int = 0

    @property
    def next_place(self) -> str:
        """Where in the store the next check takes place; checks are numbered, as all ranks make the same ones."""
        return f"flexdilated/agreement/{self.count}"


_checks: WeakKeyDictionary[ProcessGroup, _Checks] = WeakKeyDictionary()


def check_agreement(
    ranks: Ranks, facts: Mapping[str, object], once: Callable[[], Mapping[str, object]] | None = None
) -> None:
    """Compare the facts of all ranks, the first time that these facts come; afterwards it costs a look-up.

    facts: names and hashable values; what counts is how a value is written (`repr`). once: more facts, which are slow
    to find, or may change later, and are compared that first time only. Every rank must come here in the same order.
    Raises ValueError, on all ranks, which says which facts differ and who has what; DistError if not all ranks have
    come within the group's timeout.
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
    """Digests of the values of a pattern's run-time tensors, which come in the order of their names."""
    return {f"run-time tensor {name!r}": _digest(x) for name, x in zip(names(pattern), tensors, strict=True)}


def begun_elsewhere(ranks: Ranks) -> str:
    """Which ranks are at a check that this rank has not come to, and with which facts: one sentence, or ""."""
    group = group_of(ranks.name)
    place = _checks.setdefault(group, _Checks()).next_place
    store = group.get_group_store()
    try:
        there = [rank for rank in ranks.others if store.check([f"{place}/{rank}"])]
        calls = [f"rank {rank}: {as_call(store.get(f'{place}/{rank}').decode())}" for rank in there]
    except RuntimeError:  # the process that keeps the store may be the one that died
        return ""
    return f"Meanwhile other ranks have begun a call with other arguments ({'; '.join(calls)})." if calls else ""


def check_device(ranks: Ranks, tensor: Tensor) -> None:
    """Raises ValueError if the ranks cannot send this tensor, because of where it lies."""
    config = _backends(ranks.name)
    kinds = [part.partition(":")[0] for part in config.split(",")]
    if tensor.device.type != ranks.device_type or tensor.device.type not in kinds:
        raise ValueError(
            f"tensors must be on the mesh's kind of device, and its process group must serve that kind; got a tensor "
            f"on {tensor.device.type}, a mesh of {ranks.device_type} devices and a process group of {config}"
        )


@graph_constant  # torch.compile cannot trace the look-up of a group
def _backends(group: str) -> str:
    """What serves which kind of device: "cpu:gloo,cuda:nccl"."""
    return get_backend_config(group_of(group))


def _digest(x: Tensor) -> str:
    values = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tuple(x.shape)} of {x.dtype} with digest {blake2b(values, digest_size=8).hexdigest()}"


@lru_cache(maxsize=1024)
def _written(facts: tuple[tuple[str, object], ...]) -> tuple[str, str]:
    """A digest of the facts, and the facts themselves as text."""
    text = json.dumps({name: _ADDRESS.sub("", repr(value)) for name, value in facts})
    return blake2b(text.encode(), digest_size=16).hexdigest(), text


def _verdict(ranks: Ranks, place: str, digest: str, written: str) -> str:
    """All ranks' verdict: each posts its facts, and the last to come compares, so a rank's share is a few requests."""
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
    except RuntimeError as error:  # a FileStore has no class of its own for it
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


_SHOWN = 8  # values, or runs of ranks: where every rank of many has its own, a few say enough


def disagreement(facts: Sequence[dict[str, str]]) -> str:
    """Which facts differ, and which ranks have what; facts[rank] holds what the rank has written, by name."""
    differing = []
    for name in dict.fromkeys(name for has in facts for name in has):
        holders: defaultdict[str, list[int]] = defaultdict(list)
        for rank, has in enumerate(facts):
            holders[has.get(name, "nothing")].append(rank)
        if len(holders) > 1:
            differing.append(f"{name}: {_who_has_what(holders)}")
    return f"all ranks must make the same call; they disagree in {'. And in '.join(differing)}"


def _who_has_what(holders: dict[str, list[int]]) -> str:
    """The majority first."""
    ordered = sorted(holders.items(), key=lambda holder: -len(holder[1]))
    shown = [f"{named(who)} {'has' if len(who) == 1 else 'have'} {value}" for value, who in ordered[:_SHOWN]]
    return "; ".join(shown + [f"{len(ordered) - _SHOWN} more values"] * (len(ordered) > _SHOWN))


def named(ranks: Sequence[int]) -> str:
    """Ascending ranks in words, runs of them as such: "ranks 0 to 2, 5"; "" if there are none."""
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
    """Written facts as keywords: "num_tokens=8, dtype=torch.float32"."""
    return ", ".join(f"{name}={value}" for name, value in json.loads(facts).items())
