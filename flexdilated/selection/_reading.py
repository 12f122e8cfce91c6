"""Reading: attention over chosen blocks, as calls of `attend` with a table; Runs: positions of sharded queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from .._attend import attend
from .._over_ranks import OverRanks
from .._torch_private import graph_constant
from .._validate import run_time_tensors
from ..engines import merge
from ..masks import Pattern, selected_blocks
from ..masks.patterns import names
from ._select_op import selection_pairs
from ._selector import BlockSelector, Selection

if TYPE_CHECKING:
    from ..distributed import Sharding

# B batch, H query heads, G key/value heads, N queries, L of them on this rank, M keys, D head dim, T tables, R rows


class Reading(NamedTuple):
    """Attention to a choice: patterns with a run-time table, and the options of `attend`.

    rule: the pairs that the call allows. beyond: ~always; None without `always`. table: name of the table among the
    run-time tensors. bindings: the other run-time tensors.
    """

    rule: Pattern
    own: BlockSelector
    beyond: Pattern | None
    table: str
    bindings: dict[str, Tensor]
    options: dict[str, Any]

    @classmethod
    def of(
        cls,
        own: BlockSelector,
        beyond: Pattern | None,
        rule: Pattern,
        bindings: Mapping[str, Tensor] | None,
        **options: Any,
    ) -> Reading:
        """options: scale, q_offset and engine of `attend`."""
        table = "chosen"
        needed = names(own.with_always(rule))
        while table in needed:
            table += "_"
        given = {} if bindings is None else {name: x for name, x in bindings.items() if name in needed}
        return cls(rule, own, beyond, table, given, {**options, "enable_gqa": True})

    @property
    def always(self) -> Pattern:
        """Pairs that are attended to without being chosen: always & rule, or `rule` if the selector has no `always`."""
        return self.rule if self.own.always is None else self.own.always & self.rule

    @property
    def read(self) -> Pattern:
        """All attended pairs: (chosen | always) & rule."""
        chosen = self._leaf(self.own.choose.most)
        return (chosen if self.own.always is None else chosen | self.own.always) & self.rule

    def added(self, most: int) -> Pattern:
        """Pairs that are attended to only by choice: chosen & ~always & rule, with `most` blocks per row."""
        chosen = self._leaf(most) & self.rule
        return chosen if self.beyond is None else chosen & self.beyond

    def _leaf(self, most: int) -> Pattern:
        return selected_blocks(self.table, block=(self.own.query_block, self.own.block), most=most)

    def pairs(self, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B G M D"]) -> Int64[Tensor, ""]:
        """Number of pairs that `rule` allows, over all heads and batch entries: the denominator of a density."""
        call = self.own.call(self.rule, self.options["q_offset"], 1.0)
        both = self.own.with_always(self.rule)
        return selection_pairs(q, k, run_time_tensors(both, self.bindings, has_values=not q.is_meta), *call.arguments)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, blocks: Int64[Tensor, "B T R most"] | None = None
    ) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N"]]:
        """(out in the dtype of lse, lse) over a pattern; blocks: the table, if the pattern has one."""
        known = names(pattern)
        bindings = {name: x for name, x in self.bindings.items() if name in known}
        bindings |= {} if blocks is None else {self.table: blocks}
        out, lse = attend(q, k, v, pattern, bindings=bindings or None, return_lse=True, **self.options)
        return out.to(lse.dtype), lse

    def chosen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        blocks: Int64[Tensor, "B T R most"],
        scores: Float[Tensor, "B T R most"] | None,
    ) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B H N"]]:
        """(out, lse) over the pairs of `added`; the score of a block, if given, is added to its logits."""
        if scores is None:
            return self.attend(q, k, v, self.added(blocks.shape[-1]), blocks)
        biases = self._of_queries(scores.masked_fill(blocks < 0, 0.0), q)
        one, found = self.added(1), []
        for place in range(blocks.shape[-1]):
            out, lse = self.attend(q, k, v, one, blocks[..., place : place + 1])
            found.append((out, lse + biases[..., place].to(lse.dtype)))
        return merge(found)

    def _of_queries(self, scores: Float[Tensor, "B T R most"], q: Tensor) -> Float[Tensor, "B H N most"]:
        """Scores of each query's row, for each head."""
        side, first = self.own.query_block, self.options["q_offset"]
        row = (torch.arange(q.shape[2], device=q.device) + first % side) // side
        return scores.repeat_interleave(q.shape[1] // scores.shape[1], 1)[:, :, row]


class Runs(NamedTuple):
    """Runs of queries at consecutive positions: run i has lengths[i] queries from position starts[i].

    over, sharding: the ranks that hold the keys; None if this call has all keys.
    """

    starts: Sequence[int]
    lengths: Sequence[int]
    over: OverRanks | None = None
    sharding: Sharding | None = None

    def parts(self, q: Float[Tensor, "B H L D"]) -> list[tuple[int, Tensor]]:
        """(first position, queries) of each run."""
        return list(zip(self.starts, [q] if len(self.starts) == 1 else q.split(self.lengths, 2), strict=True))

    def whole(self, *keys: Float[Tensor, "B G L D"]) -> tuple[Float[Tensor, "B G M D"], ...]:
        """All-gather keys, or keys and values, over ranks, in one collective so that the backward has one, too."""
        if self.over is None:
            return keys
        from ..distributed import unshard

        return unshard(torch.stack(keys), self.over.mesh, self.sharding, dim=3).unbind()

    def total(self, number: Int64[Tensor, ""]) -> Int64[Tensor, ""]:
        """Sum over ranks."""
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
    """Runs of this rank's queries, after checks that send no tokens.

    Raises ValueError on all ranks if their calls differ or a run of any rank begins within a row.
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
    # In a trace the result of a graph constant has no type until its integers are read.
    starts, lengths = ([index(number) for number in numbers] for numbers in agreed)
    return Runs(starts, lengths, over, sharding)


@graph_constant
def _agreed(
    place: tuple[str, int, int, str], numbers: tuple[int, ...], side: int, facts: tuple[tuple[str, object], ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(starts, lengths) of this rank's runs; a rank without tokens has one run of length 0."""
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


def joined(found: Sequence[tuple[Selection, Reading, Tensor]], k: Float[Tensor, "B G M D"]) -> Selection:
    """Concatenate the selections of runs, each with its Reading and queries; density and cut are weighted means."""
    if len(found) == 1:
        return found[0][0]
    chosen = [each for each, _, _ in found]
    blocks, scores = (torch.cat(each, 2) for each in list(zip(*chosen, strict=True))[:2])
    pairs = torch.stack([call.pairs(q, k) for _, call, q in found])
    read = (torch.stack([each.density for each in chosen]) * pairs).sum()
    cut = torch.stack([each.cut * each.blocks.shape[2] for each in chosen]).sum()
    return Selection(blocks, scores, read / pairs.sum().clamp(min=1), cut / blocks.shape[2])
