"""Call: the pattern and sizes of a call, as plain data; its split into a table of selected blocks and other pairs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..masks import Layout, cache
from ..masks.core import Bound, Expression, Extent, content_digest, device_kind, plans
from ..masks.orders import Placement
from ..masks.patterns import Selection, blank, names, selection_of, tables
from ..masks.planning import ANYTHING, Allowed, Choice, Operands, Plan, plan, plan_at
from ..masks.text import read_text
from ._ops import read_written, written

_FEW_BYTES = 1 << 14  # run-time tensors up to this size are digested faster than resolved


class Call(NamedTuple):
    """Pattern (as JSON) and sizes of one call.

    rate: that of the tokens' Layout, 1 for tokens in order. block_size: (query side, key side); empty for each term's
    default. placement: text of a Placement, which gives each token's position (offsets are then 0); "" for none.
    """

    pattern: str
    num_heads: int
    num_kv_heads: int
    num_queries: int
    num_keys: int
    q_offset: int
    k_offset: int
    head_offset: int
    num_heads_global: int
    rate: int
    block_size: tuple[int, ...]
    placement: str = ""

    @classmethod
    def at(
        cls,
        q: Tensor,
        k: Tensor,
        pattern: str,
        *,
        num_heads_global: int,
        head_offset: int = 0,
        q_offset: int = 0,
        k_offset: int = 0,
        rate: int = 1,
        block_size: tuple[int, ...] = (),
        placement: str = "",
    ) -> Call:
        """Call of these tensors."""
        sizes = (q.shape[1], k.shape[1], q.shape[2], k.shape[2], q_offset, k_offset)
        return cls(pattern, *sizes, head_offset, num_heads_global, rate, block_size, placement)

    @property
    def arguments(self) -> tuple[str, int, int]:
        """(constants of the call as text, q_offset, k_offset): with the tensors' shapes, all that an op needs."""
        values = (self.head_offset, self.num_heads_global, self.rate, self.block_size)
        return written((self.pattern, self.placement), values), self.q_offset, self.k_offset

    @classmethod
    def of(cls, q: Tensor, k: Tensor, constants: str, q_offset: int, k_offset: int) -> Call:
        """From an op's tensors and `arguments`. In a trace this makes symbolic sizes and offsets constants."""
        pattern, placement, *others = read_written(constants)
        sizes = (q.shape[1], k.shape[1], q.shape[2], k.shape[2], q_offset, k_offset)
        return cls._make((pattern, *map(int, sizes), *others, placement))

    @property
    def first(self) -> tuple[int, int, int]:
        """(global index of the first head, position of the first query, position of the first key)."""
        return self.head_offset, self.q_offset, self.k_offset

    @property
    def sides(self) -> tuple[int, int] | None:
        """Requested (query side, key side) of blocks; None for the default."""
        return None if not self.block_size else (self.block_size[0], self.block_size[1])

    @property
    def layout(self) -> Layout:
        """Token order of the queries."""
        return Layout(self.num_queries, self.rate)

    @property
    def extent(self) -> Extent:
        """End of the positions of queries and of keys."""
        if self.placement:
            end = Placement.read(self.placement).end
            return Extent(end, end)
        return Extent(self.q_offset + self.num_queries, self.k_offset + self.num_keys)

    def rules(self, bindings: Sequence[Tensor]) -> Expression:
        """The pattern resolved with the values of its run-time tensors, which are sorted by name.

        Every call reads the values again: neither identity nor version shows every write to a tensor (collectives,
        `.data`, NumPy and third-party kernels do not increment the version).
        """
        pattern = read_text(self.pattern)
        return pattern.resolve(dict(zip(names(pattern), bindings, strict=True)), self.extent)

    def kept_rules(self, bindings: Sequence[Tensor]) -> Expression:
        """As `rules`, cached by the digest of the tensors if they are on the CPU and small."""
        if sum(x.nbytes for x in bindings) > _FEW_BYTES or not all(device_kind(x.device).on_host for x in bindings):
            return self.rules(bindings)
        return cache().get(
            ("rule", self.pattern, self.extent, *map(_content, bindings)),
            lambda: self.rules(bindings),
            lambda rule: sum(table.rows.nbytes for table in tables(rule)),
            pattern=self.pattern,
        )

    def blank(self, bindings: Sequence[Tensor]) -> Expression:
        """The pattern with blank run-time tables: it depends on the shapes of the tensors, not on their values."""
        pattern = read_text(self.pattern)
        return blank(pattern, dict(zip(names(pattern), bindings, strict=True)), self.extent)

    def bound(self, rule: Expression | None = None) -> Bound:
        """Bind `rule`, or the pattern if None, to the sizes of the call."""
        return (read_text(self.pattern) if rule is None else rule).bind(
            num_heads=self.num_heads,
            num_queries=self.num_queries,
            num_keys=self.num_keys,
            q_offset=self.q_offset,
            k_offset=self.k_offset,
            head_offset=self.head_offset,
            num_heads_global=self.num_heads_global,
        )

    def operands(self, q: Tensor) -> Operands:
        """Element size, head dim and query heads per key/value head, on which a plan's costs depend."""
        return Operands(q.element_size(), int(q.shape[-1]), self.num_heads // self.num_kv_heads)

    def plan(
        self,
        rule: Expression | None = None,
        *,
        device: torch.device | str = "cpu",
        allowed: Allowed = ANYTHING,
        choice: Choice | None = None,
        operands: Operands | None = None,
    ) -> Plan:
        """Plan of `rule`, or of the pattern if None, on this kind of device."""
        how: dict[str, Any] = {"device": device, "allowed": allowed, "operands": operands}
        if not self.placement:
            return plan(self.bound(rule), layout=self.layout, choice=choice, **how)
        heads = {"num_heads": self.num_heads, "head_offset": self.head_offset}
        return plan_at(
            read_text(self.pattern) if rule is None else rule,
            Placement.read(self.placement),
            **heads,
            num_heads_global=self.num_heads_global,
            **how,
        )


def check_heads(constants: str) -> None:
    """Raise ValueError if the pattern is for another number of heads; `attend` does not check that in a trace."""
    pattern, _, _, num_heads_global, *_ = read_written(constants)
    read_text(pattern).check_heads(num_heads_global)


@plans
def _content(x: Tensor) -> tuple[torch.dtype, torch.Size, str]:
    """(dtype, shape, digest of the values)."""
    return x.dtype, x.shape, content_digest(x.detach().contiguous())


def selection_in(key: Call) -> Selection | None:
    """Split of the call's pattern; None unless tokens are in order and the first key begins a block."""
    found = parted(key.pattern) if not key.placement and key.rate == 1 else None
    return None if found is None or key.k_offset % found.leaf.block[1] else found


@lru_cache(maxsize=256)
def parted(text: str) -> Selection | None:
    """Split of a pattern with selected blocks; None if it has no table that can be separated."""
    return selection_of(read_text(text)) if '"kind":"selected_blocks"' in text else None


def without_table(key: Call, selection: Selection, bindings: Sequence[Tensor]) -> tuple[Call, list[Tensor]]:
    """(key, bindings) of the call for the pairs that need no table."""
    assert selection.others is not None
    return key._replace(pattern=selection.others.text), tensors_of(key, selection.others, bindings)


def tensors_of(key: Call, part: Expression, bindings: Sequence[Tensor]) -> list[Tensor]:
    """Run-time tensors of a call that `part` names, sorted by name."""
    tensors = dict(zip(names(read_text(key.pattern)), bindings, strict=True))
    return [tensors[name] for name in names(part)]
