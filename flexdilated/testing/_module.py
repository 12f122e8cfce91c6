"""How a module under examination is called, made, and fed with cases of rising length."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..masks import Mixture, Pattern
from ..masks.core import advises, require_choice
from ._closeness import Expected, check_result, expected, hold
from ._inputs import KINDS, values
from ._problem import Problem

# B batch, H query heads, G key/value heads, N tokens, D head dim

_GRADIENTS = ("dq", "dk", "dv")
Result = Any  # out, or a tuple of which the first is out


def plainly(module: Callable[..., Result], q: Tensor, k: Tensor, v: Tensor) -> Result:
    """The call where nothing else is said."""
    return module(q, k, v)


@advises()
@dataclass(frozen=True)
class Calls:
    """How a module is called: functions that take the module, and q, k and v in `layout`.

    Each returns the output in that layout, or a tuple of which it is the first. In "BHND" and "BNHD" a second tensor
    of shape (B, H, N) is taken for the natural-log lse, and checked too, save at N = H, where it may be weights. In
    "BNE" heads lie side by side, E = H D, as in `nn.MultiheadAttention(batch_first=True)`: its projections must be the
    identity (`identity_projections`).

    plain: (module, q, k, v). Calls the module with these three.
    padded: (module, q, k, v, hidden), hidden (B, N) True for keys to leave out.
    packed: (module, q, k, v, ids), ids (B, N) the document of each position, ascending. `documents` says what is meant:
        "restart", each document attends as it would apart (`pattern.per_document(ids)`), or "cut", pairs across
        documents are forbidden (`pattern & masks.documents(ids)`).
    decoded: (module, q, k, v): what decoding gives, token by token, for all tokens.
    over_ranks: (mesh) -> the module for a rank of a one-dimensional DeviceMesh, which is then called by `plain` with
        this rank's tokens, in order; a function of a module's own, as it is pickled.

    >>> calls = testing.Calls(plain=lambda module, q, k, v: module(q, k, v))
    """

    layout: Literal["BHND", "BNHD", "BNE"] = "BHND"
    plain: Callable[..., Result] = plainly
    padded: Callable[..., Result] | None = None
    packed: Callable[..., Result] | None = None
    documents: Literal["restart", "cut"] = "restart"
    decoded: Callable[..., Result] | None = None
    over_ranks: Callable[[Any], Callable[..., Result]] | None = None

    def __post_init__(self) -> None:
        require_choice("layout", self.layout, ("BHND", "BNHD", "BNE"))
        require_choice("documents", self.documents, ("restart", "cut"))
        for name in ("plain", "padded", "packed", "decoded", "over_ranks"):
            value = getattr(self, name)
            if not (callable(value) or (value is None and name != "plain")):
                raise TypeError(f"{name} must be a function; got {value!r:.80}")

    def into_layout(self, x: Tensor) -> Tensor:
        """(B, H, N, D) as the module takes it."""
        if self.layout == "BHND":
            return x
        x = x.transpose(1, 2)
        return x.flatten(2) if self.layout == "BNE" else x

    def out_of_layout(self, x: Tensor, num_heads: int) -> Tensor:
        """(B, H, N, D) of what the module gives."""
        if self.layout == "BHND":
            return x
        return (x.unflatten(2, (num_heads, -1)) if self.layout == "BNE" else x).transpose(1, 2)


@advises()
def identity_projections(module: nn.Module) -> nn.Module:
    """Set the projections of a module shaped like `nn.MultiheadAttention` to the identity, in place; returns it.

    The module then maps the query, key and value that it is given to its attention's output. Parameters:
    in_proj_weight, or q_proj_weight, k_proj_weight and v_proj_weight; in_proj_bias, if any; out_proj, an nn.Linear.
    Raises TypeError for another module, and ValueError where key or value have another width than the query.

    >>> layer = testing.identity_projections(torch.nn.MultiheadAttention(64, 4))
    """
    named = dict(module.named_parameters())
    packed, separate = named.get("in_proj_weight"), [named.get(f"{name}_proj_weight") for name in "qkv"]
    weights = [weight for weight in (packed, *separate) if weight is not None]
    if not weights or "out_proj.weight" not in named:
        raise TypeError(
            "identity_projections needs the parameters of nn.MultiheadAttention, in_proj_weight, or q_proj_weight and "
            f"so on, and out_proj.weight; got {type(module).__name__} with {sorted(named)}"
        )
    for weight in (*(weights[0].chunk(3) if packed is not None else weights), named["out_proj.weight"]):
        if weight.shape[0] != weight.shape[1]:
            raise ValueError(f"projections must be square to be the identity; got {tuple(weight.shape)}")
        nn.init.eye_(weight.data)
    for name in ("in_proj_bias", "out_proj.bias"):
        if name in named:
            nn.init.zeros_(named[name])
    return module


class Failure(Exception):
    """A check failed; the message is the detail."""


class DoesNotApply(Exception):
    """There is nothing for this check to see; the message says why."""


@dataclass(frozen=True)
class Subject:
    """What makes a module, what it claims to compute, and the sizes at which that is looked at."""

    factory: Callable[[], Any]
    pattern: Pattern | Mixture
    calls: Calls
    num_heads: int
    num_kv_heads: int
    head_dim: int
    lengths: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    seed: int

    def module(self) -> Any:
        """A new one, in the dtype and on the device of the checks if it is an `nn.Module`."""
        module = self.factory()
        if not callable(module):
            raise TypeError(f"factory must return something to call; got {type(module).__name__}")
        return module.to(device=self.device, dtype=self.dtype) if isinstance(module, nn.Module) else module

    def alike(self, module: Any) -> Any:
        """A copy that was never called."""
        try:
            return copy.deepcopy(module)
        except Exception as error:  # whatever holds what cannot be copied raises
            raise DoesNotApply(f"the module cannot be copied: {type(error).__name__}: {error}") from error

    def inputs(self, num_tokens: int, kind: str = KINDS[0], *, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of this kind, the same for the same arguments."""
        heads, seed = (self.num_heads, self.num_kv_heads), self.seed + 1_000 * num_tokens + KINDS.index(kind)
        drawn = values(kind, *heads, num_tokens, self.head_dim, batch=batch, seed=seed)
        q, k, v = (x.to(self.dtype).to(self.device) for x in drawn)
        return q, k, v

    def problem(self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | Mixture | None = None) -> Problem:
        """What the module claims to compute of these."""
        return Problem.of(q, k, v, self.pattern if pattern is None else pattern)

    def run(self, module: Any, q: Tensor, k: Tensor, v: Tensor, *more: Tensor, call: str = "plain"):
        """(out (B, H, N, D), lse (B, H, N) or None) of one of the calls."""
        calls = self.calls
        function = getattr(calls, call)
        given = calls.into_layout(q)
        result = function(module, given, *(calls.into_layout(x) for x in (k, v)), *more)
        first, *others = result if isinstance(result, tuple | list) and result else (result,)
        out = _compared(first, given)
        lse = next((x for x in others if isinstance(x, Tensor) and x.shape == q.shape[:3]), None)
        # With as many tokens as heads it may be weights, averaged over heads: (B, N, N).
        taken = calls.layout != "BNE" and q.shape[1] != q.shape[2]
        return calls.out_of_layout(out, self.num_heads), lse if taken else None

    def cases(self) -> Iterator[tuple[int, str]]:
        """(length, kind of values), in the order of length; all kinds where there is one length only."""
        others = KINDS[1:]
        for index, length in enumerate(self.lengths):
            yield length, KINDS[0]
            for kind in others if len(self.lengths) == 1 else (others[index % len(others)],):
                yield length, kind

    def table(self, num_tokens: int) -> Tensor:
        """(H, N, N): how often each pair is allowed; the first batch entry's."""
        return self.problem(*self.inputs(num_tokens, batch=1)).times()[0]

    @property
    def spread(self) -> tuple[int, ...]:
        """A few of the lengths: of the shortest, the longest, and some between."""
        step = max(1, len(self.lengths) // 4)
        return tuple(dict.fromkeys((*self.lengths[1::step][:4], self.lengths[-1])))


def hold_rows(
    where: str, problem: Problem, out: Tensor, lse: Tensor | None = None, *, rows: Tensor | None = None
) -> None:
    """Failure where a row that has keys, of `rows` (B, H, N) if they are given, is not what the definition says."""
    _hold(where, problem, expected(problem), {"out": out, "lse": lse}, rows=rows)


def hold_gradients(where: str, problem: Problem, grads: Iterable[Tensor], *, through_lse: bool = False) -> None:
    """Failure where those of q, k and v, for the fixed `cotangents`, are not the definition's."""
    truth = expected(problem, gradients=True, through_lse=through_lse)
    _hold(where, problem, truth, dict(zip(_GRADIENTS, grads, strict=True)))


def hold_all(where: str, problem: Problem, out: Tensor, grads: Sequence[Tensor]) -> None:
    """`hold_rows` and, where there are gradients, `hold_gradients`, with the definition computed once."""
    found = {"out": out, **dict(zip(_GRADIENTS, grads, strict=False))}
    _hold(where, problem, expected(problem, gradients=bool(grads)), found)


def _hold(
    where: str,
    problem: Problem,
    truth: Mapping[str, Expected],
    found: Mapping[str, Tensor | None],
    *,
    rows: Tensor | None = None,
) -> None:
    seen = (problem.times() > 0).any(-1)
    rows = seen if rows is None else seen & rows
    with failing(where):
        for name, x in found.items():
            if x is not None:
                hold(problem, name, x, truth[name], rows=None if name in _GRADIENTS else rows)


@contextmanager
def failing(where: str) -> Iterator[None]:
    """An AssertionError becomes the Failure of the check, with where it was."""
    try:
        yield
    except AssertionError as error:
        raise Failure(f"{where}: {error}") from None


def _compared(out: Any, q: Tensor) -> Tensor:
    """The output, if it can be compared, else Failure; q in the module's layout."""
    try:
        check_result("the output", out, q.shape, q.device)
    except (AssertionError, TypeError) as error:
        raise Failure(str(error)) from None
    return out
