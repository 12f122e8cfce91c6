"""Choice of the best blocks of each query block: by number, by cumulative share of a softmax, or by minimum share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ..masks.core import advises, require_choice, require_finite, require_int

# B batch, T tables, n query blocks, L blocks to choose from, most: the width of a table


@advises()
@dataclass(frozen=True)
class TopK:
    """Choose, for each query block, the k candidate blocks with the highest scores, or all if fewer than k.

    k: integer of at least 1; also `most`, the width of the table of chosen blocks.

    Raises TypeError or ValueError for other values.

    >>> fd.TopK(8).most
    8
    """

    kind: ClassVar[str] = "top_k"
    amount: ClassVar[float] = 0.0  # there is no minimum share

    k: int

    def __post_init__(self) -> None:
        require_int("k", self.k, minimum=1)

    @property
    def most(self) -> int:
        """Width of the table of chosen blocks: k."""
        return self.k


@advises()
@dataclass(frozen=True)
class TopP:
    """Choose, for each query block, the fewest candidate blocks whose shares of a softmax sum to at least p.

    p: above 0, at most 1; with 1 every candidate is chosen.
    most: maximum number of chosen blocks per query block; a longer choice is cut to the largest shares, and the query
        block counts in `Selection.cut`.
    of: "candidates", the softmax is over the scores of the query block's candidates; or "row", shares are of the query
        block's whole attention, and the share outside the candidates counts towards p, as in XAttention. "row" needs a
        `BlockSelector` with the scorer "mass" or "antidiagonal", whose scores are logarithms of such shares, and
        without `coarse`.

    Raises TypeError or ValueError for other values.
    Source: XAttention, arXiv 2503.16428, and FlexPrefill, arXiv 2502.20766.

    >>> fd.TopP(0.9, most=16)
    TopP(p=0.9, most=16, of='candidates')
    """

    p: float
    most: int = field(kw_only=True)
    of: str = field(default="candidates", kw_only=True)

    def __post_init__(self) -> None:
        require_share("p", self.p)
        require_int("most", self.most, minimum=1)
        require_choice("of", self.of, ("candidates", "row"))

    @property
    def kind(self) -> str:
        """Name of the rule that `choose` applies: "top_p", or "top_p_of_row" for of="row"."""
        return "top_p" if self.of == "candidates" else "top_p_of_row"

    @property
    def amount(self) -> float:
        """Sum of shares that the choice must reach: p."""
        return self.p


@advises()
@dataclass(frozen=True)
class Threshold:
    """Choose, for each query block, every candidate block with a share of at least t.

    A share is the softmax of the block's score over the query block's candidates.

    t: above 0, at most 1.
    most: as in `TopP`.

    Raises TypeError or ValueError for other values.
    Source: SeerAttention, arXiv 2410.13276.

    >>> fd.Threshold(0.02, most=16)
    Threshold(t=0.02, most=16)
    """

    kind: ClassVar[str] = "threshold"

    t: float
    most: int = field(kw_only=True)

    def __post_init__(self) -> None:
        require_share("t", self.t)
        require_int("most", self.most, minimum=1)

    @property
    def amount(self) -> float:
        """Minimum share of a chosen block: t."""
        return self.t


def require_share(name: str, value: object) -> None:
    """Raise TypeError unless the value is a real number, and ValueError unless it is above 0 and at most 1."""
    if not 0 < require_finite(name, value) <= 1:
        raise ValueError(f"{name} must be above 0 and at most 1, a share of the softmax; got {name}={value}")


_NONE = -1e300  # below every float32: marks entries that are no candidates
_LOW_BITS = (1 << 29) - 1  # mantissa bits that float64 has and float32 lacks


def choose(
    scores: Float[Tensor, "B T n L"],
    candidates: Bool[Tensor, "B T n L"],
    ids: Int64[Tensor, "#B #T #n L"],
    *,
    kind: str,
    amount: float,
    most: int,
) -> tuple[Int64[Tensor, "B T n most"], Int64[Tensor, ""]]:
    """Return (indices into dim L of the chosen candidates of each query block, padded with -1; number of cuts).

    A cut is a query block of one table for which `kind` chooses more than `most` candidates; the `most` with the
    highest scores are kept.

    candidates: mask of the blocks (or keys) that may be chosen.
    ids: block number at each index of dim L, which decides between equal scores.
    kind: "top_k", the `most` candidates with the highest scores, without cuts; "top_p", the fewest candidates whose
        softmax shares sum to at least `amount`, or all if it is 1; "top_p_of_row", as "top_p", but scores are
        logarithms of shares of the query block's attention, and the share outside the candidates counts towards
        `amount`; or "threshold", the candidates with a softmax share of at least `amount`. Each softmax is over the
        candidates.

    Chosen candidates are in descending order of score, compared in float32; among equal scores lower ids come first,
    and NaN counts as -inf. Candidates with score inf have equal shares, and all other candidates then have share 0.
    """
    scores = comparable(scores)
    keys = _distinct_scores(scores, ids).masked_fill(~candidates, _NONE)
    best, places = keys.topk(min(most, keys.shape[-1]))
    keep, cut = best > _NONE / 2, torch.zeros((), dtype=torch.int64, device=scores.device)
    if kind != "top_k":
        of_row = kind == "top_p_of_row"  # scores are logs of shares already
        logs = scores if of_row else log_shares(scores, candidates)
        outside = (1 - masked_lse(scores, candidates).exp()).clamp(min=0.0).unsqueeze(-1) if of_row else 0.0
        shares = logs.gather(-1, places).exp().masked_fill(~keep, 0.0)
        number = candidates.sum(-1)
        if kind == "threshold":
            keep = keep & (shares >= amount)
            reaching = (logs.exp() >= amount) & candidates
            cut = (reaching.sum(-1) > most).sum()
        elif amount < 1:
            reached = outside + shares.cumsum(-1)
            keep = keep & (reached - shares < amount)
            cut = ((reached[..., -1] < amount) & (number > most)).sum()
        else:
            cut = (number > most).sum()
    places = places.masked_fill(~keep, -1)
    return torch.nn.functional.pad(places, (0, most - places.shape[-1]), value=-1), cut


def masked_lse(scores: Float[Tensor, "*rows L"], where: Bool[Tensor, "..."]) -> Float[Tensor, "*rows"]:
    """Return the log-sum-exp, over the last dim, of the scores at which `where` (broadcast) is True.

    It is -inf, with gradient 0, where none of these scores is above -inf.
    """
    top, total = _top_and_sum(scores, where)
    empty = total == 0
    return (total.masked_fill(empty, 1.0).log() + top).masked_fill(empty, -torch.inf).squeeze(-1)


def log_shares(scores: Float[Tensor, "*rows L"], where: Bool[Tensor, "..."]) -> Float[Tensor, "*rows L"]:
    """Return logarithms of softmax shares over the last dim, of the scores at which `where` (broadcast) is True.

    Values at the other scores are arbitrary.
    """
    top, total = _top_and_sum(scores, where)
    # Not `scores - masked_lse`: beside a large score, the sum of a lse rounds the logarithm of the number of ties away.
    return scores - top - total.masked_fill(total == 0, 1.0).log()


def comparable(scores: Float[Tensor, "*rows L"]) -> Float[Tensor, "*rows L"]:
    """Return the scores with NaN as -inf, and inf as the largest finite number: `log_shares` of these is never NaN."""
    return scores.nan_to_num(nan=-torch.inf, posinf=torch.finfo(scores.dtype).max, neginf=-torch.inf)


def _top_and_sum(scores: Tensor, where: Tensor) -> tuple[Float[Tensor, "*rows 1"], Float[Tensor, "*rows 1"]]:
    """Return (h, sum of exp(score - h)) over the scores at which `where` is True; h is the highest of these scores.

    h has no gradient, and is 0 if none of these scores is above -inf.
    """
    shown = scores.masked_fill(~where, -torch.inf)
    top = shown.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    return top, (shown - top).exp().sum(-1, keepdim=True)


def _distinct_scores(scores: Tensor, ids: Tensor) -> Float[Tensor, "B T n L"]:
    """Return float64 sort keys: larger for a larger score in float32, and among equal scores for a lower id.

    NaN and -inf count as the least finite float32, inf as the greatest. Sort keys of a row are distinct if its ids are
    distinct, and at least 0 and below 2^29.
    """
    # `topk` promises no order among equal numbers, so a choice among ties could depend on the values of other rows.
    most = torch.finfo(torch.float32).max
    rounded = scores.float().nan_to_num(nan=-most, posinf=most, neginf=-most) + 0.0  # + 0.0 turns -0 into 0
    # A float32 converted to float64 ends in 29 zero bits, into which the id is written.
    bits = rounded.double().view(torch.int64)
    return (bits | torch.where(rounded < 0, ids, _LOW_BITS - ids)).view(torch.float64)
