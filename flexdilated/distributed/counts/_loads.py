"""Loads: bytes that each rank receives and pairs that it computes, counted before any rank runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from tabulate import tabulate

from ...masks.core import Expression, bytes_text, require_choice, tokens_text
from ...memory import AttentionSize
from ..group import Sharding
from ..wire import CodecName, codec_named, gradient_codec
from ._schedule import SCHEDULES, Schedule, ScheduleName, choice_of, token_counts
from ._tokens import work_of_ranks

MOST_RANKS = 4096
_WIDEST = 70  # characters of a fact


@dataclass(frozen=True, kw_only=True)
class RankLoads:
    """The load of each rank in a call of `distributed.attend` and its backward; `str` returns a table.

    Entry i of a tuple is for rank i. received_forward: bytes of other ranks' keys and values. received_backward: bytes
    of the gradients of this rank's keys and values; a ring receives the keys and values again. pairs: (query, key)
    pairs over all heads and batch entries, counted once for each branch that allows them. reason: why schedule "auto"
    chose this schedule; None if the caller named it.
    """

    pattern: Expression
    sharding: Sharding
    schedule: Schedule
    reason: str | None
    codec: CodecName | None
    received_forward: tuple[int, ...]
    received_backward: tuple[int, ...]
    pairs: tuple[int, ...]

    @property
    def max_over_mean(self) -> dict[str, float]:
        """The largest entry of each column over its mean; 1 where all entries are 0."""
        return {name: max(each) * len(each) / sum(each) if any(each) else 1.0 for name, each in self._columns.items()}

    @property
    def _columns(self) -> dict[str, tuple[int, ...]]:
        names = ("received_forward", "received_backward", "pairs")
        return {name: getattr(self, name) for name in names}

    def to_data(self) -> dict[str, Any]:
        """Plain data for JSON; received_forward and received_backward are in bytes."""
        columns = {"tokens": self.sharding.lengths, **self._columns}
        return {
            "pattern": repr(self.pattern),
            "num_tokens": self.sharding.num_tokens,
            "num_ranks": self.sharding.num_ranks,
            "order": self.sharding.order,
            "schedule": self.schedule,
            "reason": self.reason,
            "codec": self.codec,
            "ranks": {name: list(each) for name, each in columns.items()},
            "max_over_mean": self.max_over_mean,
        }

    def __str__(self) -> str:
        sharding, wire = self.sharding, f", {self.codec} on the wire" if self.codec else ""
        facts = [
            ("pattern", repr(self.pattern)),
            ("ranks", f"{sharding.num_ranks:,}, {tokens_text(sharding.num_tokens)} tokens, {sharding.order}"),
            ("schedule", f"{self.schedule}{wire}{f': {self.reason}' if self.reason else ''}"),
        ]
        columns = sharding.lengths, *self._columns.values()
        rows = [_row(f"{rank}", *each) for rank, each in enumerate(zip(*columns, strict=True))]
        rows.append(_row("max", *map(max, columns)))
        rows.append(("max / mean", "", *(f"{each:.4f}" for each in self.max_over_mean.values())))
        headers = ("rank", "tokens", "received\nin the forward", "received\nin the backward", "pairs")
        table = tabulate(rows, headers, disable_numparse=True, colalign=("right",) * len(headers))
        shown = tabulate(facts, tablefmt="plain", disable_numparse=True, maxcolwidths=[None, _WIDEST])
        return f"{shown}\n\n{table}"


def _row(name: str, tokens: int, forward: int, backward: int, pairs: int) -> tuple[str, ...]:
    return name, f"{tokens:,}", bytes_text(forward), bytes_text(backward), f"{pairs:,}"


def rank_loads(
    pattern: Expression,
    sharding: Sharding,
    size: AttentionSize,
    *,
    schedule: ScheduleName = "auto",
    codec: CodecName | None = None,
) -> RankLoads:
    """Count the loads of each rank in a call; `size` is that of one device with all tokens of the sharding.

    Raises ValueError for an unknown schedule or codec, for a codec that cannot encode the dtype, and if the pattern
    does not bind to the size.
    """
    require_choice("schedule", schedule, SCHEDULES)
    if codec is not None:
        require_choice("codec", codec, get_args(CodecName))
    sent = codec_named(codec)
    sent.check(size.dtype)
    tokens, heads = sharding.num_tokens, {"num_heads": size.num_heads}
    rule = pattern.bind(num_queries=tokens, num_keys=tokens, **heads).pattern
    counts = token_counts(rule, sharding, num_kv_heads=size.kv_heads, **heads)
    held = 2 * size.batch * size.head_dim * size.dtype.itemsize
    key_bytes, gradient_bytes = (
        2 * size.batch * each.row_bytes(size.head_dim, size.dtype) for each in (sent, gradient_codec(sent, size.dtype))
    )
    choice = choice_of(counts, held_bytes=held, sent_bytes=key_bytes)
    name, reason = (choice.name, choice.reason) if schedule == "auto" else (schedule, None)
    keys, gradients = key_bytes * counts[name].sum(1), gradient_bytes * counts[name].sum(0)
    return RankLoads(
        pattern=pattern,
        sharding=sharding,
        schedule=name,
        reason=reason,
        codec=codec,
        received_forward=tuple(keys.tolist()),
        received_backward=tuple((keys + gradients if name == "ring" else gradients).tolist()),
        pairs=tuple((size.batch * work_of_ranks(rule, sharding, **heads)).tolist()),
    )
