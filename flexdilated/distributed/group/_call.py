"""Arguments of a call over ranks, the check that they are equal on all ranks, and sums of attention over parts of keys.

Each rank derives from its own arguments the messages that it sends and expects. If arguments differ between ranks,
messages do not match: gloo then ends the process, and NCCL waits. So ranks compare their arguments before any message,
through the group's key-value store, and not by a collective, which the backend could match with a transfer that another
rank has begun. Each check therefore ends, on every rank, within the group's timeout.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from operator import index
from typing import NamedTuple, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import DistError, ProcessGroup

from ...engines import (
    Call,
    PlacedCall,
    WholeRows,
    add_sinks,
    merge_,
    read_constants,
    sum_dtype,
    write_constants,
)
from ...masks.core import Expression, require_probability
from ...masks.orders import Placement
from ...masks.patterns import names
from ...masks.text import read_text
from ._ranks import Ranks, group_of, record, timeout_of

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # as in the repr of a function: it differs between processes
_AGREED = "agreed"
_SHOWN = 8  # ranks, and calls, that an error names


class PlainCall(NamedTuple):
    """Validated arguments of attention over ranks, as plain values; only `pool` may differ between ranks.

    pattern: in JSON.
    scale: factor on the scores.
    head_offset: index of this device's first query head among all num_heads_global.
    block_size: (queries, keys) of a block, or () for the default.
    sharding: `Sharding.numbers()`.
    group: name of the process group.
    codec: encoding of keys and values in messages, or "auto"; None: their dtype.
    error_bound: largest relative error of a key or value vector with codec "auto"; 0 for other codecs.
    pool: name of a buffer pool, "auto", or "" for none.
    dropout_p: probability of dropping an attention weight; if it is above 0, custom ops take the seed of dropout as the
        last item of their `bindings`.
    """

    pattern: str
    scale: float
    head_offset: int
    num_heads_global: int
    engine: str
    block_size: tuple[int, ...]
    sharding: tuple[int, ...]
    group: str
    codec: str | None
    error_bound: float
    pool: str
    dropout_p: float = 0.0

    @property
    def constants(self) -> str:
        """The values as one text, which custom ops take as argument `constants`; `of` reads it."""
        return write_constants(self[:1], self[1:])

    @classmethod
    def of(cls, constants: str) -> Self:
        """Return the call whose property `constants` is this text."""
        return cls._make(read_constants(constants))

    def fake_rows(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return uninitialised (out, lse) for q (B, H, L, D), for the fake implementations of ops.

        Raises ValueError if the pattern is for another number of heads, which `attend` does not check in a trace.
        """
        read_text(self.pattern).check_heads(self.num_heads_global)
        return uninitialised_rows(q)

    def placed(self, placement: Placement) -> PlacedCall:
        """Return the PlacedCall of this rank's queries over only the keys at the positions in `placement`."""
        where = (self.head_offset, self.num_heads_global)
        return PlacedCall(self.pattern, placement, self.scale, *where, self.engine, self.block_size, self.dropout_p)


def uninitialised_rows(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return uninitialised out (B, H, L, D) in the dtype of q, and lse (B, H, L) in float32 or wider."""
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=sum_dtype(q))


def with_dtype_and_strides_of(x: Tensor, like: Tensor) -> Tensor:
    """Return x in the dtype of `like` and the strides of `torch.empty_like(like)`; a copy if they differ."""
    # The fake implementations of the custom ops declare this dtype and these strides.
    promised = torch.empty_like(like)
    return x if x.dtype == like.dtype and x.stride() == promised.stride() else promised.copy_(x)


class PartSums:
    """Accumulates attention of q over parts of the keys, merged by lse, in float32 or wider and in the order of calls.

    bindings: the pattern's run-time tensors, sorted by name; if there is dropout, followed by its seed.
    dtype: of the computation on each part.
    whole: out, lse and their gradients over all keys, which `gradients` needs; None in the forward.
    """

    def __init__(
        self, call: PlainCall, q: Tensor, bindings: Sequence[Tensor], dtype: torch.dtype, whole: WholeRows | None = None
    ) -> None:
        self.call, self.q, self.bindings, self.dtype = call, q, list(bindings), dtype
        self.queries, self.wide, self.whole = q.to(dtype), sum_dtype(q), whole
        if whole is not None:
            self.whole = WholeRows(whole.out.to(dtype), whole.lse, whole.grad_out.to(dtype), whole.grad_lse)
        self.sums: tuple[Tensor, Tensor] | None = None
        self.dq: Tensor | None = None

    def attend(self, placement: Placement, k: Tensor, v: Tensor) -> None:
        """Merge attention to keys k and values v (B, G, S, D), at the positions of `placement`, into the sums."""
        k, v, placed = k.to(self.dtype), v.to(self.dtype), self.call.placed(placement)
        out, lse = placed.forward(self.queries, k, v, self.bindings, wide=True)
        if self.sums is None:
            self.sums = out.to(self.wide), lse.to(self.wide)
        else:
            merge_(*self.sums, out, lse)

    def rows(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (out (B, H, L, D) in q's dtype, lse (B, H, L)) over the parts so far.

        Without any part, as on a rank without tokens (L = 0), both are uninitialised.

        sinks: a logit for each head (H,), whose exponential is added to the softmax denominators; or None.
        """
        if self.sums is None:
            return uninitialised_rows(self.q)
        out, lse = self.sums if sinks is None else add_sinks(*self.sums, sinks)
        return with_dtype_and_strides_of(out, self.q), lse.contiguous()

    def gradients(self, placement: Placement, k: Tensor, v: Tensor) -> list[Tensor]:
        """Return [dk, dv] of keys k and values v (B, G, S, D), in float32 or wider; add this part's contribution to dq.

        placement: positions of this rank's queries and of these keys.
        """
        if not self.q.shape[2] or not k.shape[2]:
            return [torch.zeros_like(x, dtype=self.wide) for x in (k, v)]
        assert self.whole is not None
        k, v, placed = k.to(self.dtype), v.to(self.dtype), self.call.placed(placement)
        dq, dk, dv = placed.backward(self.queries, k, v, self.bindings, self.whole)
        self.dq = dq.to(self.wide) if self.dq is None else self.dq.add_(dq)
        return [dk.to(self.wide), dv.to(self.wide)]

    def query_gradient(self) -> Tensor:
        """Return dq over the parts so far, in the dtype and memory format of q; 0 for no parts."""
        return torch.zeros_like(self.q) if self.dq is None else with_dtype_and_strides_of(self.dq, self.q)


def constant_probability(name: str, value: object) -> float:
    """Return `value`, a probability, rounded down to a multiple of 2**-62, as a float that is a constant in a graph.

    Raises as `require_probability`.
    """
    # With dynamic=True, torch.compile traces a float as a symbol without a value. An integer symbol has a value, to
    # which `index` specializes the graph.
    return index(int(require_probability(name, value) * 2**62)) / 2**62


def resolved_pattern(pattern: str, bindings: Sequence[Tensor], num_tokens: int) -> Expression:
    """Return the pattern, given in JSON, with its run-time tensors replaced by their values.

    bindings: the tensors, for a sequence of num_tokens tokens, sorted by name.

    The values are read at each call, because a tensor may have changed in place.
    """
    if not bindings:
        return read_text(pattern)
    # The rule depends only on the pattern and the number of tokens, so the other fields are placeholders.
    call = Call(
        pattern,
        num_heads=1,
        num_kv_heads=1,
        num_queries=num_tokens,
        num_keys=num_tokens,
        q_offset=0,
        k_offset=0,
        head_offset=0,
        num_heads_global=1,
        rate=1,
        block_size=(),
    )
    return call.rules(bindings)


@dataclass
class _Checks:
    """Digests of the calls that a process group has agreed on, and the number of checks begun, failed ones included."""

    agreed: set[str] = field(default_factory=set)
    count: int = 0

    @property
    def next_prefix(self) -> str:
        """Prefix of the next check's keys in the store; equal on all ranks, because every rank makes every check."""
        return f"flexdilated/agreement/{self.count}"


_checks: WeakKeyDictionary[ProcessGroup, _Checks] = WeakKeyDictionary()


def check_agreement(
    ranks: Ranks, facts: Mapping[str, object], once: Callable[[], Mapping[str, object]] | None = None
) -> None:
    """Check that `facts` (arguments of a call) are equal on all ranks; facts that passed before cost one look-up.

    facts: names and hashable values, compared by `repr` without addresses in memory.
    once: returns further facts, which are slow to compute or may change later. They are compared only if `facts` have
        not passed before.

    All ranks must make the same checks in the same order.

    Raises ValueError on all ranks, with the facts that differ and the values of up to 8 calls; DistError if the group's
    store fails, or some rank does not make the check within the group's timeout.
    """
    checks = _checks.setdefault(group_of(ranks.name), _Checks())
    digest, call = _digest_and_text(tuple(facts.items()))
    if ranks.size == 1 or digest in checks.agreed:
        return
    prefix = checks.next_prefix
    checks.count += 1
    first, call = (digest, call) if once is None else _digest_and_text((*facts.items(), *once().items()))
    try:
        verdict = _agree_in_store(ranks, prefix, first, call)
    except RuntimeError as error:  # stores raise no specific class
        limit_s = timeout_of(ranks).total_seconds()
        raise DistError(
            f"rank {ranks.rank} of {ranks.size}: the check that all ranks make the same call failed: "
            f"{_absent_text(ranks, prefix)} did not answer within the timeout of the process group, {limit_s:g} s. A "
            f"peer may have died, may hang, or may not make this rank's new call: {_call_text(json.loads(call))}"
        ) from error
    if verdict != _AGREED:
        raise ValueError(verdict)
    checks.agreed.add(digest)


def tensor_digests(pattern: Expression, tensors: Sequence[Tensor]) -> dict[str, object]:
    """Return {"run-time tensor 'NAME'": text with shape, dtype and a digest of its values} for a pattern's tensors.

    tensors: the values of the run-time tensors, sorted by name.
    """

    def digest(x: Tensor) -> str:
        values = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{tuple(x.shape)} of {x.dtype} with digest {blake2b(values, digest_size=8).hexdigest()}"

    return {f"run-time tensor {name!r}": digest(x) for name, x in zip(names(pattern), tensors, strict=True)}


def waiting_ranks_text(ranks: Ranks) -> str:
    """Return a sentence on the ranks that wait at the next check of arguments, which this rank has not reached.

    It states their arguments; "" if no rank waits, or the store cannot be read.
    """
    group = group_of(ranks.name)
    prefix, store = _checks.setdefault(group, _Checks()).next_prefix, group.get_group_store()
    try:
        there = [rank for rank in ranks.others if store.check([f"{prefix}/{rank}"])]
        calls = [f"rank {rank}: {_call_text(json.loads(store.get(f'{prefix}/{rank}')))}" for rank in there]
    except RuntimeError:  # the process that serves the store may be the one that died
        return ""
    return f"Meanwhile other ranks have begun a call with other arguments ({'; '.join(calls)})." if calls else ""


@lru_cache(maxsize=1024)
def _digest_and_text(facts: tuple[tuple[str, object], ...]) -> tuple[str, str]:
    """Return (digest of the facts, the facts as JSON); facts are (name of an argument, its value) pairs."""
    text = json.dumps({name: _ADDRESS.sub("", repr(value)) for name, value in facts})
    return blake2b(text.encode(), digest_size=16).hexdigest(), text


def _agree_in_store(ranks: Ranks, prefix: str, digest: str, call: str) -> str:
    """Make one check in the group's key-value store; return "agreed" or the text of an error, equal on all ranks.

    prefix: of the check's keys in the store.
    digest, call: of the facts, and the facts, from `_digest_and_text`.

    Raises RuntimeError if the store fails or does not answer within the group's timeout.
    """
    # Each rank adds 1 to the count of its digest. The last rank to come compares the count of its digest with the
    # number of ranks.
    store = group_of(ranks.name).get_group_store()
    store.set(f"{prefix}/{ranks.rank}", call)
    store.add(f"{prefix}/{digest}", 1)
    if store.add(f"{prefix}/come", 1) == ranks.size:
        verdict = _AGREED
        if store.add(f"{prefix}/{digest}", 0) != ranks.size:
            verdict = disagreement_text([json.loads(store.get(f"{prefix}/{rank}")) for rank in range(ranks.size)])
        store.set(f"{prefix}/verdict", verdict)
    else:
        store.wait([f"{prefix}/verdict"], timeout_of(ranks))
        verdict = store.get(f"{prefix}/verdict").decode()
    if store.add(f"{prefix}/read", 1) == ranks.size and verdict == _AGREED:
        for key in (*range(ranks.size), digest, "come", "verdict", "read"):
            store.delete_key(f"{prefix}/{key}")
    record("set-up", sent=len(call), received=len(verdict))
    return verdict


def _absent_text(ranks: Ranks, prefix: str) -> str:
    store = group_of(ranks.name).get_group_store()
    try:
        return (
            _ranks_text([rank for rank in ranks.others if not store.check([f"{prefix}/{rank}"])])
            or "a rank that began it"
        )
    except RuntimeError:
        return "the process that keeps the group's store"


def disagreement_text(calls: Sequence[dict[str, str]]) -> str:
    """Return an error text that names the arguments that differ between ranks, and up to 8 calls with their ranks.

    calls[rank]: the arguments of that rank's call, names and values.
    """
    every = dict.fromkeys(name for call in calls for name in call)
    differing = [name for name in every if len({call.get(name) for call in calls}) > 1]
    holders: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        holders.setdefault(_call_text({name: call.get(name, "not given") for name in differing}), []).append(rank)
    shown = [
        f"{_ranks_text(who)} {'has' if len(who) == 1 else 'have'} {call}"
        for call, who in list(holders.items())[:_SHOWN]
    ]
    more = [f"{len(holders) - _SHOWN} more calls"] * (len(holders) > _SHOWN)
    return f"all ranks must make the same call; they disagree in {', '.join(differing)}: {'; '.join(shown + more)}"


def _ranks_text(ranks: Sequence[int]) -> str:
    """Return text such as "ranks 0, 1, 5", in which at most 8 ranks are named; "" for no ranks."""
    if not ranks:
        return ""
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_SHOWN]))}{more}"


def _call_text(facts: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in facts.items())
