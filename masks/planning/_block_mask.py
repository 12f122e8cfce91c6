"""block_mask and layout: the functions for users of FlexAttention."""

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
    plans,
    renamed,
    require_expression,
    require_int,
)
from ..orders import Layout, residue_rate
from ..plan_cache import cache
from .lowering._layouts import shared_terms
from .lowering._term import Term

_LARGEST_SIDE = 1 << 15  # pairs of a block are counted in int32


@plans
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
    """The pattern as a BlockMask for `flex_attention`, built from closed forms and cached.

    Its block lists equal the result of `create_block_mask`; no N x M tensor is built. A mixture
    gives the mask of its union: pairs that count more than once need `attend`. With `layout` rows and
    columns are slots: permute q, k and v by `layout.apply` and the output by `layout.invert`.
    num_keys is num_queries by default; block_size is one side or (query side, key side). Raises ValueError for a
    pattern that pads with zeros, whose zero keys are no pairs.

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
        raise ValueError(f"the layout orders {layout.num_tokens} tokens; got {num_queries} queries and {keys} keys")
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
    """Cached block lists of one term of a bound pattern, one for each distinct batch entry of run-time tables."""
    packed = cache().get(
        ("blocks", bound.key(), term, block_size),
        lambda: [PackedBlocks.pack(each.blocks(*block_size)) for each in entry_terms(term)],
        lambda packed: sum(each.nbytes for each in packed),
        pattern=bound.pattern,
    )
    return [each.unpack() for each in packed]


def term_blocks(term: Term, block_size: tuple[int, int]) -> Blocks:
    """Block lists of the term; if run-time tables differ by batch entry, concatenated over entries."""
    return join_blocks([each.blocks(*block_size) for each in entry_terms(term)])


def entry_terms(term: Term) -> list[Term]:
    """The term of each distinct batch entry of run-time tables."""
    return [replace(term, rule=term.rule.entry(index)) for index in range(term.rule.num_entries())]


def block_sides(block_size: int | tuple[int, int]) -> tuple[int, int]:
    """(query side, key side) of a block size; ValueError unless both are integers from 1 to 32768."""
    sides = block_size if isinstance(block_size, tuple | list) else (block_size, block_size)
    if len(sides) != 2:
        raise ValueError(f"block_size must be one side or (query side, key side); got {block_size=}")
    rows, columns = sides
    require_int("block_size", rows, minimum=1, maximum=_LARGEST_SIDE)
    require_int("block_size", columns, minimum=1, maximum=_LARGEST_SIDE)
    return rows, columns


@advises(keywords=renamed(num_tokens=LENGTH))
def layout(pattern: Expression, num_tokens: int) -> Layout:
    """The residue-major order of this pattern; its rate is the least common multiple of the dilation rates.

    A pattern without dilation gets the natural order (rate 1). More residue classes than tokens have no effect: rates
    are taken in ascending order, and a rate that would raise the common multiple above `num_tokens` is skipped.

    >>> masks.layout(masks.longnet((64, 256), (1, 4)), 256)
    Layout(num_tokens=256, rate=4)
    """
    require_int("num_tokens", num_tokens, minimum=1)
    return Layout(num_tokens, residue_rate(require_expression(pattern).union, num_tokens))


class Snapped(NamedTuple):
    """A pattern in whole blocks, and a line for each part that was changed, or kept because no rounding is defined."""

    pattern: Any
    changes: tuple[str, ...]


@advises()
def snapped(pattern: Pattern | Mixture, block: int | tuple[int, int] = 128) -> Snapped:
    """The pattern with its sizes rounded up to whole blocks, in which kernels compute; and the changes.

    * `local_window`: left and right go up to a multiple of the side minus 1, as the window includes the query's own
      key; a multiple of the side stays. The computed blocks do not change, and all pairs stay allowed.
    * `dilated`, `chunked`, `longnet`: segments up to a multiple of rate * side, so that segment / rate tokens fill
      whole blocks; rates and offsets stay. Segments that are no multiple of their rate are unchanged.
    * `blockwise`: blocks up to a multiple of the side. Longer segments and blocks begin at other tokens: there are
      more pairs in total, but single pairs may be lost. Segments and blocks in whole blocks have no overcompute.
    * `selected_blocks`: sides up to one that divides the kernel's or is a multiple of it, for which tables are then
      made; unchanged if it carries its table.
    * `block_list`: unchanged, if its side divides the kernel's or is a multiple of it; else a ValueError.

    `&`, `|`, `+`, choices by head, `after` and `per_document` are changed in their parts. `causal` and `every` have no
    sizes. Other patterns are unchanged, with a line that says so; also patterns under `~`, where rounding up would
    allow fewer pairs.

    block: the side of the kernels' blocks, or (query side, key side); windows then use their greatest common
        divisor, other patterns their least common multiple. Raises ValueError for sides outside 1 to 32,768 and for
        sizes that would exceed 2^31 - 1.

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
            lines[f"{part!r} is left as it is: more pairs inside of a complement would be fewer outside"] = None
            return part
        if part.leaves() != (part,):
            return part.map_parts(change)
        found = part.snapped(*sides)
        if found is None:
            lines[f"{part!r} is left as it is: there is no rule for it"] = None
        elif found != part:
            lines[f"{part!r} -> {found!r}"] = None
        return part if found is None else found

    changed = Mixture.of(*map(change, pattern.branches()))
    return Snapped(changed, tuple(lines))
