"""Where the queries of a call stand, and all of its keys: on one rank as they are given, over ranks from everyone."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from .._over_ranks import OverRanks
from ..masks import Pattern
from ._reading import Reading
from ._selector import BlockSelector, Selection

if TYPE_CHECKING:
    from ..distributed import Sharding

# B batch, H query heads, G key/value heads, L tokens of this rank's shard, M keys, D head dim


class Runs(NamedTuple):
    """The queries of a call, cut where their positions do not go on: run i has lengths[i] of them from starts[i] on.

    over, sharding: the ranks whose keys these queries choose from; None where the call has them all.
    """

    starts: Sequence[int]
    lengths: Sequence[int]
    over: OverRanks | None = None
    sharding: Sharding | None = None

    def parts(self, q: Float[Tensor, "B H L D"]) -> list[tuple[int, Tensor]]:
        """(position of the first, queries) of each run."""
        return list(zip(self.starts, [q] if len(self.starts) == 1 else q.split(self.lengths, 2), strict=True))

    def whole(self, *keys: Float[Tensor, "B G L D"]) -> tuple[Float[Tensor, "B G M D"], ...]:
        """The keys, or keys and values, of all ranks: in one gather, so that the ranks' backwards meet in one, too."""
        if self.over is None:
            return keys
        from ..distributed import unshard

        return unshard(torch.stack(keys), self.over.mesh, self.sharding, dim=3).unbind()

    def total(self, number: Int64[Tensor, ""]) -> Int64[Tensor, ""]:
        """The sum over the ranks."""
        if self.over is None:
            return number
        from ..distributed import unshard

        return unshard(number.reshape(1), self.over.mesh, dim=0).sum()


def runs_over(
    over: OverRanks,
    selector: BlockSelector,
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G L D"],
    v: Float[Tensor, "B G L D"],
    *,
    enable_gqa: bool,
    scale: float | None,
    q_offset: int,
    within: Pattern | None,
    gradient: str,
) -> Runs:
    """The runs of this rank's queries, after the checks that need no other rank's tokens.

    Raises ValueError, on all ranks, where their calls differ, or where a rank's positions begin within a row.
    """
    from ..distributed.group import check_shards

    if q_offset:
        raise ValueError(f"with a mesh the sharding gives the positions: q_offset must be 0; got {q_offset=}")
    ranks = over.ranks
    sharding = over.sharding_of(q.shape[2] if isinstance(q, Tensor) and q.dim() == 4 else 1)
    check_shards(q, k, v, ranks=ranks, sharding=sharding, enable_gqa=enable_gqa)
    call = selector.call(selector.rule(within), 0, 1.0)._replace(scale=scale)
    facts = (
        *zip(call._fields, call, strict=True),
        ("gradient", gradient),
        ("heads", index(q.shape[1])),
        ("gradients wanted", torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)),
    )
    place = (ranks.name, ranks.size, ranks.rank, ranks.device_type)
    agreed = _agreed(place, sharding.numbers(), selector.largest_row, facts)
    # What torch.compile takes for a constant has no type there before it is asked for its integers.
    starts, lengths = ([index(number) for number in numbers] for numbers in agreed)
    return Runs(starts, lengths, over, sharding)


def _agreed(
    place: tuple[str, int, int, str], numbers: tuple[int, ...], side: int, facts: tuple[tuple[str, object], ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(starts, lengths) of the runs of this rank; a rank without tokens has one run of none."""
    from ..distributed.group import Ranks, Sharding, check_agreement

    ranks, sharding = Ranks(*place), Sharding.of(numbers)
    check_agreement(ranks, {"sharding": sharding, **dict(facts)})
    starts = [run.start for rank in range(ranks.size) for run in sharding.ranges(rank)]
    within_a_row = [start for start in starts if start % side]
    if within_a_row:
        raise ValueError(
            f"queries that choose together must be on one rank: each run of a rank's positions must begin at a "
            f"multiple of {side}, the queries of a row: give the sharding shard_lengths of multiples of {side}, in "
            f"zigzag order of {2 * side}; got a run from position {within_a_row[0]} on in {sharding}"
        )
    runs = sharding.ranges(ranks.rank) or (range(0),)
    return tuple(run.start for run in runs), tuple(map(len, runs))


_agreed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def joined(found: Sequence[tuple[Selection, Reading, Tensor]], k: Float[Tensor, "B G M D"]) -> Selection:
    """The choices of runs as one, each given with its reading and its queries."""
    if len(found) == 1:
        return found[0][0]
    chosen = [each for each, _, _ in found]
    blocks, scores = (torch.cat(each, 2) for each in list(zip(*chosen, strict=True))[:2])
    pairs = torch.stack([call.pairs(q, k) for _, call, q in found])
    read = (torch.stack([each.density for each in chosen]) * pairs).sum()
    cut = torch.stack([each.cut * each.blocks.shape[2] for each in chosen]).sum()
    return Selection(blocks, scores, read / pairs.sum().clamp(min=1), cut / blocks.shape[2])
