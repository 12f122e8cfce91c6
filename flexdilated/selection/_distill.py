"""The loss that teaches a gate: its scores, as shares, against the share of attention that each block really has."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ..engines import sum_dtype
from ..masks import Pattern
from ._choose import masked_lse
from ._select_op import select_blocks
from ._selector import BlockSelector, Selection

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim, T tables, R rows, C blocks of keys


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
    """(KL(block mass ‖ softmax of the module's scores) over the candidates of a row, summed over rows, their number).

    exact: the q and k of the attention, where the module may get others. The loss reaches the module alone, as no q and
    k that come here require a gradient. Rows without candidates, or whose candidates have no mass that a float holds,
    teach nothing.
    """
    if 0 in q.shape or 0 in k.shape:
        zero = q.new_zeros((), dtype=sum_dtype(q))
        return sum((x.sum() * 0.0 for x in selector.parameters()), zero), zero.long()
    coarse, tensors, call = selector.prepared(q, k, scale=scale, q_offset=q_offset, bindings=bindings, within=within)
    num_blocks = call.rows(q, k).blocks
    # All candidates, each with its score; heads that share a table have the mean of their shares.
    call = call._replace(most=num_blocks, amount=1.0, kind="top_p")
    student = selector.selected(q, k, coarse, tensors, call)
    with torch.no_grad():
        blocks, _, mass, *_ = select_blocks(*exact, None, coarse, tensors, *call._replace(scorer="mass"))
        candidates = _by_block(student._replace(scores=torch.zeros_like(student.scores)), num_blocks) == 0
        logs = _by_block(Selection(blocks, mass, mass, mass), num_blocks)
        total = masked_lse(logs, candidates)
        taught = total > -torch.inf
        target = (logs - total.masked_fill(~taught, 0.0).unsqueeze(-1)).masked_fill(~candidates, -torch.inf)
        shares = target.exp()
    scores = _by_block(student, num_blocks)
    own = scores - masked_lse(scores, candidates).masked_fill(~candidates.any(-1), 0.0).unsqueeze(-1)
    # A share of 0 has no part in the sum, whatever its logarithm is.
    lacks = torch.where(shares > 0, shares * (target.masked_fill(shares == 0, 0.0) - own), 0.0)
    return lacks.sum(), taught.sum()


def _by_block(found: Selection, num_blocks: int) -> Float[Tensor, "B T R C"]:
    """The score of each block; -inf where it is no candidate."""
    columns = found.scores.new_full((*found.scores.shape[:3], num_blocks + 1), -torch.inf)
    at = torch.where(found.blocks < 0, num_blocks, found.blocks)
    return columns.scatter(-1, at, found.scores)[..., :num_blocks]
