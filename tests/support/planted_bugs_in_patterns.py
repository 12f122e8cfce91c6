"""Bugs planted into patterns, layouts and the tables made of them."""

from dataclasses import replace
from functools import cache

import torch

from flexdilated import masks
from flexdilated.masks.core._box import Bounds
from flexdilated.testing import check_pattern
from tests.support.planted_bugs import Bug, Look

MASKS = "flexdilated.masks"
LONGNET = masks.longnet(segment_lengths=(4, 8), dilation_rates=(1, 2), offsets="contiguous")


@cache
def claims(pattern: masks.Pattern | masks.Mixture) -> Look:
    """Looks at all that a pattern says of itself."""
    return lambda: check_pattern(pattern, num_heads=4, max_tokens=24, examples=20)


def _as_full(right):
    """Wherever a box may hold a pair it holds all of them, the case between two residues too."""

    def count(self, box, *, num_heads):
        bounds = right(self, box, num_heads=num_heads)
        return Bounds(torch.where(bounds.high > 0, box.area, 0), bounds.high)

    return count


def _square_only(right):
    """Blocks right of the diagonal of block numbers are dropped, as if both sides were equal."""

    def leaves(rule, roots, sides):
        for found in right(rule, roots, sides):
            kept = found.column <= found.row
            yield type(found)(*(each[kept] for each in found))

    return leaves


def _shifted(by: int):
    """The bound of the causal count moved by some keys."""
    return lambda right: lambda box, shift: right(box, shift + by)


def _even_pieces(right):
    """Every residue class has as many tokens as the shortest."""

    def pieces(self, origin):
        found = right(self, origin)
        return replace(found, lengths=torch.full_like(found.lengths, max(self.num_tokens // self.rate, 1)))

    return pieces


IN_PATTERNS = (
    Bug(
        "segment one token too long in the rule", f"{MASKS}.patterns._dilated:_same_segment",
        lambda right: lambda segment: right(segment + 1),
        claims(masks.dilated(6, 1)), "count must bound the allowed pairs of each box",
    ),
    Bug(
        "causal: a query does not see its own key", f"{MASKS}.patterns._band:_not_after",
        lambda _: lambda b, h, q, k: k < q,
        claims(masks.causal()), "count must bound the allowed pairs of each box",
    ),
    Bug(
        "causal: the bounds let a query see the next key", f"{MASKS}.core._box:count_below", _shifted(1),
        claims(masks.causal()), "count says",
    ),
    Bug(
        "window one key short on the left, in the bounds", f"{MASKS}.patterns._band:LocalWindow.count",
        lambda right: lambda self, box, **heads: right(replace(self, left=self.left - 1), box, **heads),
        claims(masks.local_window(left=3, right=1)), "count must bound the allowed pairs of each box",
    ),
    Bug(
        "blocks marked full that miss residues", f"{MASKS}.patterns._band:DilatedWindow.count", _as_full,
        claims(masks.dilated_window(left=4, right=4, rate=2)), "(FULL)", "NATTEN",
    ),
    Bug(
        "blocks dropped where the sides of a block differ", f"{MASKS}.blocks._block_search:descend", _square_only,
        claims(masks.causal()), "is not listed", "attention-gym",
    ),
    Bug(
        "last tokens lost that do not fill a row of the layout", f"{MASKS}.orders._layout:Layout.pieces", _even_pieces,
        claims(masks.causal()), "is listed with another count",
    ),
    Bug(
        "period one token short", f"{MASKS}.patterns._dilated:Dilated.period", lambda _: lambda self: self.segment - 1,
        claims(masks.dilated(6, 1)), "period",
    ),
    Bug(
        "a window said to be confined to its period", f"{MASKS}.patterns._band:LocalWindow.confined",
        lambda _: lambda self: True,
        claims(masks.local_window(left=2, right=0)), "confined",
    ),
    Bug(
        "one head's rule for all heads", f"{MASKS}.patterns._dilated:Dilated.for_head",
        lambda right: lambda self, head, num_heads: right(self, 0, num_heads),
        claims(LONGNET), "for_head(",
    ),
    Bug(
        "one radius written twice into the JSON", f"{MASKS}.patterns._band:LocalWindow.parameters",
        lambda _: lambda self: {"left": self.left, "right": self.left},
        claims(masks.local_window(left=3, right=1)), "JSON",
    ),
)  # fmt: skip
