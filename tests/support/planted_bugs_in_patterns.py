"""Bugs planted into patterns, layouts and the tables made of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from flexdilated import masks
from flexdilated.masks.core._box import Bounds, Box, Progression
from flexdilated.testing import check_pattern
from tests.support import oracle
from tests.support.planted_bugs import Bug, Look

MASKS = "flexdilated.masks"
LONGNET = masks.longnet(segment_lengths=(4, 8), dilation_rates=(1, 2), offsets="contiguous")


@cache
def claims(pattern: masks.Pattern | masks.Mixture) -> Look:
    """Looks at all that a pattern says of itself."""
    return lambda: check_pattern(pattern, num_heads=4, max_tokens=24, examples=20)


def rule(pattern: masks.Pattern, twin: oracle.Rule, num_tokens: int = 21) -> Look:
    """Looks at every pair of four heads."""

    def look() -> None:
        h, q, k = torch.meshgrid(*(torch.arange(size) for size in (4, num_tokens, num_tokens)), indexing="ij")
        mask_mod = pattern.mask_mod(num_heads=4, device=torch.device("cpu"))
        found = mask_mod(torch.tensor(0), h, q, k).expand(h.shape).long()
        places = torch.arange(num_tokens)
        wrong = (found != oracle.counts(twin, range(4), 4, places, places)).nonzero().tolist()
        assert not wrong, f"{len(wrong)} pairs differ from the definition, first (head, query, key) {wrong[0]}"

    return look


def _order() -> None:
    """A layout and its inverse, over lengths that its rate does not divide too."""
    for num_tokens in (1, 6, 7, 12, 13):
        order = masks.Layout(num_tokens, 3)
        x = torch.arange(num_tokens)
        back = order.invert(order.apply(x, dim=0), dim=0)
        assert torch.equal(back, x), f"{num_tokens} tokens: apply, then invert gives {back.tolist()}"


def _pairs_of_a_million() -> None:
    tokens = 1 << 20
    every = Progression(torch.tensor([0]), 1, torch.tensor([tokens]))
    found = int(masks.causal().count(Box(torch.tensor([0]), every, every), num_heads=1).low)
    truth = tokens * (tokens + 1) // 2
    assert found == truth, f"causal over {tokens} tokens has {truth} pairs; got {found}"


def _tables_per_device() -> None:
    """`meta` stands for another device: it is one on every machine."""
    masks.block_mask(masks.causal(), 256, num_heads=1)
    found = masks.block_mask(masks.causal(), 256, num_heads=1, device="meta").kv_num_blocks.device.type
    assert found == "meta", f"tables were asked for on meta, and came on {found}"


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


def _any_device(right):
    def get(self, name, build, size, **options):
        known = tuple(part for part in name if not isinstance(part, torch.device))
        return right(self, known, build, size, **options)

    return get


def _even_pieces(right):
    """Every residue class has as many tokens as the shortest."""

    def pieces(self, origin):
        found = right(self, origin)
        return replace(found, lengths=torch.full_like(found.lengths, max(self.num_tokens // self.rate, 1)))

    return pieces


def _in_32_bits(right):
    def count_below(box, shift):
        bounds = right(box, shift)
        return Bounds(bounds.low.to(torch.int32).long(), bounds.high.to(torch.int32).long())

    return count_below


IN_PATTERNS = (
    Bug(
        "segment one token too long in the rule", f"{MASKS}.patterns._dilated:_same_segment",
        lambda right: lambda segment: right(segment + 1),
        claims(masks.dilated(6, 1)), "count must bound the allowed pairs of each box",
    ),
    Bug(
        "offset of the next head, in the rule and in its bounds alike", f"{MASKS}.patterns._dilated:Dilated.offset_of",
        lambda right: lambda self, head, num_heads: right(self, (head + 1) % num_heads, num_heads),
        rule(masks.dilated(8, 2, "interleaved"), oracle.dilated(8, 2, "interleaved")),
        "pairs differ from the definition",
    ),
    Bug(
        "torchscale's offsets rounded down: floor(h / floor(H / r))", f"{MASKS}.patterns._dilated:Dilated.offset_of",
        lambda _: lambda self, head, num_heads: head // max(num_heads // self.rate, 1) % self.rate,
        rule(masks.dilated(9, 3, "contiguous"), oracle.dilated(9, 3, "contiguous")),
        "pairs differ from the definition",
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
    Bug(
        "tokens put back by the order they came in", f"{MASKS}.orders._layout:Layout.slots",
        lambda _: masks.Layout.positions,
        _order, "apply, then invert gives",
    ),
    Bug(
        "pairs counted in 32 bits", f"{MASKS}.core._box:count_below", _in_32_bits,
        _pairs_of_a_million, "pairs; got",
    ),
    Bug(
        "tables kept without their device", f"{MASKS}.plan_cache._cache:Cache.get", _any_device,
        _tables_per_device, "and came on cpu",
    ),
)  # fmt: skip
