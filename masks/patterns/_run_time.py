"""Run-time tensors: tensors that a pattern names and whose values may come with each call, such as document ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor
from torch.serialization import add_safe_globals

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

_LEAST_BIAS = -1e3  # numbers below it in a mask of floats are no bias: they hide keys


@dataclass(frozen=True, eq=False)
class CarriedTensor:
    """Hashable wrapper of a tensor; equal only to wrappers of the identical tensor object."""

    tensor: Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CarriedTensor) and other.tensor is self.tensor

    def __hash__(self) -> int:
        return hash(
            CarriedTensor
        )  # not of the tensor: a graph that hashed its identity would compile again for another one


add_safe_globals([CarriedTensor])


@dataclass(frozen=True)
class RunTime(Pattern):
    """Base of patterns that need a run-time tensor: `given` holds it, or is None if each call passes it by `name`.

    num_dims: largest number of dims of the tensor for one batch entry; one more dim is the batch.

    The pattern's text holds the name and not the values, so new values neither retrace nor recompile. Subclasses define
    two methods: `table` returns the `Table`, which is the pattern with the values of a tensor, and `widest` returns
    values that allow about as many pairs as possible.

    >>> isinstance(masks.documents("ids"), masks.extend.RunTime)
    True
    """

    is_run_time = True
    num_dims: ClassVar[int] = 1  # dims of the tensor for one batch entry

    name: str
    given: CarriedTensor | None = field(default=None, metadata={"stored": False})

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
        values = self.table(self.transported(tensors[self.name]), extent)
        return replace(values, source=replace(self, given=None))

    def transported(self, value: Any) -> Tensor:
        """Return a caller's value as the dense tensor that calls pass; a dense tensor is returned unchanged.

        Raises TypeError or ValueError for a value that gives no such tensor.
        """
        return require_values(self.name, value)

    def table(self, tensor: Tensor, extent: Extent) -> Table:
        """Return the pattern with this tensor's values.

        extent: one past the last query position, and one past the last key position.

        Raises TypeError or ValueError for a tensor whose dtype, shape or values do not fit the pattern.
        """
        raise NotImplementedError  # defined by each run-time pattern

    def widest(self, shape: tuple[int, ...], extent: Extent) -> Tensor:
        """Return a run-time tensor of this shape, on the CPU, whose values allow about as many pairs as possible.

        Compiled programs are planned with it, because the values of later calls are unknown. extent: see `table`.
        """
        raise NotImplementedError

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        raise ValueError(missing(self.name))

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        raise ValueError(missing(self.name))

    def reason(self, pair: Pair) -> Reason:
        raise ValueError(missing(self.name))


@dataclass(frozen=True)
class Windows:
    """W disjoint rectangles of pairs: queries q_start[i] to q_stop[i] - 1 with keys k_start[i] to k_stop[i] - 1.

    origin[i]: position that counts as 0 for a pattern which is applied within rectangle i.
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
        """Return the windows with `origin` set to the first query of each window."""
        return Windows(self.q_start, self.q_stop, self.k_start, self.k_stop, self.q_start)

    def within(self, queries: range, keys: range) -> Windows:
        q_start, q_stop = (edge.clamp(queries.start, queries.stop) for edge in (self.q_start, self.q_stop))
        k_start, k_stop = (edge.clamp(keys.start, keys.stop) for edge in (self.k_start, self.k_stop))
        cut = Windows(q_start, q_stop, k_start, k_stop, self.origin)
        return cut.select((q_start < q_stop) & (k_start < k_stop))

    def counted_from(self, period: int | None) -> Int64[Tensor, " W"]:
        """Return origins shifted by whole periods: each window's first position is 0 to period - 1 after its origin.

        period: shift of query and key that leaves the pattern unchanged. If it is None, the result is `origin`.
        """
        if period is None:
            return self.origin
        ahead = torch.minimum(self.q_start, self.k_start) - self.origin
        return self.origin + ahead // period * period

    def kinds(self, period: int | None) -> tuple[Int64[Tensor, " n"], ...]:
        """Return the ascending indices of each group of windows in which a pattern of this period has equal masks.

        Windows of a group have equal numbers of queries and of keys, equal distances from the first query to the first
        key, and equal distances from `counted_from(period)` to the first query. Groups are ordered by their first
        windows.

        period: shift of query and key, counted from `origin`, that leaves the pattern unchanged; None if there is none.
        """
        start, queries = self.counted_from(period), self.q_stop - self.q_start
        ahead, keys = self.k_start - self.q_start, self.k_stop - self.k_start
        kind, _ = numbered(queries, keys - queries, ahead, self.q_start - start)
        found = kind.argsort(stable=True).split(kind.bincount().tolist()) if len(self) else ()
        return tuple(sorted(found, key=lambda index: int(index[0])))


@dataclass(frozen=True)
class Table(Pattern):
    """Base of patterns that hold the values of a run-time tensor: one row for each batch entry, or one row for all.

    Tables of one class with equal digests and sources are equal. Methods without a batch index, such as `count`, need a
    table of one row (see `of_entry`) or of equal rows.

    rows: the values, on the CPU.
    digest: text that identifies shape and content; of a placeholder, the shape.
    reach: declared largest distance of allowed pairs, in tokens; None for no limit.
    known: False for a placeholder that represents all values of its shape.
    source: the run-time pattern without its tensor; None if the table was built directly.
    held: copies of the rows by device, see `on`.

    Subclasses define the methods `mask_mod`, `count` and `described`, and a unique text as class attribute `kind`.

    >>> class SameLabel(masks.extend.Table):
    ...     kind = "table of labels"
    ...
    ...     def described(self):
    ...         return f"labels of {self.rows.shape[1]} tokens"
    ...
    ...     def mask_mod(self, *, num_heads, device):
    ...         held, step = self.on(device), self.batch_step(device)
    ...         return lambda b, h, q, k: held.rows[b * step, q] == held.rows[b * step, k]
    ...
    ...     def count(self, box, *, num_heads):
    ...         return masks.extend.Bounds(torch.zeros_like(box.area), box.area)
    >>> labels = SameLabel.of(torch.tensor([[0, 1, 0, 2, 1, 0]]))
    >>> testing.check_pattern(labels, max_tokens=6, examples=5)
    """

    is_run_time = True

    rows: Shaped[Tensor, "B ..."]
    digest: str
    reach: int | None = None
    known: bool = True
    source: RunTime | None = None
    held: dict[torch.device, HeldRows] = field(default_factory=dict, repr=False, metadata={"pickled": False})

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, Table) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    @classmethod
    def of(cls, rows: Tensor, reach: int | None = None) -> Self:
        """Return the table with these rows, a CPU tensor that must not change afterwards.

        reach: declared largest distance of allowed pairs, in tokens; None for no limit.
        """
        rows = rows.contiguous()
        return cls(rows, f"{tuple(rows.shape)} {content_digest(rows)}", reach)

    def parameters(self) -> dict[str, Any]:
        return {"digest": self.digest, "source": self.source}

    def phrase(self) -> Phrase:
        return Phrase(f"<{self.described()}>" if self.known else f"<{self.digest}>")

    def described(self) -> str:
        """Return a short description, which the repr shows in angle brackets if the values are `known`."""
        raise NotImplementedError  # defined by each table

    def on(self, device: torch.device) -> HeldRows:
        """Return a holder of a copy of the rows on a device; it is made once, and all mask_mods there share it."""
        if device not in self.held:
            self.held.setdefault(device, HeldRows(self.copied_to(device)))
        return self.held[device]

    def copied_to(self, device: torch.device) -> Tensor:
        """Return a copy of the rows on a device, in the form that mask_mods there read."""
        return self.rows.to(device, copy=True)

    def batch_step(self, device: torch.device) -> Tensor:
        """Return an integer scalar on `device`: 1 if each batch entry b has its own row, 0 if all share one row.

        With this step, batch entry b has row b * step.
        """
        (step,) = parameters(device, int(len(self.rows) > 1))
        return step

    @property
    def entries(self) -> int:  # type: ignore[override]
        return len(self.rows)

    def of_entry(self, batch: int) -> Self:
        if len(self.rows) == 1:
            return self
        return self.part(type(self).of(self.rows[batch, None], self.reach), "an entry")

    def part(self, made: Self, which: str) -> Self:
        """Return `made`, a table of some of this table's values, with this table's source.

        A part of a placeholder is a placeholder, too; two parts of one placeholder are equal iff their `which` are.

        which: text that identifies the part in a placeholder, such as "table 3".
        """
        if self.known:
            return replace(made, source=self.source)
        return replace(made, source=self.source, known=False, digest=f"{self.digest}, {which}")

    def require_equal_rows(self) -> None:
        """Raise ValueError if the values differ by batch entry."""
        if len(self.rows) != 1 and not bool((self.rows == self.rows[:1]).all()):
            raise ValueError(
                "bounds and block counts need a single batch entry: give the run-time tensor of one entry, such as "
                f"ids[0], or take bound.entry(0); got {len(self.rows)} rows that differ"
            )

    @property
    def only_row(self) -> Shaped[Tensor, "..."]:
        """Return the row that all batch entries share. Raises ValueError if rows differ."""
        self.require_equal_rows()
        return self.rows[0]

    def superset(self) -> Pattern:
        return every() if self.reach is None else local_window(left=self.reach, right=self.reach)

    def windows(self, num_positions: int) -> Windows | None:
        """Return disjoint rectangles that hold exactly the allowed pairs; None if they are too many or not known.

        All batch entries must share one row.

        num_positions: one past the last position of any query or key.
        """
        return None


class HeldRows:
    """Mutable holder of the rows that a mask_mod reads; a compiled graph puts the rows of each call into it."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows


def names(pattern: Expression) -> tuple[str, ...]:
    """Return the sorted names of the run-time tensors that a pattern's leaves need or carry.

    A leaf that `resolve` has replaced by a `Table` has its values, and gives no name.
    """
    return tuple(sorted({leaf.name for leaf in run_time_leaves(pattern)}))


def run_time_leaves(pattern: Expression) -> tuple[RunTime, ...]:
    return tuple(leaf for leaf in pattern.leaves() if isinstance(leaf, RunTime))


def named(leaf: Pattern) -> Pattern:
    """Return the leaf pattern with only the name of its run-time tensor, without the tensor and its values.

    A leaf without a run-time tensor, and a table without `source`, is returned unchanged.
    """
    if isinstance(leaf, Table):
        return leaf if leaf.source is None else leaf.source
    return replace(leaf, given=None) if isinstance(leaf, RunTime) else leaf


def carrying(pattern: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the pattern in which run-time leaves named in `tensors` carry these tensors; other leaves are unchanged.

    Raises TypeError for values that are not tensors.
    """
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"bindings must hold tensors; got {type(x).__name__} for {name!r}")
    given = {name: CarriedTensor(x) for name, x in tensors.items()}
    return pattern.map_leaves(
        lambda leaf: replace(leaf, given=given[leaf.name]) if isinstance(leaf, RunTime) and leaf.name in given else leaf
    )


def on_host(pattern: Any) -> Any:
    """Return the pattern with the run-time tensors that it carries moved to the CPU, except those on meta.

    Calls with this pattern need not move them again.
    """
    found = {name: CarriedTensor(x if x.is_meta else x.cpu()) for name, x in pattern.given_tensors().items()}
    if not found:
        return pattern
    return pattern.map_leaves(lambda leaf: replace(leaf, given=found[leaf.name]) if leaf.carried() else leaf)


def as_written(pattern: Expression) -> Expression:
    """Return the pattern with run-time tensors by name, without values; `cache().forget` compares this form."""
    return pattern.map_leaves(named) if pattern.varies else pattern


def blank(pattern: Expression, tensors: Mapping[str, Tensor], extent: Extent) -> Any:
    """Return the pattern with a placeholder table in place of each run-time leaf.

    Each placeholder holds the values that `RunTime.widest` returns, and stands for all tensors of its shape.

    tensors: run-time tensors by name, of which only the shapes are read.
    extent: see `RunTime.table`.

    Placeholders of equal patterns and shapes are equal.
    """

    def with_any(leaf: Pattern) -> Pattern:
        if not isinstance(leaf, RunTime):
            return leaf
        shape = tuple(map(int, tensors[leaf.name].shape))
        table = leaf.table(leaf.widest(shape, extent), extent)
        text = f"any {leaf.phrase().text} of {shape}"
        return replace(table, digest=text, known=False, source=replace(leaf, given=None), held={})

    return pattern.map_leaves(with_any)


def tables(pattern: Expression) -> tuple[Table, ...]:
    """Return the tables of a pattern whose run-time tensors are resolved, in the order of its leaves."""
    return tuple(leaf for leaf in pattern.leaves() if isinstance(leaf, Table))


def of_tensor(kind: type[RunTime], tensor: Any, name: str, **options: Any) -> Pattern:
    """Return a pattern of class `kind` that carries a tensor, or only the name under which calls pass it.

    tensor: a tensor; a value that torch.as_tensor converts; or a str, the name under which calls pass the tensor.
    name: name of a tensor that the pattern carries; ignored if `tensor` is a str.
    options: other fields of the pattern.

    Raises TypeError for a value that does not convert.

    >>> masks.extend.of_tensor(type(masks.documents("ids")), [0, 0, 1], "ids")
    documents('ids')
    """
    if isinstance(tensor, str):
        return kind(tensor, **options)
    return kind(name, CarriedTensor(as_tensor(name, tensor)), **options)


def as_tensor(name: str, value: Any) -> Tensor:
    """Return `value` as a tensor, unchanged if it is one. Raises TypeError if torch.as_tensor does not convert it."""
    if isinstance(value, Tensor):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} must be a tensor, a value that converts to one, or a name in attend's bindings; "
            f"got {value!r:.80}: {error}"
        ) from error


def missing(name: str) -> str:
    return (
        f"the pattern needs the run-time tensor {name!r}: build it with the tensor itself, "
        f"or pass bindings={{{name!r}: tensor}} to attend"
    )


def require_values(name: str, tensor: Any) -> Tensor:
    """Return `tensor` if it is strided, not nested or quantized, and not on meta; else raise TypeError or ValueError.

    name: name of the run-time tensor, for errors.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"bindings must hold tensors; got {type(tensor).__name__} for {name!r}")
    if tensor.is_nested or tensor.is_quantized or tensor.layout != torch.strided or tensor.is_meta:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
        got = f"a tensor that is {kind} on {tensor.device}"
        raise ValueError(f"the run-time tensor {name!r} must be dense, and not on the meta device; got {got}")
    return tensor


def integers(name: str, tensor: Tensor, dims: tuple[int, ...], *, meant: str = "") -> Tensor:
    """Return a copy of the tensor on the CPU in int64.

    Raises TypeError unless it holds integers, not booleans, and ValueError unless its number of dims is in `dims`.

    name: for errors.
    meant: text to append to the ValueError.
    """
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
        raise TypeError(f"{name} must hold integers; got a tensor of {tensor.dtype}")
    if tensor.dim() not in dims:
        one = "(batch,)" if 0 in dims else "(tokens,)"
        shapes = " or ".join({0: "()", 1: one, 2: "(batch, tokens)"}[dim] for dim in dims)
        raise ValueError(f"{name} must have shape {shapes}; got {tuple(tensor.shape)}{meant}")
    # A copy: later changes of the caller's tensor must not change the rule.
    return tensor.detach().to("cpu", torch.int64, copy=True)


def booleans(what: str, tensor: Tensor, dims: Sequence[str]) -> Tensor:
    """Return a copy of a mask as bool on the CPU; of a float mask, 0 becomes True and -inf False.

    what: name of the mask, for errors.
    dims: names of its last dims, as arguments of a score_mod; for errors.

    Raises TypeError for other dtypes, and ValueError for other floats.
    """
    if not (tensor.dtype == torch.bool or tensor.is_floating_point()):
        raise TypeError(
            f"{what} must hold booleans, True where a key may be seen, or floats, 0 there and -inf elsewhere; "
            f"got {tensor.dtype}: for a mask of 0 and 1 write mask.bool()"
        )
    marks = tensor.detach().cpu()
    if marks.dtype == torch.bool:
        return marks.clone()  # later changes of the caller's tensor must not change the rule
    allowed = marks == 0
    other = marks[~(allowed | (marks == -torch.inf))]
    if len(other):
        found = float(other[0])
        if bool((other == 1).all()):
            advice = "for a mask of 0 and 1 write mask.bool()"
        elif bool((other < _LEAST_BIAS).all()):
            advice = "if large negative numbers stand for -inf write mask == 0"
        else:
            own = zip(reversed(dims), reversed(marks.shape), strict=False)
            index = ", ".join(reversed([dim if size > 1 else "0" for dim, size in own]))
            bias = f"lambda score, b, h, q_idx, k_idx: score + bias[{index}]"
            advice = f"a bias is no mask but a score_mod, attend(..., score_mod={bias})"
        raise ValueError(f"{what} in floating point must hold 0 or -inf; got {found}: {advice}")
    return allowed
