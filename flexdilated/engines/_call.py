"""Call: the pattern and sizes of an attention call, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..masks import Layout, cache
from ..masks.core import Bound, Expression, Extent, content_digest, device_kind, outside_torch_modes
from ..masks.orders import Placement
from ..masks.patterns import blank, names, tables
from ..masks.planning import ANYTHING, Allowed, Choice, OperandSizes, Plan, plan, plan_at
from ..masks.text import read_text
from ._ops import read_constants, write_constants

_FEW_BYTES = 1 << 14  # run-time tensors up to this size are digested faster than resolved


class Call(NamedTuple):
    """Pattern (as JSON) and sizes of one attention call: plain data, used as a key of caches.

    num_heads, num_kv_heads: numbers of query and key/value heads on this device.
    num_heads_global: number of query heads on all devices; this device has num_heads of them, from head_offset on.
    q_offset, k_offset: positions of the first query and the first key.
    rate: the tokens are sorted by (index mod rate, index div rate); 1 for natural order.
    block_size: (queries, keys) of a block; empty for the default.
    placement: text of a Placement, which gives each token's position (the offsets are then 0); "" for consecutive
        positions.
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
        """Return the Call of q (B, H, N, D) and k (B, G, M, D), whose shapes give its numbers of heads and tokens."""
        sizes = (q.shape[1], k.shape[1], q.shape[2], k.shape[2], q_offset, k_offset)
        return cls(pattern, *sizes, head_offset, num_heads_global, rate, block_size, placement)

    @property
    def arguments(self) -> tuple[str, int, int]:
        """Return (constants, q_offset, k_offset), arguments of custom ops from which `Call.of` restores the call.

        constants: one text with all other fields, except the numbers of heads and tokens on this device: the shapes of
            q and k give these.
        """
        values = (self.head_offset, self.num_heads_global, self.rate, self.block_size)
        return write_constants((self.pattern, self.placement), values), self.q_offset, self.k_offset

    @property
    def sizes_and_offsets(self) -> tuple[int, int, int, int, int, int]:
        """Return (num_heads, num_kv_heads, num_queries, num_keys, q_offset, k_offset).

        The text in `arguments` has none of these.
        """
        return self.num_heads, self.num_kv_heads, self.num_queries, self.num_keys, self.q_offset, self.k_offset

    @classmethod
    def of(cls, q: Tensor, k: Tensor, constants: str, q_offset: int, k_offset: int) -> Call:
        """Return the Call with these `Call.arguments`, and with the numbers of heads and tokens of q and k.

        Sizes and offsets are converted to int, which makes symbolic ones constants in a torch.compile trace.
        """
        pattern, placement, *others = read_constants(constants)
        sizes = (q.shape[1], k.shape[1], q.shape[2], k.shape[2], q_offset, k_offset)
        return cls._make((pattern, *map(int, sizes), *others, placement))

    @property
    def offsets(self) -> tuple[int, int, int]:
        """Return (global index of the first head, position of the first query, position of the first key)."""
        return self.head_offset, self.q_offset, self.k_offset

    @property
    def sides(self) -> tuple[int, int] | None:
        """Requested (queries, keys) of a block; None for the default."""
        return None if not self.block_size else (self.block_size[0], self.block_size[1])

    @property
    def layout(self) -> Layout:
        """Return the order of the queries: sorted by (index mod rate, index div rate); natural for rate 1."""
        return Layout(self.num_queries, self.rate)

    @property
    def extent(self) -> Extent:
        """Return (last query position + 1, last key position + 1); both are the placement's end if there is one."""
        if self.placement:
            end = Placement.read(self.placement).end
            return Extent(end, end)
        return Extent(self.q_offset + self.num_queries, self.k_offset + self.num_keys)

    def rules(self, bindings: Sequence[Tensor]) -> Expression:
        """Return the pattern with the values of its run-time tensors.

        bindings: these tensors, sorted by name.

        The values are read in every call and not cached: neither identity nor version shows every write to a tensor
        (collectives, `.data`, NumPy and third-party kernels do not increment the version).

        Raises TypeError or ValueError for a tensor that does not fit.
        """
        pattern = read_text(self.pattern)
        return pattern.resolve(dict(zip(names(pattern), bindings, strict=True)), self.extent)

    def cached_rules(self, bindings: Sequence[Tensor]) -> Expression:
        """Return the pattern with the values of its run-time tensors, like `rules`, but from a cache if they are small.

        bindings: these tensors, sorted by name.

        The cache is keyed by their contents. It is used if all tensors are on the CPU and have at most 16 KiB
        together.
        """
        if sum(x.nbytes for x in bindings) > _FEW_BYTES or not all(device_kind(x.device).on_host for x in bindings):
            return self.rules(bindings)
        return cache().get(
            ("rule", self.pattern, self.extent, *map(_content_key, bindings)),
            lambda: self.rules(bindings),
            lambda rule: sum(table.rows.nbytes for table in tables(rule)),
            pattern=self.pattern,
        )

    def blank(self, bindings: Sequence[Tensor]) -> Expression:
        """Return the pattern with placeholders for its run-time tensors.

        bindings: these tensors, sorted by name.

        Only their shapes affect the result, not their values.
        """
        pattern = read_text(self.pattern)
        return blank(pattern, dict(zip(names(pattern), bindings, strict=True)), self.extent)

    def bound(self, rule: Expression | None = None) -> Bound:
        """Return a Bound of `rule`, or of the call's pattern if `rule` is None, with the call's offsets and sizes."""
        return (read_text(self.pattern) if rule is None else rule).bind(
            num_heads=self.num_heads,
            num_queries=self.num_queries,
            num_keys=self.num_keys,
            q_offset=self.q_offset,
            k_offset=self.k_offset,
            head_offset=self.head_offset,
            num_heads_global=self.num_heads_global,
        )

    def operands(self, q: Tensor) -> OperandSizes:
        """Return (element size in bytes, head dim, query heads per key/value head), on which plan costs depend."""
        return OperandSizes(q.element_size(), int(q.shape[-1]), self.num_heads // self.num_kv_heads)

    def plan(
        self,
        rule: Expression | None = None,
        *,
        device: torch.device | str = "cpu",
        allowed: Allowed = ANYTHING,
        choice: Choice | None = None,
        operands: OperandSizes | None = None,
    ) -> Plan:
        """Return the plan that computes `rule`, or the call's pattern if `rule` is None.

        device: its type is used, its index is not.
        allowed: kinds of terms that the engine can run.
        choice: options to use if the pattern has all of them; None for the options of lowest predicted cost. A call
            with a placement ignores it.
        operands: sizes of the tensors; None for the device's usual sizes.
        """
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
    """Raise ValueError if the pattern is for another number of query heads than the call has on all devices.

    `attend` does not check the number of heads in a torch.compile trace.

    constants: the text in `Call.arguments`.
    """
    pattern, _, _, num_heads_global, *_ = read_constants(constants)
    read_text(pattern).check_heads(num_heads_global)


@outside_torch_modes
def _content_key(x: Tensor) -> tuple[torch.dtype, torch.Size, str]:
    """Return (dtype, shape, digest of the values), equal for tensors of equal contents."""
    return x.dtype, x.shape, content_digest(x.detach().contiguous())
