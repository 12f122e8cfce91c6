"""score_mod: a caller's function of scores, called with what a term's indices stand for."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import FunctionType

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ..masks.orders import Compact, Listed, Permutation
from ..masks.planning import Term

# N query tokens, M key tokens, H heads of a term

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Indices:
    """What a term's (batch, head, query, key) indices stand for: batch entry, global head and positions.

    `translate` makes of a score_mod and these numbers one that a term's indices go into.
    """

    translate: Callable[..., ScoreMod]
    numbers: tuple[Int64[Tensor, "..."], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of what grows with tokens or heads."""
        return sum(each.nbytes for each in self.numbers if each.dim())

    def at_positions(self, score_mod: ScoreMod) -> ScoreMod:
        return self.translate(score_mod, *self.numbers)


def new_score(found: object) -> Tensor:
    """What a score_mod made of one score; TypeError or ValueError unless it is one score."""
    if not isinstance(found, Tensor):
        raise TypeError(f"score_mod must return the new score, a tensor; got {type(found).__name__}")
    if found.dim() != 0:
        raise ValueError(f"score_mod must make one score of one score; got shape {tuple(found.shape)}")
    return found


def probe(score_mod: ScoreMod, q: Tensor, head: int, q_position: int, k_position: int) -> Tensor:
    """score_mod of one score, 0."""
    indices = (torch.tensor(index, device=q.device) for index in (0, head, q_position, k_position))
    return new_score(score_mod(q.new_zeros(()), *indices))


def indices_of(term: Term, device: torch.device) -> Indices:
    """What the indices of a term stand for."""

    def scalar(value: int) -> Tensor:
        return torch.tensor(value, device=device)

    if isinstance(term.q, Compact) and isinstance(term.k, Compact):
        heads = torch.tensor(term.heads, device=device) + term.head_offset
        q_firsts = torch.tensor(term.q.starts, device=device) + term.q_offset
        k_firsts = torch.tensor(term.k.starts, device=device) + term.k_offset
        numbers = map(scalar, (term.q.step, term.k.step, term.folds, term.q.fold_stride))
        return Indices(folded, (heads, q_firsts, k_firsts, *numbers))
    assert isinstance(term.q, Permutation | Listed)
    assert isinstance(term.k, Permutation | Listed)
    if all(isinstance(side, Permutation) and side.is_natural for side in (term.q, term.k)):
        return Indices(shifted, tuple(map(scalar, (term.head_offset, term.q_offset, term.k_offset))))
    positions = (term.q.positions(device) + term.q_offset, term.k.positions(device) + term.k_offset)
    return Indices(in_order, (scalar(term.head_offset), *positions))


# FlexAttention wants one plain closure, with its parameters in tensors.


def with_bias(score_mod: ScoreMod | None, bias: Float[Tensor, "H Q K"]) -> ScoreMod:
    """A caller's score_mod, if any, and then a number for each head and pair of slots."""
    if score_mod is None:

        def biased(score, b, h, q, k):
            return score + bias[h, q, k]

        return biased
    inner = score_mod

    def also_biased(score, b, h, q, k):
        return inner(score, b, h, q, k) + bias[h, q, k]

    return also_biased


def in_order(
    score_mod: ScoreMod,
    first_head: Int64[Tensor, ""],
    q_positions: Int64[Tensor, " N"],
    k_positions: Int64[Tensor, " M"],
) -> ScoreMod:
    """For a shared term: slots in any order of the tokens, and this device's heads."""

    def at_positions(score, b, h, q, k):
        return new_score(score_mod(score, b, h + first_head, q_positions[q], k_positions[k]))

    return at_positions


def shifted(
    score_mod: ScoreMod, first_head: Int64[Tensor, ""], q_offset: Int64[Tensor, ""], k_offset: Int64[Tensor, ""]
) -> ScoreMod:
    """For a shared term in the natural order of tokens."""

    def at_positions(score, b, h, q, k):
        return new_score(score_mod(score, b, h + first_head, q + q_offset, k + k_offset))

    return at_positions


def folded(
    score_mod: ScoreMod,
    heads: Int64[Tensor, " H"],
    q_firsts: Int64[Tensor, " H"],
    k_firsts: Int64[Tensor, " H"],
    q_step: Int64[Tensor, ""],
    k_step: Int64[Tensor, ""],
    folds: Int64[Tensor, ""],
    fold_stride: Int64[Tensor, ""],
) -> ScoreMod:
    """For a compact term: slots a step apart, from each head's first on, with segments in the batch."""

    def at_positions(score, b, h, q, k):
        start = b % folds * fold_stride
        q_position, k_position = start + q_firsts[h] + q * q_step, start + k_firsts[h] + k * k_step
        return new_score(score_mod(score, b // folds, heads[h], q_position, k_position))

    return at_positions


def plain_values(x: object, depth: int = 4) -> Hashable:
    """The code of a function and the numbers and texts that it captured, which tracing makes constants of its graph.

    Of what lies deeper, and of tensors and other objects, the type alone.
    """
    if x is None or isinstance(x, int | float | str):
        return x
    if depth and isinstance(x, FunctionType):
        held = [cell.cell_contents for cell in x.__closure__ or ()]
        return x.__code__, *(plain_values(each, depth - 1) for each in (*held, *(x.__defaults__ or ())))
    if depth and isinstance(x, list | tuple):
        return tuple(plain_values(each, depth - 1) for each in x)
    return type(x)
