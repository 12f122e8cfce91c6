"""Patterns of FlexAttention's BlockMasks: partial blocks by the mask_mod, full blocks whole, up to their lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import gcd
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from ... import _torch_private
from ..core import (
    And,
    Bounds,
    Box,
    MaskMod,
    Or,
    Pair,
    Pattern,
    Ranges,
    Reason,
    as_ranges,
    at_least,
    every,
    outside_torch_modes,
    pattern_kind,
)
from ._block_list import block_list
from ._per_sample import per_sample

# B batch entries and H heads with block lists, R query blocks (rows), C key blocks (columns)

# Lists of more pairs are not compared with the mask_mod, which is evaluated for every pair in half a second.
_MOST_COMPARED_PAIRS = 1 << 28


@pattern_kind("positions_below", positional=0)
class PositionsBelow(Pattern):
    """Pattern that allows every pair, but only binds to query positions below `queries` and key positions below `keys`.

    `bind` raises ValueError for later positions, and for a number of heads (over all devices) other than `heads`; with
    None, any number fits.
    """

    queries: int = at_least(1)
    keys: int = at_least(1)
    heads: int | None = at_least(1, default=None)

    def check_heads(self, num_heads: int) -> None:
        if self.heads not in (None, num_heads):
            raise ValueError(
                f"the pattern of a BlockMask with lists for {self.heads} heads needs calls of as many; got {num_heads}"
            )

    def check_tokens(self, queries: range, keys: range) -> None:
        if queries.stop > self.queries or keys.stop > self.keys:
            raise ValueError(
                f"the pattern of a BlockMask ends at its lengths, {self.queries} queries and {self.keys} keys: make it "
                "from a longer BlockMask or, for any length, from a function, masks.custom(mask_mod); got "
                f"{queries.stop} queries and {keys.stop} keys"
            )

    def for_head(self, head: int, num_heads: int) -> Pattern:
        return self if self.heads is None else replace(self, heads=None)

    def snapped(self, q_side: int, k_side: int) -> Pattern:
        return self

    def mask_mod(self, *, num_heads: int, device: torch.device) -> MaskMod:
        return lambda b, h, q, k: (q == q) & (k == k)

    def count(self, box: Box, *, num_heads: int) -> Bounds:
        return Bounds(box.area, box.area)

    def reason(self, pair: Pair) -> Reason:
        return Reason(self, True, f"every pair of the first {self.queries} queries and {self.keys} keys is allowed")

    def period(self) -> int:
        return 1

    def row(self, query: int, keys: range) -> Ranges:
        return as_ranges(keys)


def of_block_mask(
    block_mask: BlockMask, custom: Callable[[Any], Pattern], reads_entry: Callable[[Any], bool], entries: int | None
) -> Pattern:
    """Return the pattern of the pairs that compiled FlexAttention computes for a BlockMask.

    custom: makes a pattern of a mask_mod.
    reads_entry: returns True if a mask_mod reads the batch entry `b`.
    entries: number of batch entries of the calls, where the lists are for as many or for one. None takes the number
        from lists for two or more; with lists for one entry the pattern then fits any number.

    Raises ValueError for lists that `partial_and_full_blocks` refuses, and if the mask_mod reads `b` with entries=None
    and lists for one entry.
    """
    partial, full = partial_and_full_blocks(block_mask)
    if entries is None and len(partial) > 1:
        entries = len(partial)
    # In the caller's modes: to record a function is to follow what torch calls.
    rules = rules_of_mask_mod(block_mask.mask_mod, entries, custom, reads_entry)
    return _pattern_of_rules(rules, partial, full, block_mask)


@outside_torch_modes
def _pattern_of_rules(
    rules: Sequence[Pattern], partial: Bool[Tensor, "B H R C"], full: Bool[Tensor, "B H R C"], block_mask: BlockMask
) -> Pattern:
    """Return the pattern of a BlockMask whose mask_mod is rules[b] in batch entry b.

    partial, full: lists for one batch entry, which all rules share, or for as many entries as there are rules.
    """
    partial, full = (each.expand(len(rules), -1, -1, -1) for each in (partial, full))
    made: list[Pattern] = []
    for entry, rule in enumerate(rules):
        if entry and rule is rules[entry - 1] and all(torch.equal(x[entry], x[entry - 1]) for x in (partial, full)):
            made.append(made[-1])
        else:
            made.append(_pattern_of_entry(rule, partial[entry], full[entry], block_mask))
    whole = made[0] if len(set(made)) == 1 else per_sample(made, _entry_numbers(len(made)), name="batch_entry")
    (queries, keys), heads = block_mask.seq_lengths, partial.shape[1]
    return And.of(whole, PositionsBelow(int(queries), int(keys), heads if heads > 1 else None))


def rules_of_mask_mod(
    function: Any, entries: int | None, custom: Callable[[Any], Pattern], reads_entry: Callable[[Any], bool]
) -> list[Pattern]:
    """Return a list with the pattern of a mask_mod in each batch entry; it repeats one pattern if `b` is not read.

    entries: number of batch entries; None, if the number is unknown, gives a list of one pattern.
    custom, reads_entry: as in `of_block_mask`.

    Raises ValueError if the mask_mod reads the batch entry, and `entries` is None.
    """
    if function is noop_mask:
        return [every()] * (entries or 1)
    if not reads_entry(function):
        return [custom(function)] * (entries or 1)
    if entries is None:
        name = getattr(function, "__qualname__", type(function).__name__)
        raise ValueError(
            f"the mask_mod {name!r} must not depend on the batch entry b, as all entries share the lists of its "
            "BlockMask: write create_block_mask(mask_mod, B=batch, ...) for two entries or more, and for one entry a "
            "function that does not read b"
        )
    return [custom(_mask_mod_at_entry(function, entry)) for entry in range(entries)]


def _mask_mod_at_entry(function: Any, entry: int) -> Any:
    def at_entry(b, h, q, k):
        return function(torch.full_like(b, entry), h, q, k)

    at_entry.__qualname__ = getattr(function, "__qualname__", at_entry.__qualname__)
    return at_entry


@lru_cache(maxsize=64)
def _entry_numbers(batch: int) -> Tensor:
    """Return arange(batch), cached: patterns with tensors of one name combine only if these are one object."""
    return torch.arange(batch)


def _pattern_of_entry(
    rule: Pattern, partial: Bool[Tensor, "H R C"], full: Bool[Tensor, "H R C"], block_mask: BlockMask
) -> Pattern:
    if _lists_match_rule(rule, partial, full, block_mask):
        return rule
    if rule == every():
        partial, full = torch.zeros_like(full), partial | full
    if len(full) > 1 and all(torch.equal(table, table[:1].expand_as(table)) for table in (partial, full)):
        partial, full = partial[:1], full[:1]
    (queries, keys), (q_side, k_side) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    side = gcd(q_side, k_side)  # side of the square blocks into which both sides divide

    def listed(table: Tensor) -> Pattern:
        blocks = table.repeat_interleave(q_side // side, 1).repeat_interleave(k_side // side, 2)
        blocks = blocks[:, : -(-queries // side), : -(-keys // side)]
        return block_list(blocks[0] if len(blocks) == 1 else blocks, block=side)

    parts = [And.of(listed(partial), rule)] * bool(partial.any()) + [listed(full)] * bool(full.any())
    return Or.of(*parts) if parts else ~every()


def _lists_match_rule(
    rule: Pattern, partial: Bool[Tensor, "H R C"], full: Bool[Tensor, "H R C"], block_mask: BlockMask
) -> bool:
    """Return True if the lists are found to allow exactly the pairs that `rule` allows.

    In three cases the result is False even if the pairs are equal: the mask_mod indexes beyond the end of a tensor; the
    rule may differ by head and the lists are for a single head; or there are more than 2**28 pairs over all heads of
    the lists, and `rule` is not `every()`.
    """
    (queries, keys), (q_side, k_side) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    if rule == every():
        return bool((partial | full).all())
    by_head = rule.for_head(0, 1) is not rule
    if queries * keys * len(full) > _MOST_COMPARED_PAIRS or (by_head and len(full) == 1):
        return False
    mask_mod = rule.mask_mod(num_heads=len(full), device=torch.device("cpu"))
    batch, head = torch.tensor(0), torch.arange(len(full) if by_head else 1)[:, None, None]
    query, key = torch.arange(queries)[:, None], torch.arange(keys)
    for rows in query.split(gcd(q_side, 256)):  # queries of one block
        try:
            allowed = mask_mod(batch, head, rows, key)
        except IndexError:  # a tensor of the mask_mod ends before the lengths, where the lists name no block
            return False
        some, whole = (table[:, None, rows[0] // q_side, key // k_side] for table in (partial, full))
        listed = (some & allowed) | whole
        if not torch.equal(listed, allowed.expand_as(listed)):
            return False
    return True


@outside_torch_modes
def partial_and_full_blocks(block_mask: BlockMask) -> tuple[Bool[Tensor, "B H R C"], Bool[Tensor, "B H R C"]]:
    """Return (partial, full): the BlockMask's lists of partial and of full blocks as booleans on the CPU.

    An element is True where a row names the key block of that column.

    Raises ValueError for lists that name a block outside of the lengths or twice, whose shapes or numbers of blocks do
    not fit, or that have no values.
    """
    rows, columns = (-(-size // side) for size, side in zip(block_mask.seq_lengths, block_mask.BLOCK_SIZE, strict=True))
    lists = block_lists(block_mask)
    partial = _listed_blocks("", lists[0], lists[1], rows, columns)
    full = _listed_blocks("full_", lists[2], lists[3], rows, columns) if lists[2:] else torch.zeros_like(partial)
    if partial.shape != full.shape:
        raise ValueError(
            "a BlockMask must have lists of partial and of full blocks for the same batch entries and heads; got "
            f"{tuple(partial.shape[:2])} and {tuple(full.shape[:2])}"
        )
    _require_no_repeats("kv_indices and full_kv_indices", partial.int() + full.int())
    return partial, full


@outside_torch_modes
def block_lists(block_mask: BlockMask) -> list[Tensor]:
    """Return [kv_num_blocks, kv_indices] on the CPU, then full_kv_num_blocks and full_kv_indices if both are given.

    The results may share memory with the BlockMask's tensors. Raises ValueError for tensors without values, which are
    on the meta device or of a FakeTensorMode.
    """
    has_full = None not in (block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    names = [f"{kind}kv_{what}" for kind in ("", *["full_"] * has_full) for what in ("num_blocks", "indices")]
    found = {name: getattr(block_mask, name) for name in names}
    for name, table in found.items():
        is_fake = isinstance(table, _torch_private.FakeTensor)
        if table.is_meta or is_fake:
            got = "tensors of a FakeTensorMode" if is_fake else "tensors on the meta device"
            raise ValueError(f"a BlockMask must have values in {name}; got {got}")
    return [table.detach().cpu() for table in found.values()]


def _listed_blocks(kind: str, numbers: Tensor, indices: Tensor, rows: int, columns: int) -> Bool[Tensor, "B H R C"]:
    """Return lists of blocks as booleans, True where a row names the key block of that column.

    Errors are those of `partial_and_full_blocks`.

    kind: prefix of the lists' names in errors.
    numbers, indices: num_blocks and indices of the BlockMask, on the CPU.
    rows, columns: numbers of query and key blocks, by the lengths.
    """
    names = f"{kind}kv_num_blocks and {kind}kv_indices"
    if numbers.shape != indices.shape[:-1] or indices.dim() > 4 or 0 in numbers.shape:
        shapes = f"{tuple(numbers.shape)} and {tuple(indices.shape)}"
        raise ValueError(f"{names} must have shapes (B, H, rows) and (B, H, rows, blocks); got {shapes}")
    if indices.shape[-2] < rows:
        raise ValueError(f"{names} must have a row for each block of queries, {rows} rows; got {indices.shape[-2]}")
    missing = (None,) * (4 - indices.dim())
    numbers, indices = (each.long()[missing] for each in (numbers, indices))
    numbers, indices = numbers[..., :rows], indices[..., :rows, :]
    used = torch.arange(indices.shape[-1]) < numbers[..., None]
    for what, found, stop in (("num_blocks", numbers, indices.shape[-1] + 1), ("indices", indices[used], columns)):
        wrong = found[(found < 0) | (found >= stop)]
        if len(wrong):
            rule = f"{kind}kv_{what} of a BlockMask must be at least 0 and below {stop}, by its shape and lengths"
            raise ValueError(f"{rule}; got {int(wrong[0])}")
    table = torch.zeros(*numbers.shape, columns + 1, dtype=torch.int32)
    table.scatter_add_(-1, torch.where(used, indices, columns), torch.ones_like(indices, dtype=torch.int32))
    _require_no_repeats(f"{kind}kv_indices", table[..., :columns])
    return table[..., :columns] > 0


def _require_no_repeats(what: str, table: Tensor) -> None:
    again = (table > 1).nonzero()
    if len(again):
        entry, head, row, column = again[0].tolist()
        raise ValueError(
            f"{what} of a BlockMask must name a block at most once in a row, as FlexAttention counts it each time; got "
            f"block {column} twice in row {row}, batch entry {entry}, head {head}"
        )
