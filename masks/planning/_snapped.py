"""snapped: a pattern whose windows, segments and blocks fill the blocks that kernels compute."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..core import Mixture, Not, Pattern, advises, require_expression
from ._block_mask import block_sides


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
