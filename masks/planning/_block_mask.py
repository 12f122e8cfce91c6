"""Block lists of terms; and `block_mask`, `layout` and `snapped`, functions for users of FlexAttention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask

from ..blocks import Blocks, PackedBlocks, join_blocks, table_bytes, to_block_mask
from ..core import (
    HEADS,
    LENGTH,
    Bound,
    Expression,
    Mixture,
    Not,
    Pattern,
    advises,
    device_kind,
    outside_torch_modes,
    renamed,
    require_expression,
    require_int,
)
from ..orders import Layout, residue_rate
from ..plan_cache import cache
from .lowering._layouts import shared_terms
from .lowering._term import Term

_LARGEST_SIDE = 1 << 15  # pairs of a block are counted in int32


@outside_torch_modes
@advises(keywords=renamed(num_queries=LENGTH, num_heads=HEADS))
def block_mask(
    pattern: Expression,
    num_queries: int,
    num_keys: int | None = None,
    *,
    num_heads: int,
    head_offset: int = 0,
    num_heads_global: int | None = None,
    q_offset: int = 0,
    k_offset: int = 0,
    layout: Layout | None = None,
    device: torch.device | str = "cpu",
    block_size: int | tuple[int, int] = 128,
) -> BlockMask:
    """Return the BlockMask of a pattern for `flex_attention`, built from counts over boxes of pairs; cached.

    Its block lists equal those of `create_block_mask`. A mixture (a sum of patterns, where a pair may count more than
    once) gives the mask of its union; use `attend` for the counts.

    num_keys: num_queries by default.
    num_heads, head_offset: the mask is for heads head_offset to head_offset + num_heads - 1.
    num_heads_global: number of heads over all devices; by default head_offset + num_heads.
    q_offset, k_offset: positions of the first query and key.
    layout: order of q, k and v after `layout.apply`, natural if None; permute the output back by `layout.invert`.
    device: device of the mask.
    block_size: tokens of a block, or (queries, keys).

    The mask's batch axis has length 1 unless a run-time tensor has a row for each batch entry, equal or not; its head
    axis has length 1 if all heads have equal rules.

    Raises ValueError for a pattern with padding='zeros', as its zero keys are not part of a mask, for a layout of
    another number of tokens, and for sizes or heads that do not fit.

    >>> masks.block_mask(masks.causal(), 256, num_heads=1).shape
    (1, 1, 256, 256)
    """
    keys = num_queries if num_keys is None else num_keys
    if require_expression(pattern).pads:
        raise ValueError(
            "a BlockMask has no room for the zero keys of padding='zeros': call fd.attend, or give the exact pattern, "
            f"{pattern.unpadded!r}"
        )
    bound = pattern.bind(
        num_heads=num_heads,
        num_queries=num_queries,
        num_keys=keys,
        head_offset=head_offset,
        num_heads_global=num_heads_global,
        q_offset=q_offset,
        k_offset=k_offset,
    )
    if layout is not None and not layout.num_tokens == num_queries == keys:
        raise ValueError(
            f"layout must be for {num_queries} queries and {keys} keys; got one for {layout.num_tokens} tokens"
        )
    rate = 1 if layout is None else layout.rate
    (term,) = shared_terms(bound.union, 1, bound, rate)
    where, sides = torch.device(device), block_sides(block_size)
    if not device_kind(where).on_host:  # plain `cuda` changes its meaning with `torch.cuda.set_device`
        where = torch.empty(0, device=where).device

    def build() -> BlockMask:
        blocks = join_blocks(bound_blocks(term, bound, sides))
        return to_block_mask(blocks, term.mask_mod(where), where, batch=term.rule.num_entries())

    key = ("block_mask", bound.key(), term, where, sides)
    return cache().get(key, build, table_bytes, pattern=pattern, device=where)


def bound_blocks(term: Term, bound: Bound, block_size: tuple[int, int]) -> list[Blocks]:
    """Return the block lists of a term, from the cache if it has them.

    There is one item for each batch entry if a run-time tensor has a row for each, else a single item.

    bound: the pattern, bound to sizes, that the term belongs to.
    block_size: (queries, keys).
    """
    packed = cache().get(
        ("blocks", bound.key(), term, block_size),
        lambda: [PackedBlocks.pack(each.blocks(*block_size)) for each in entry_terms(term)],
        lambda packed: sum(each.nbytes for each in packed),
        pattern=bound.pattern,
    )
    return [each.unpack() for each in packed]


def term_blocks(term: Term, block_size: tuple[int, int]) -> Blocks:
    """Return the block list of a term; block_size: (queries, keys).

    If a run-time tensor has a row for each batch entry, the lists of all entries are joined, as by `join_blocks`.
    """
    return join_blocks([each.blocks(*block_size) for each in entry_terms(term)])


def entry_terms(term: Term) -> list[Term]:
    """Return the term once for each batch entry, with that entry's run-time tensors; once if none has several rows."""
    return [replace(term, rule=term.rule.entry(index)) for index in range(term.rule.num_entries())]


def block_sides(block_size: int | tuple[int, int]) -> tuple[int, int]:
    """Return (queries, keys) of a block size.

    Raises TypeError or ValueError unless both are integers from 1 to 32,768.
    """
    sides = block_size if isinstance(block_size, tuple | list) else (block_size, block_size)
    if len(sides) != 2:
        raise ValueError(f"block_size must be one number of tokens, or two, for queries and keys; got {block_size=}")
    rows, columns = sides
    require_int("block_size", rows, minimum=1, maximum=_LARGEST_SIDE)
    require_int("block_size", columns, minimum=1, maximum=_LARGEST_SIDE)
    return rows, columns


@advises(keywords=renamed(num_tokens=LENGTH))
def layout(pattern: Expression, num_tokens: int) -> Layout:
    """Return the residue-major order for this pattern: tokens sorted by position modulo `rate`, then by position.

    Its rate is the least common multiple of the pattern's dilation rates; 1, the natural order, without dilation. Rates
    are taken in ascending order, and a rate that would raise the multiple above `num_tokens` is skipped.

    >>> masks.layout(masks.longnet((64, 256), (1, 4)), 256)
    Layout(num_tokens=256, rate=4)
    """
    require_int("num_tokens", num_tokens, minimum=1)
    return Layout(num_tokens, residue_rate(require_expression(pattern).union, num_tokens))


class Snapped(NamedTuple):
    """Pattern with sizes rounded up to whole blocks.

    changes: a line of text for each distinct part that changed, and for each one that cannot be rounded.
    """

    pattern: Any
    changes: tuple[str, ...]


@advises()
def snapped(pattern: Pattern | Mixture, block: int | tuple[int, int] = 128) -> Snapped:
    """Return (pattern, changes): the pattern with sizes rounded up to whole kernel blocks, and lines of text about it.

    * `local_window`: left and right, unless multiples of `block`, become the next multiple minus 1, as the window also
      includes the query's own position. All pairs stay allowed; the computed blocks do not change.
    * `dilated`, `chunked`, `longnet`: segments are rounded up to a multiple of rate * block, so that segment / rate
      tokens fill whole blocks; rates and offsets are unchanged. A segment that is no multiple of its rate is unchanged,
      and so is every segment with padding='zeros'.
    * `blockwise`: its block is rounded up to a multiple of `block`. All pairs of the computed blocks are then allowed.
    * `selected_blocks`: its block sizes are rounded up to a divisor or a multiple of `block`; make the table for the
      rounded sizes. A pattern that carries its table is unchanged.
    * `block_list`: unchanged. Raises ValueError unless its block size divides `block` or is a multiple of it.

    Longer segments and longer blocks of `blockwise` begin at other tokens, so single pairs may be lost.

    In compositions, such as `&`, `|`, `+`, choices by head, `after` and `per_document`, each part is rounded. `causal`,
    `every` and the lengths of a BlockMask have no sizes to round. All other patterns are unchanged and have a line in
    `changes`, and so have patterns under `~`, where rounding up would allow fewer pairs.

    block: tokens of a kernel's block, or (queries, keys); of two numbers, windows use the greatest common divisor,
        segments and `blockwise` the least common multiple.

    Raises ValueError for blocks outside 1 to 32,768 and for sizes that would exceed 2^31 - 1.

    >>> found = masks.snapped(masks.local_window(left=1000, right=0) & masks.causal(), 128)
    >>> found.pattern
    local_window(left=1023, right=0) & causal()
    >>> found.changes
    ('local_window(left=1000, right=0) -> local_window(left=1023, right=0)',)
    >>> masks.snapped(masks.longnet((1000, 4000), (1, 4)), 128).pattern
    longnet((1024, 4096), (1, 4))
    """
    require_expression(pattern)
    sides, lines = block_sides(block), dict[str, None]()

    def change(part: Pattern) -> Pattern:
        if isinstance(part, Not):
            lines[f"{part!r} is unchanged: rounding up sizes under ~ would allow fewer pairs"] = None
            return part
        if part.leaves() != (part,):
            return part.map_parts(change)
        found = part.snapped(*sides)
        if found is None:
            lines[f"{part!r} is unchanged: there is no rule to round its sizes"] = None
        elif found != part:
            lines[f"{part!r} -> {found!r}"] = None
        return part if found is None else found

    changed = Mixture.of(*map(change, pattern.branches()))
    return Snapped(changed, tuple(lines))
