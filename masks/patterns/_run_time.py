"""Run-time tensors: parts of a rule whose values come with a call, such as document ids; until then by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from ..core import (
    Bounds,
    Box,
    Expression,
    Extent,
    MaskMod,
    Pair,
    Pattern,
    Phrase,
    Reason,
    content_digest,
    every,
    numbered,
    parameters,
)
from ._band import local_window

# B batch entries (or one for all of them), L positions, W windows


@dataclass(frozen=True, eq=False)
class Given:
    """A tensor as part of a value; equal only to itself."""

    tensor: Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Given) and other.tensor is self.tensor

    def __hash__(self) -> int:
        return id(self.tensor)


@dataclass(frozen=True)
class RunTime(Pattern):
    """A rule that needs the tensor of this name: carried in `given`, or passed with the call.

    Its text holds the name and not the values, so new values neither retrace nor recompile. `table` turns the tensor
    into the rule itself.
    """

    is_run_time = True
    num_dims: ClassVar[int] = 1  # of the tensor for one batch entry

    name: str
    given: Given | None = field(default=None, metadata={"stored": False})

    def check(self) -> None:
        if type(self.name) is not str or not self.name.isidentifier():
            raise ValueError(f"the name of a run-time tensor must be an identifier; got {self.name!r:.80}")

    def differs_by_entry(self, tensor: Tensor) -> bool:
        return tensor.dim() > self.num_dims and len(tensor) > 1

    def carried(self) -> dict[str, Tensor]:
        return {} if self.given is None else {self.name: self.given.tensor}

    def resolved(self, tensors: Mapping[str, Tensor], extent: Extent) -> Table:
        if self.name not in tensors:
            raise ValueError(missing(self.name))
        values = self.table(require_values(self.name, tensors[self.name]), extent)
        return replace(values, source=replace(self, given=None))

    def table(self, tensor: Tensor, extent: Extent) -> Table:
        """The rule with this tensor's values, checked, over the positions of a call."""
        raise NotImplementedError  # defined by each run-time pattern

    def widest(self, shape: tuple[int, ...], extent: Extent) -> Tensor:
        """A tensor of this shape that allows the most pairs: the basis of plans while values are unknown."""
        raise NotImplementedError

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        raise ValueError(missing(self.name))

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        raise ValueError(missing(self.name))

    def reason(self, pair: Pair) -> Reason:
        raise ValueError(missing(self.name))


@dataclass(frozen=True)
class Windows:
    """Disjoint rectangles: queries q_start[i] to q_stop[i] - 1 with keys k_start[i] to k_stop[i] - 1.

    `origin` is the position from which the rule inside counts.
    """

    q_start: Int64[Tensor, " W"]
    q_stop: Int64[Tensor, " W"]
    k_start: Int64[Tensor, " W"]
    k_stop: Int64[Tensor, " W"]
    origin: Int64[Tensor, " W"]

    @classmethod
    def squares(cls, start: Int64[Tensor, " W"], stop: Int64[Tensor, " W"]) -> Windows:
        return cls(start, stop, start, stop, torch.zeros_like(start))

    def __len__(self) -> int:
        return len(self.q_start)

    def select(self, index: Tensor | slice) -> Windows:
        return Windows(*(getattr(self, field.name)[index] for field in fields(self)))

    def from_start(self) -> Windows:
        """The windows with a rule that counts from their first queries."""
        return Windows(self.q_start, self.q_stop, self.k_start, self.k_stop, self.q_start)

    def within(self, queries: range, keys: range) -> Windows:
        q_start, q_stop = (edge.clamp(queries.start, queries.stop) for edge in (self.q_start, self.q_stop))
        k_start, k_stop = (edge.clamp(keys.start, keys.stop) for edge in (self.k_start, self.k_stop))
        cut = Windows(q_start, q_stop, k_start, k_stop, self.origin)
        return cut.select((q_start < q_stop) & (k_start < k_stop))

    def counted_from(self, period: int | None) -> Int64[Tensor, " W"]:
        """Equivalent origins, shifted by whole periods: each window begins less than a period after its origin."""
        if period is None:
            return self.origin
        ahead = torch.minimum(self.q_start, self.k_start) - self.origin
        return self.origin + ahead // period * period

    def kinds(self, period: int | None) -> tuple[Int64[Tensor, " n"], ...]:
        """Group windows with equal rules of this period: an ascending index for each kind, ordered by first window."""
        start, queries = self.counted_from(period), self.q_stop - self.q_start
        ahead, keys = self.k_start - self.q_start, self.k_stop - self.k_start
        kind, _ = numbered(queries, keys - queries, ahead, self.q_start - start)
        found = kind.argsort(stable=True).split(kind.bincount().tolist()) if len(self) else ()
        return tuple(sorted(found, key=lambda index: int(index[0])))


@dataclass(frozen=True)
class Table(Pattern):
    """A rule in a CPU tensor, one row for each batch entry or one for all; equal rows of one source are equal rules.

    Bounds have no batch index and need a table of one row: see `entry`. `reach`: declared largest distance of allowed
    pairs. A table that is not `known` represents all values of its shape. `source`: the pattern whose values these are,
    without its tensor; None where it does not matter.
    """

    is_run_time = True

    rows: Shaped[Tensor, "B L"]
    digest: str
    reach: int | None = None
    known: bool = True
    source: RunTime | None = None
    held: dict[torch.device, Rows] = field(default_factory=dict, repr=False)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, Table) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    @classmethod
    def of(cls, rows: Tensor, reach: int | None = None) -> Self:
        """The rule of these rows, which must not change afterwards."""
        rows = rows.contiguous()
        return cls(rows, f"{tuple(rows.shape)} {content_digest(rows)}", reach)

    def parameters(self) -> dict[str, Any]:
        return {"digest": self.digest, "source": self.source}

    def phrase(self) -> Phrase:
        return Phrase(f"<{self._described()}>" if self.known else f"<{self.digest}>")

    def _described(self) -> str:
        raise NotImplementedError  # defined by each table

    def on(self, device: torch.device) -> Rows:
        """The rows on a device, shared by all closures there."""
        if device not in self.held:
            self.held.setdefault(device, Rows(self.copied_to(device)))
        return self.held[device]

    def copied_to(self, device: torch.device) -> Tensor:
        """The form of the rows that closures on a device read."""
        return self.rows.to(device, copy=True)

    def batch_step(self, device: torch.device) -> Tensor:
        """1 if each batch entry has a row, 0 if all share one: row = b * step."""
        (step,) = parameters(device, int(len(self.rows) > 1))
        return step

    @property
    def entries(self) -> int:  # type: ignore[override]
        return len(self.rows)

    def of_entry(self, batch: int) -> Self:
        if len(self.rows) == 1:
            return self
        return replace(type(self).of(self.rows[batch, None], self.reach), source=self.source)

    @property
    def only_row(self) -> Shaped[Tensor, " L"]:
        """The row of all batch entries. Raises ValueError if they differ."""
        if len(self.rows) != 1 and not bool((self.rows == self.rows[:1]).all()):
            raise ValueError(
                "bounds and block counts are those of one batch entry: give the run-time tensor of that one, such as "
                f"ids[0], or take bound.entry(0); got {len(self.rows)} rows that differ"
            )
        return self.rows[0]

    def superset(self) -> Pattern:
        return every() if self.reach is None else local_window(left=self.reach, right=self.reach)

    def windows(self, num_positions: int) -> Windows | None:
        """Disjoint rectangles that hold exactly the allowed pairs; None if they are too many."""
        return None


class Rows:
    """The rows that a closure reads; a compiled graph replaces them by the rows of its call."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows


def names(pattern: Expression) -> tuple[str, ...]:
    """Names of the run-time tensors that a pattern needs, sorted."""
    return tuple(sorted({leaf.name for leaf in run_time_leaves(pattern)}))


def run_time_leaves(pattern: Expression) -> tuple[RunTime, ...]:
    return tuple(leaf for leaf in pattern.leaves() if isinstance(leaf, RunTime))


def named(leaf: Pattern) -> Pattern:
    """The leaf in the form of its text: run-time tensors by name, with or without tensor or values."""
    if isinstance(leaf, Table):
        return leaf if leaf.source is None else leaf.source
    return replace(leaf, given=None) if isinstance(leaf, RunTime) else leaf


def on_host(pattern: Any) -> Any:
    """Copy the tensors that the pattern carries to the CPU, once for all calls that use the result."""
    found = {name: Given(x if x.is_meta else x.cpu()) for name, x in pattern.given_tensors().items()}
    if not found:
        return pattern
    return pattern.map_leaves(lambda leaf: replace(leaf, given=found[leaf.name]) if leaf.carried() else leaf)


def as_written(pattern: Expression) -> Expression:
    """The pattern as its caller wrote it, without the tensors that it carries: the key for `cache().forget`."""
    return pattern.map_leaves(named) if pattern.varies else pattern


def blank(pattern: Expression, tensors: Mapping[str, Tensor], extent: Extent) -> Any:
    """The pattern with tables for tensors of these shapes, distinguished by name and not by values."""

    def with_any(leaf: Pattern) -> Pattern:
        if not isinstance(leaf, RunTime):
            return leaf
        shape = tuple(map(int, tensors[leaf.name].shape))
        table = leaf.table(leaf.widest(shape, extent), extent)
        text = f"any {leaf.phrase().text} of {shape}"
        return replace(table, digest=text, known=False, source=replace(leaf, given=None), held={})

    return pattern.map_leaves(with_any)


def alike(pattern: Expression, batch: int) -> list[tuple[slice, Expression]]:
    """(batch entries, their rule) for each run of entries with equal rows. ValueError for a wrong number of rows."""
    pattern.require_entries(batch)
    if pattern.num_entries() == 1:
        return [(slice(None), pattern)]
    groups: list[tuple[slice, Expression]] = []
    for index in range(batch):
        rule = pattern.entry(index)
        if groups and groups[-1][1].text == rule.text:
            groups[-1] = (slice(groups[-1][0].start, index + 1), rule)
        else:
            groups.append((slice(index, index + 1), rule))
    return groups


def tables(pattern: Expression) -> tuple[Table, ...]:
    """The run-time tables of a resolved pattern, in the order of its leaves."""
    return tuple(leaf for leaf in pattern.leaves() if isinstance(leaf, Table))


def of_tensor(kind: type[RunTime], tensor: Any, name: str, **options: Any) -> Pattern:
    """A run-time pattern from a tensor (or a value that converts to one), or from the name under which it is passed."""
    if isinstance(tensor, str):
        return kind(tensor, **options)
    if isinstance(tensor, Tensor):
        return kind(name, Given(tensor), **options)
    try:
        values = torch.as_tensor(tensor)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} must be a tensor, what makes one, or a name for attend's bindings; got {tensor!r:.80}: {error}"
        ) from error
    return kind(name, Given(values), **options)


def missing(name: str) -> str:
    return (
        f"the pattern needs the run-time tensor {name!r}: build it with the tensor itself, "
        f"or pass bindings={{{name!r}: tensor}} to attend"
    )


def require_values(name: str, tensor: Any) -> Tensor:
    """Return the tensor if it is dense and has values; raise otherwise."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"bindings must hold tensors; got {type(tensor).__name__} for {name!r}")
    if tensor.is_nested or tensor.is_quantized or tensor.layout != torch.strided or tensor.is_meta:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
        got = f"a tensor that is {kind} on {tensor.device}"
        raise ValueError(f"the run-time tensor {name!r} must be a dense one with values; got {got}")
    return tensor


def integers(name: str, tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the tensor on the CPU in int64 if it holds integers in one of these numbers of dims; raise otherwise."""
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
        raise TypeError(f"{name} must hold integers; got a tensor of {tensor.dtype}")
    if tensor.dim() not in dims:
        one = "(batch,)" if 0 in dims else "(tokens,)"
        shapes = " or ".join({0: "()", 1: one, 2: "(batch, tokens)"}[dim] for dim in dims)
        meant = (
            ": a mask of tokens goes into masks.visible_keys(mask.bool())" if 0 in dims and tensor.dim() == 2 else ""
        )
        raise ValueError(f"{name} must have shape {shapes}; got {tuple(tensor.shape)}{meant}")
    return tensor.detach().to("cpu", torch.int64)
