"""SelectedAttention: attention to key blocks chosen from q and k; the choice can be trained by a bias or a loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from .._attend import autocast
from .._engine_choice import check_engine
from .._over_ranks import OverRanks, over_ranks
from .._torch_private import graph_constant
from .._validate import check_sinks, check_tensors, resolve_scale
from ..engines import merge, sum_dtype, with_sinks
from ..masks import Pattern
from ..masks.core import advises, require_choice, require_int
from ._choose import log_shares, masked_lse
from ._select_op import select_blocks
from ._selected_cache import SelectedCache, TableAttention
from ._selector import BlockSelector, Selection

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ..distributed import Sharding

# B batch, H query heads, G key/value heads, N queries, L of them on this rank, M keys, D head dim, T tables,
# R query blocks, C key blocks


_GRADIENTS = ("none", "bias", "distill")


@advises()
class SelectedAttention(nn.Module):
    """Attention over the blocks that a selector chooses: (q, k, v) -> out.

    Attends to the pairs of (chosen | always) & within, where `chosen` has all pairs in chosen blocks. For these pairs
    the output is exact, and so are the gradients of q, k and v. A query without keys has output 0.

    selector: the `BlockSelector` that chooses; its `within` and `always` apply to the attention, too.
    gradient: how the choice is trained. "none": not at all. "distill": by `distill_loss`, which the caller adds to the
        loss of the model. The output is that of "none", and the selector's scorer must be a module. "bias": through the
        selector's scores, which are added to the logits, in inference as well.
    engine: as in `attend`.
    mesh: ranks over which the sequence is sharded, a DeviceMesh of one dimension. q, k, v and the output are then this
        rank's tokens, at the positions that `sharding` gives it (None: equally many tokens on each rank, in order). The
        choice is that of a single rank with all tokens, up to rounding of the scores. Keys and values are all-gathered;
        the backward returns their gradients to their ranks. Each contiguous run of a rank's positions must start where
        a query block starts, of a coarse selector, too, and a module must score each block and query block
        independently, as in a cache. bindings and `within` are for the whole sequence.

    With "bias", the weight of key j for query i is proportional to exp(scale * q_i · k_j + bias_ij), over the pairs of
    (chosen | always) & within. bias_ij is the score of j's block for i's query block, in the table of the head, if the
    block is chosen and `always` does not allow (i, j); otherwise 0. Gradients reach q and k through the scores, too,
    and the parameters of a scorer that is a module. Each of the table's `most` columns costs a call of `attend` with
    one block per query block, to whose lse the scores are added; the calls are merged by lse.

    `torch.utils.checkpoint` recomputes the choice in the backward by equal operations on equal inputs: the choice is
    equal if the forward is deterministic. To reuse the first choice instead, save the op
    torch.ops.flexdilated.select_blocks in a policy of selective checkpointing.

    Raises TypeError or ValueError for other values, for gradient="distill" without a module, and for a sharding
    without a mesh.
    Sources: MoBA, arXiv 2502.13189; SeerAttention, arXiv 2410.13276.

    >>> q, k, v = torch.randn(3, 1, 4, 256, 64)
    >>> selector = fd.BlockSelector(block=32, choose=fd.TopK(2), always=masks.chunked(32))
    >>> fd.SelectedAttention(selector)(q, k, v).shape
    torch.Size([1, 4, 256, 64])
    """

    def __init__(
        self,
        selector: BlockSelector,
        gradient: str = "none",
        *,
        engine: str | None = None,
        mesh: DeviceMesh | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(selector, BlockSelector):
            raise TypeError(f"selector must be a BlockSelector; got {type(selector).__name__}")
        self.gradient = require_choice("gradient", gradient, _GRADIENTS)
        if gradient == "distill" and not isinstance(selector.scorer, nn.Module):
            raise ValueError(
                "gradient='distill' trains a scorer module: give the selector scorer=module, or write "
                f"gradient='bias'; got scorer={selector.scorer!r}"
            )
        check_engine(engine)
        self.selector, self.engine = selector, engine
        self.over_ranks = over_ranks(mesh, schedule="auto", sharding=sharding)
        self.not_always = None if selector.always is None else ~selector.always  # here, as torch.compile cannot trace ~

    def forward(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B G M D"],
        v: Float[Tensor, "B G M D"],
        *,
        enable_gqa: bool = False,
        scale: float | None = None,
        q_offset: int = 0,
        bindings: Mapping[str, Tensor] | None = None,
        within: Pattern | None = None,
        sinks: Float[Tensor, " H"] | None = None,
        return_selection: bool = False,
    ) -> Float[Tensor, "B H N D"] | tuple[Float[Tensor, "B H N D"], Selection]:
        """Return the attention output in the shape of q, or (output, `Selection`) with return_selection.

        Query i has position q_offset + i and key j position j. With a mesh q_offset must be 0, and the sharding gives
        the positions.

        enable_gqa, sinks: as in `attend`.
        scale: factor on the scores, a number, also for the scorer; None: 1 / sqrt(D).
        bindings, within: as in the `forward` of `BlockSelector`.
        return_selection: return the `Selection`, too; its scores have a gradient only with "bias". With a mesh all its
            fields are for the query blocks of this rank's tokens, in the order of these tokens.

        Raises ValueError or TypeError for inputs that do not fit together, as the selector does. With a mesh it raises
        on all ranks, before any communication of tensors, if the settings of their calls differ, or if a contiguous run
        of a rank's positions begins within a query block.
        """
        q, k, v = autocast(q, k, v)
        runs = self._runs(q, k, v, enable_gqa=enable_gqa, scale=scale, q_offset=q_offset, within=within)
        check_sinks(sinks, q)
        k, v = runs.gather(k, v)
        outs, found = [], []
        for start, own in runs.parts(q):
            selection = self.selector(own, k, scale=scale, q_offset=start, bindings=bindings, within=within)
            options = {"scale": scale, "q_offset": start, "engine": self.engine}
            call = TableAttention.of(self.selector, self.not_always, self.selector.rule(within), bindings, **options)
            if self.gradient != "bias":
                selection = selection._replace(scores=selection.scores.detach())
            outs.append(self._attend(own, k, v, call, selection, sinks).to(q.dtype))
            found.append((selection, call, own))
        out = outs[0] if len(outs) == 1 else torch.cat(outs, 2)
        return (out, joined_selection(found, k)) if return_selection else out

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, call: TableAttention, found: Selection, sinks: Tensor | None
    ) -> Float[Tensor, "B H N D"]:
        if 0 in q.shape or 0 in k.shape:
            out, lse = call.attend(q, k, v, call.rule)
            if self.gradient == "bias":  # DDP would wait for a parameter without a gradient
                out = sum((x.sum() * 0.0 for x in self.selector.parameters()), out)
        elif self.gradient == "bias":
            out, lse = call.attend_to_chosen(q, k, v, found.blocks, found.scores)
            if self.selector.always is not None:
                out, lse = merge([(out, lse), call.attend(q, k, v, call.always)])
        else:
            out, lse = call.attend(q, k, v, call.attended, found.blocks)
        return out if sinks is None else with_sinks(out, lse, sinks)[0]

    def _runs(self, q: Tensor, k: Tensor, v: Tensor, **call: Any) -> QueryRuns:
        """Return the `QueryRuns` of this rank's queries, after checking the inputs; without a mesh they are one run.

        call: the keyword arguments enable_gqa, scale, q_offset and within of `forward`.
        """
        if self.over_ranks is not None:
            return runs_of_rank(self.over_ranks, self.selector, q, k, v, gradient=self.gradient, **call)
        check_tensors(q, k, v, enable_gqa=call["enable_gqa"])
        return QueryRuns([call["q_offset"]], [q.shape[2]])

    def distill_loss(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B G M D"],
        *,
        enable_gqa: bool = False,
        scale: float | None = None,
        q_offset: int = 0,
        bindings: Mapping[str, Tensor] | None = None,
        within: Pattern | None = None,
        teacher: tuple[Float[Tensor, "B H N D"], Float[Tensor, "B G M D"]] | None = None,
    ) -> Float[Tensor, ""]:
        """Return the mean over query blocks of KL(p ‖ softmax(s)) over their candidate blocks, in nats.

        Query blocks without candidates, or whose p underflows, are left out of the mean. With a mesh the result is this
        rank's term of the mean over the query blocks of all ranks: the sum over ranks of the losses, and of their
        gradients, equals the result of a single rank.

        s: the scores of the selector's module.
        p: the exact share of the query block's attention in each block (as scorer="mass", computed in chunks),
            normalised over the candidates, without a gradient: the loss trains only the module's parameters. A coarse
            selector restricts the candidates; this loss does not train it. The target in SeerAttention is the maximum
            weight in a block, normalised (arXiv 2410.13276, 2506.08889). Here it is the sum of the weights. Heads that
            share a table use the mean of their shares, in p and in the softmax.
        teacher: (q, k) of the attention, in the shapes of q and k; None: q and k. A gate that applies its
            own rotary embedding gets q and k without the model's, and the teacher has the model's.

        Other arguments are as in `forward`.

        Raises ValueError for another `gradient` than "distill", for a teacher of other shapes, and as `forward` does.

        >>> class Gate(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.query = torch.nn.Linear(64, 64)
        ...
        ...     def forward(self, queries, pools):
        ...         return self.query(queries) @ pools.mean.mT
        >>> selector = fd.BlockSelector(block=32, scorer=Gate(), choose=fd.TopK(2), always=masks.chunked(32))
        >>> q, k = torch.randn(2, 1, 4, 256, 64)
        >>> fd.SelectedAttention(selector, "distill").distill_loss(q, k).backward()
        """
        if self.gradient != "distill":
            raise ValueError(f"distill_loss needs gradient='distill'; got gradient={self.gradient!r}")
        q, k, _ = autocast(q, k, k)
        runs = self._runs(q, k, k, enable_gqa=enable_gqa, scale=scale, q_offset=q_offset, within=within)
        if teacher is not None and (teacher[0].shape, teacher[1].shape) != (q.shape, k.shape):
            came = f"{tuple(teacher[0].shape)} and {tuple(teacher[1].shape)} for {tuple(q.shape)} and {tuple(k.shape)}"
            raise ValueError(f"the teacher's q and k must have the shapes of the module's q and k; got {came}")
        require_int("q_offset", q_offset, minimum=0)
        options = {"scale": resolve_scale(scale, q.shape[-1]), "bindings": bindings, "within": within}
        q, (k,) = q.detach(), runs.gather(k.detach())
        exact_q, exact_k = (q, k) if teacher is None else (teacher[0].detach(), *runs.gather(teacher[1].detach()))
        divergences, counted = [], []
        for (start, own), (_, exact) in zip(runs.parts(q), runs.parts(exact_q), strict=True):
            each = distill_loss(self.selector, own, k, (exact, exact_k), q_offset=start, **options)
            divergences.append(each[0])
            counted.append(each[1])
        return torch.stack(divergences).sum() / runs.total(torch.stack(counted).sum()).clamp(min=1)

    def cache(self, *, num_heads: int, capacity: int | None = None, scale: float | None = None) -> SelectedCache:
        """Make a `KVCache` for decoding; it chooses and attends as a single pass over all tokens would.

        The cache keeps all keys, as later queries may choose any of them, and, except with scorer="mass", the pools of
        all key blocks; a step recomputes only the pool of the block to which it appends keys. `attend` takes chunks of
        any size. A chunk may begin within a query block, and then uses the choice of the block's first query. `crop`
        accepts any position except one inside a query block, of the selector or of a coarse one, that is not the last.
        A module that scores must score each block for each query block independently of the others.

        num_heads: query heads.
        capacity: as in `KVCache`.
        scale: factor on the scores, a number; None: 1 / sqrt(D).

        Raises ValueError with a mesh, for a selector with future_in_choice=True, with run-time tensors or with a
        `within` that is not causal, and for a selector with a scorer module unless `always` covers each query's own
        block: a module scores whole blocks, and that block is still incomplete. Other arguments that do not fit raise
        TypeError or ValueError.

        >>> selector = fd.BlockSelector(block=32, choose=fd.TopK(2), always=masks.chunked(32))
        >>> cache = fd.SelectedAttention(selector).cache(num_heads=4)
        >>> cache.attend(*torch.randn(3, 1, 4, 100, 64)).shape
        torch.Size([1, 4, 100, 64])
        """
        if self.over_ranks is not None:
            raise ValueError(
                "a cache is for one rank: make it from SelectedAttention(selector) without a mesh; this "
                f"one has {self.over_ranks.mesh_text}"
            )
        return SelectedCache(
            self.selector,
            self.not_always,
            biased=self.gradient == "bias",
            num_heads=num_heads,
            capacity=capacity,
            scale=scale,
            engine=self.engine,
        )

    def extra_repr(self) -> str:
        over = self.over_ranks
        ranks = "" if over is None else f", {over.mesh_text}, sharding={over.sharding!r}"
        return f"gradient={self.gradient!r}, engine={self.engine!r}{ranks}"


def distill_loss(
    selector: BlockSelector,
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    exact: tuple[Float[Tensor, "B H N D"], Float[Tensor, "B G M D"]],
    *,
    scale: float,
    q_offset: int,
    bindings: Mapping[str, Tensor] | None,
    within: Pattern | None,
) -> tuple[Float[Tensor, ""], Int64[Tensor, ""]]:
    """Return (sum over query blocks of KL(p ‖ softmax of the module's scores), in nats; number of query blocks).

    p is the exact share of a query block's attention in each key block. Both p and the softmax are normalised over the
    query block's candidate blocks. Query blocks without candidates, or whose p underflows, are left out of both.

    q, k: input of the module, without gradients.
    exact: (q, k) of the attention, which may differ from the module's, without gradients.
    """
    if 0 in q.shape or 0 in k.shape:
        zero = q.new_zeros((), dtype=sum_dtype(q))
        return sum((x.sum() * 0.0 for x in selector.parameters()), zero), zero.long()
    coarse, tensors, call = selector.prepared(q, k, scale=scale, q_offset=q_offset, bindings=bindings, within=within)
    num_blocks = call.query_blocks(q, k).num_key_blocks
    # kind "top_p" with amount 1 chooses all candidates, and gives heads that share a table the mean of their shares.
    call = call._replace(most=num_blocks, amount=1.0, kind="top_p")
    student = selector.selected(q, k, coarse, tensors, call)
    with torch.no_grad():
        blocks, _, mass, *_ = select_blocks(*exact, None, coarse, tensors, *call._replace(scorer="mass").arguments)
        candidates = _by_block(torch.zeros_like(student.scores), student.blocks, num_blocks) == 0
        logs = _by_block(mass, blocks, num_blocks)
        total = masked_lse(logs, candidates)
        counted = total > -torch.inf
        target = (logs - total.masked_fill(~counted, 0.0).unsqueeze(-1)).masked_fill(~candidates, -torch.inf)
        shares = target.exp()
    scores = _by_block(student.scores, student.blocks, num_blocks)
    own = log_shares(scores, candidates)
    # 0 * log 0 counts as 0.
    divergences = torch.where(shares > 0, shares * (target.masked_fill(shares == 0, 0.0) - own), 0.0)
    return divergences.sum(), counted.sum()


def _by_block(
    scores: Float[Tensor, "B T R most"], chosen: Int64[Tensor, "B T R most"], num_blocks: int
) -> Float[Tensor, "B T R C"]:
    """Return the score of each of num_blocks blocks, -inf if it is not chosen.

    chosen: the block to which each score belongs; -1 for none.
    """
    columns = scores.new_full((*scores.shape[:3], num_blocks + 1), -torch.inf)
    return columns.scatter(-1, torch.where(chosen < 0, num_blocks, chosen), scores)[..., :num_blocks]


class QueryRuns(NamedTuple):
    """Ranges of query positions (runs): run i has lengths[i] queries from position starts[i].

    over: the ranks among which the sequence is sharded; sharding: the positions of each rank.

    Both are None without a mesh.
    """

    starts: Sequence[int]
    lengths: Sequence[int]
    over: OverRanks | None = None
    sharding: Sharding | None = None

    def parts(self, q: Float[Tensor, "B H L D"]) -> list[tuple[int, Tensor]]:
        """Return (first position, queries) of each run."""
        return list(zip(self.starts, [q] if len(self.starts) == 1 else q.split(self.lengths, 2), strict=True))

    def gather(self, *keys: Float[Tensor, "B G L D"]) -> tuple[Float[Tensor, "B G M D"], ...]:
        """Return keys (or keys and values) of the whole sequence, gathered from all ranks; without a mesh, `keys`."""
        if self.over is None:
            return keys
        from ..distributed import unshard

        # One all-gather serves all tensors, so that the backward has one collective, too.
        return unshard(torch.stack(keys), self.over.mesh, self.sharding, dim=3).unbind()

    def total(self, number: Int64[Tensor, ""]) -> Int64[Tensor, ""]:
        """Return the sum of `number` over the ranks; `number` itself without a mesh."""
        if self.over is None:
            return number
        from ..distributed import unshard

        return unshard(number.reshape(1), self.over.mesh, dim=0).sum()


def runs_of_rank(
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
) -> QueryRuns:
    """Return the `QueryRuns` of this rank's queries in a call with a mesh, after checking the call.

    The checks exchange the settings of the call, but no tensors. Raises ValueError on all ranks if these settings
    differ or a run of any rank begins within a query block. A q_offset other than 0, and tensors that are not shards of
    this rank, raise ValueError or TypeError.
    """
    from ..distributed.group import check_shards

    if q_offset:
        raise ValueError(f"q_offset must be 0 with a mesh, as the sharding determines the positions; got {q_offset=}")
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
    agreed = _ranges_of_rank(place, sharding.numbers(), selector.largest_query_block, facts)
    # In a trace the result of a graph constant has no type until its integers are read.
    starts, lengths = ([index(number) for number in numbers] for numbers in agreed)
    return QueryRuns(starts, lengths, over, sharding)


@graph_constant
def _ranges_of_rank(
    place: tuple[str, int, int, str], numbers: tuple[int, ...], side: int, facts: tuple[tuple[str, object], ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (starts, lengths) of this rank's ranges of positions; a rank without tokens has one range of length 0.

    place: name, size, own rank and device type of the group of ranks.
    numbers: the sharding as integers.
    side: largest query_block, at a multiple of which each range must start.
    facts: (name, value) pairs that must, like the sharding, be equal on all ranks.

    Raises ValueError on all ranks if `facts` or shardings differ, or if a range of any rank starts elsewhere.
    """
    from ..distributed.group import Ranks, Sharding, check_agreement

    ranks, sharding = Ranks(*place), Sharding.of(numbers)
    check_agreement(ranks, {"sharding": sharding, **dict(facts)})
    starts = [run.start for rank in range(ranks.size) for run in sharding.ranges(rank)]
    within_a_row = [start for start in starts if start % side]
    if within_a_row:
        raise ValueError(
            "the queries of a query block must be on one rank, so runs of a rank's positions must begin at multiples "
            f"of {side}, the largest query_block: give the sharding shard_lengths that are multiples of {side}, or in "
            f"zigzag order of {2 * side}; got positions that begin at {within_a_row[0]} in {sharding}"
        )
    runs = sharding.ranges(ranks.rank) or (range(0),)
    return tuple(run.start for run in runs), tuple(map(len, runs))


def joined_selection(
    found: Sequence[tuple[Selection, TableAttention, Tensor]], k: Float[Tensor, "B G M D"]
) -> Selection:
    """Return one selection for several ranges of queries, with their tables concatenated.

    The result's density is the mean of the ranges' densities, weighted by the number of pairs that `within` allows. The
    result's cut is the mean of the ranges' cuts, weighted by the number of query blocks.

    found: (selection, attention, queries) of each range.
    k: all keys, which the ranges share.
    """
    if len(found) == 1:
        return found[0][0]
    chosen = [each for each, _, _ in found]
    blocks, scores = (torch.cat(each, 2) for each in list(zip(*chosen, strict=True))[:2])
    pairs = torch.stack([call.num_pairs(q, k) for _, call, q in found])
    read = (torch.stack([each.density for each in chosen]) * pairs).sum()
    cut = torch.stack([each.cut * each.blocks.shape[2] for each in chosen]).sum()
    return Selection(blocks, scores, read / pairs.sum().clamp(min=1), cut / blocks.shape[2])
