"""snapped: a pattern whose windows, segments and blocks fill the blocks that kernels compute."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..core import Mixture, Not, Pattern, advises, require_expression
from ._block_mask import block_sides


class Snapped(NamedTuple):
    """A pattern in whole blocks, and a line for each part that was changed, or left as it is for want of a rule."""

    pattern: Any
    changes: tuple[str, ...]


@advises()
def snapped(pattern: Pattern | Mixture, block: int | tuple[int, int] = 128) -> Snapped:
    """The pattern with its sizes rounded up to whole blocks, in which kernels compute; and what was changed.

    * `local_window`: left and right go up to a multiple of the side less 1, the query's own key being one of the
      window; a multiple of the side stays. The blocks computed are the same, and all pairs stay allowed.
    * `dilated`, `chunked`, `longnet`: segments up to a multiple of rate * side, so that segment / rate tokens fill
      whole blocks; rates and offsets stay. Segments that are no multiple of their rate are left as they are.
    * `blockwise`: blocks up to a multiple of the side. Longer segments and blocks begin at other tokens: on the whole
      there are more pairs, and a single one may go. Nothing is wasted on those that are whole.
    * `selected_blocks`: sides up to one that divides the kernel's or is a multiple of it, for whoever makes the tables
      to choose in; as it is where it carries its table.
    * `block_list`: as it is, if its side divides the kernel's or is a multiple of it; else a ValueError.

    `&`, `|`, `+`, choices by head, `after` and `per_document` are changed in their parts. `causal` and `every` have no
    sizes. All else is left as it is, and a line says so; so is what stands under `~`, as more pairs there are fewer
    outside.

    block: the side of the kernels' blocks, or (query side, key side); windows then go by what divides both, the rest by
        what both divide. Raises ValueError for sides outside 1 to 32,768 and for sizes that would exceed 2^31 - 1.

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
