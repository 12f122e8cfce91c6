"""Choosing: the best blocks of each row, by number, by their share of a softmax, or by a least share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ..masks.core import advises, require_choice, require_finite, require_int

# B batch, T tables, n rows, L blocks to choose from, most: the width of a table


@advises()
@dataclass(frozen=True)
class TopK:
    """The k candidates of highest score; all of them where there are fewer.

    k: at least 1, the width of the table. Raises TypeError or ValueError for another.

    >>> fd.TopK(8).most
    8
    """

    kind: ClassVar[str] = "top_k"

    k: int

    def __post_init__(self) -> None:
        require_int("k", self.k, minimum=1)

    @property
    def most(self) -> int:
        """Width of the table."""
        return self.k

    @property
    def amount(self) -> float:
        """No share of the softmax is asked for."""
        return 0.0


@advises()
@dataclass(frozen=True)
class TopP:
    """The fewest candidates whose shares of the softmax over the row's candidates add up to p at least.

    p: above 0, at most 1; with 1 every candidate is chosen. most: width of the table; of a choice that is longer the
    least shares are left out, and the row counts in `Selection.cut`.
    of: "candidates", as said; or "row": shares of all the attention of the row, and blocks that are no candidates,
    since `always` covers them, count towards p, as in XAttention. For the scorers "mass" and "antidiagonal", whose
    scores are such shares, in a selector without `coarse`.

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
        """What it is called in calls."""
        return "top_p" if self.of == "candidates" else "top_p_of_row"

    @property
    def amount(self) -> float:
        """The share to reach."""
        return self.p


@advises()
@dataclass(frozen=True)
class Threshold:
    """Every candidate whose share of the softmax over the row's candidates is at least t.

    t: above 0, at most 1. most: width of the table; of a choice that is longer the least shares are left out, and the
    row counts in `Selection.cut`. Raises TypeError or ValueError for other values.
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
        """The least share."""
        return self.t


def require_share(name: str, value: object) -> None:
    """Raise TypeError or ValueError unless the value is above 0 and at most 1."""
    if not 0 < require_finite(name, value) <= 1:
        raise ValueError(f"{name} is a share of the softmax, above 0 and at most 1; got {name}={value}")


class Chosen(NamedTuple):
    """What rows chose: places among what they could choose from, -1 for none, and how many rows were cut."""

    places: Int64[Tensor, "B T n most"]
    cut: Int64[Tensor, ""]


_NONE = -1e300  # below every float32, so of no candidate
_TIES = (1 << 29) - 1  # the bits of a float64 that no float32 has


def choose(
    scores: Float[Tensor, "B T n L"],
    candidates: Bool[Tensor, "B T n L"],
    ids: Int64[Tensor, "#B #T #n L"],
    *,
    kind: str,
    amount: float,
    most: int,
) -> Chosen:
    """The best candidates of each row, the best first; of equal scores the one of lower id first.

    Scores are compared in float32. One that is no number counts as the least there is.
    """
    keys = _ordered(scores, ids).masked_fill(~candidates, _NONE)
    best, places = keys.topk(min(most, keys.shape[-1]))
    keep, cut = best > _NONE / 2, torch.zeros((), dtype=torch.int64, device=scores.device)
    if kind != "top_k":
        total = masked_lse(scores, candidates)
        covered = torch.zeros_like(total)
        if kind == "top_p_of_row":  # scores are shares of the row already
            covered, total = (1 - total.exp()).clamp(min=0.0), covered
        # A row without candidates has total -inf, and nothing to keep.
        least = total.clamp(min=torch.finfo(scores.dtype).min).unsqueeze(-1)
        shares = (scores.gather(-1, places) - least).exp().nan_to_num(0.0)
        shares = shares.masked_fill(~keep, 0.0)
        number = candidates.sum(-1)
        if kind == "threshold":
            keep = keep & (shares >= amount)
            whole = ((scores - total.unsqueeze(-1)).exp() >= amount) & candidates
            cut = (whole.sum(-1) > most).sum()
        elif amount < 1:
            reached = covered.unsqueeze(-1) + shares.cumsum(-1)
            keep = keep & (reached - shares < amount)
            cut = ((reached[..., -1] < amount) & (number > most)).sum()
        else:
            cut = (number > most).sum()
    places = places.masked_fill(~keep, -1)
    return Chosen(torch.nn.functional.pad(places, (0, most - places.shape[-1]), value=-1), cut)


def masked_lse(scores: Float[Tensor, "*rows L"], where: Bool[Tensor, "..."]) -> Float[Tensor, "*rows"]:
    """log of the sum of exp(score) over some places of each row; -inf, with gradient 0, where there are none.

    where: the places, which broadcast over the scores.
    """
    shown = scores.masked_fill(~where, -torch.inf)
    top = shown.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    total = (shown - top).exp().sum(-1)
    empty = total == 0
    return (total.masked_fill(empty, 1.0).log() + top.squeeze(-1)).masked_fill(empty, -torch.inf)


def _ordered(scores: Tensor, ids: Tensor) -> Float[Tensor, "B T n L"]:
    """float64 numbers in the order of the scores in float32, in which no two ids are equal: lower ids stand higher.

    A float32 as a float64 ends in bits of 0. These hold the id: `topk` promises no order among equal numbers, and a
    choice that depends on it could change with what other rows hold.
    """
    most = torch.finfo(torch.float32).max
    rounded = scores.float().nan_to_num(nan=-most, posinf=most, neginf=-most) + 0.0  # which makes -0 to 0
    bits = rounded.double().view(torch.int64)
    return (bits | torch.where(rounded < 0, ids, _TIES - ids)).view(torch.float64)
