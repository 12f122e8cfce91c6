"""Verdicts on cases of `flex_attention`: held to a dense formula in float64, and to torch's own flex_attention."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_own
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, create_mask

from bench._dense import one_by_one
from flexdilated.flex_attention import flex_attention

from . import Case
from ._functions import Reads

# B batch, H query heads, G key/value heads, N queries, M keys, D head dim of queries and keys, E of values

EQUAL = "equal"
# Times what the dense formula is off by in the same dtype: its largest error, and the root of its mean square, of the
# results that have many numbers.
MARGIN, MARGIN_ON_AVERAGE = 3.0, 1.5
MANY = ("out", "q", "k", "v")
LEAST = 1e-6, 1e-10  # errors that are always allowed, over the largest number: of sums in float32, and in float64
ERRORS = (ValueError, TypeError, NotImplementedError)  # that name what is refused; torch refuses by RuntimeError too

Attention = Callable[..., Any]


@dataclass(frozen=True)
class Made:
    """The arguments of one call, made of tensors."""

    q: Tensor
    k: Tensor
    v: Tensor
    score: Callable[..., Tensor] | None
    rule: Callable[..., Tensor] | None
    then: tuple[Callable[..., Tensor], ...]


Leaves = dict[str, Tensor]


def drawn(case: Case, seed: int) -> Leaves:
    """Values of q, k, v, of the output's gradient, and of the learned tensors, by name."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {**case.size.shapes(), "out": case.size.shapes()["q"][:3] + case.size.shapes()["v"][3:]}
    values = {
        name: torch.randn(shape, generator=draw, dtype=torch.float64).to(case.dtype) for name, shape in shapes.items()
    }
    for place, reads in enumerate((case.score, case.rule, *case.then)):
        if reads is None:
            continue
        for index, axes in enumerate(reads.axes):
            if axes != "Q":
                value = torch.randn(case.size.shape(axes), generator=draw, dtype=torch.float64)
                values[f"{place}.{index}"] = value.to(reads.dtype or case.dtype)
    return values


def leaves_of(case: Case, values: Leaves, *, wide: bool, gradients: bool) -> Leaves:
    """Fresh tensors of these values, in float64 if wide; those that train require gradients."""
    fresh = {name: (value.double() if wide else value).clone() for name, value in values.items()}
    for name, value in fresh.items():
        part = "score" if name[0].isdigit() else name
        value.requires_grad_(gradients and part != "out" and part not in case.fixed)
    return fresh


def made(case: Case, leaves: Leaves) -> Made:
    q, k, v = (case.layouts.get(name, lambda x: x)(leaves[name]) for name in ("q", "k", "v"))

    def function(place: int, reads: Reads | None) -> Callable[..., Any] | None:
        if reads is None:
            return None
        read = [q if axes == "Q" else leaves[f"{place}.{index}"] for index, axes in enumerate(reads.axes)]
        return reads.make(*read, *(value(case.size) for value in reads.values))

    score, rule, *then = (function(place, reads) for place, reads in enumerate((case.score, case.rule, *case.then)))
    return Made(q, k, v, score, rule, tuple(each for each in then if each is not None))


def mask_of(case: Case, rule: Callable[..., Tensor] | None) -> BlockMask | None:
    if rule is None:
        return None
    lengths = case.size.queries, case.size.keys
    mask = case.maker(rule, *case.lists, *lengths, device="cpu", BLOCK_SIZE=case.block)
    return mask if case.edit is None else case.edit(mask, case.size)


def allowed(case: Case, rule: Callable[..., Tensor] | None) -> Tensor:
    """Allowed pairs (B, H, N, M): those of the rule, or, in lists that were edited, also of full blocks."""
    size = case.size
    sizes = size.batch, size.heads, size.queries, size.keys
    if rule is None:
        return torch.ones(sizes, dtype=torch.bool)
    mask = mask_of(case, rule) if case.edit is not None else None
    pairs = create_mask(rule if mask is None else mask.mask_mod, *sizes, device="cpu")
    if mask is None:
        return pairs
    partial, full = (
        torch.zeros(sizes, dtype=torch.bool)
        if counts is None or indices is None
        else _listed(mask, counts, indices).expand(sizes)
        for counts, indices in (
            (mask.kv_num_blocks, mask.kv_indices),
            (mask.full_kv_num_blocks, mask.full_kv_indices),
        )
    )
    return full | (partial & pairs)


def _listed(mask: BlockMask, counts: Tensor, indices: Tensor) -> Tensor:
    """Pairs (B or 1, H or 1, N, M) in the blocks that lists name."""
    (rows, columns), (queries, keys) = mask.BLOCK_SIZE, mask.seq_lengths
    row, column = torch.arange(queries) // rows, torch.arange(keys) // columns
    named = torch.arange(indices.shape[-1]) < counts[..., None]
    blocks = ((indices[..., None] == torch.arange(int(column[-1]) + 1)) & named[..., None]).any(-2)
    return blocks[:, :, row][..., column]


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Tensor] | None,
    pairs: Tensor,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    return_aux: AuxRequest | None = None,
    kernel_options: Any = None,
) -> Any:
    """What flex_attention returns over the allowed pairs (B, H, N, M), all in the dtype of q.

    Without keys output 0, lse and largest score -inf.
    """
    B, H, N, M = pairs.shape
    k, v = (x.to(q.dtype).repeat_interleave(H // x.shape[1], 1).expand(B, -1, -1, -1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if score_mod is not None:
        scores = one_by_one(score_mod)(scores, *(torch.arange(n, dtype=torch.int32) for n in (B, H, N, M)))
    scores = scores.masked_fill(~pairs, -torch.inf)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    finite = scores.masked_fill(empty, 0.0)
    out = finite.softmax(-1).masked_fill(empty, 0.0).to(v.dtype) @ v
    lse = finite.logsumexp(-1).masked_fill(empty[..., 0], -torch.inf)
    if return_aux is None:
        return (out, lse) if return_lse else out
    return out, AuxOutput(lse if return_aux.lse else None, scores.detach().amax(-1) if return_aux.max_scores else None)


@dataclass(frozen=True)
class Found:
    """What a call gave: output, and lse, largest scores and gradients by name."""

    results: dict[str, Tensor]
    grads: dict[str, Tensor]


def by_formula(case: Case, values: Leaves, *, wide: bool) -> Found:
    attention = dense if case.around is None else case.around(dense)
    return by_calls(attention, case, leaves_of(case, values, wide=wide, gradients=True), allowed)


def by_calls(attention: Attention, case: Case, leaves: Leaves, masked: Callable[..., Any]) -> Found:
    """masked: makes of the case and its rule what the attention takes as its mask."""
    call = made(case, leaves)
    mask = masked(case, call.rule)
    given = attention(call.q, call.k, call.v, call.score, mask, **case.how)
    for score in call.then:
        given = attention(given, call.k, call.v, score, mask, **case.how)
    return _found(case, leaves, _named(given))


def _named(given: Any) -> dict[str, Tensor]:
    if isinstance(given, Tensor):
        return {"out": given}
    out, more = given
    if isinstance(more, Tensor):
        return {"out": out, "lse": more}
    found = {"out": out, "lse": more.lse, "maximum": more.max_scores}
    return {name: value for name, value in found.items() if value is not None}


def _found(case: Case, leaves: Leaves, results: dict[str, Tensor]) -> Found:
    """Gradients are those of the output, by the drawn gradient of it, and of an lse that the call returns."""
    learned = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    assert "maximum" not in results or not results["maximum"].requires_grad, "largest scores have no gradient"
    grads: Sequence[Tensor] = ()
    if learned:
        out, lse = results["out"], results.get("lse")
        sent = case.layouts.get("out", lambda x: x)(leaves["out"]).to(out.dtype)
        total, weights = [out], [sent]
        if lse is not None:
            total, weights = [out, lse], [sent, sent.sum(-1).to(lse.dtype).masked_fill(lse == -torch.inf, 0.0)]
        grads = torch.autograd.grad(total, list(learned.values()), weights, allow_unused=True, materialize_grads=True)
    return Found({name: value.detach() for name, value in results.items()}, dict(zip(learned, grads, strict=True)))


def judged(found: dict[str, Tensor], true: dict[str, Tensor], rough: dict[str, Tensor]) -> str:
    """Return "equal", or what is wrong first. rough: by the dense formula in the dtype of the call."""
    if found.keys() != true.keys():
        return f"wrong: results {sorted(found)}, not {sorted(true)}"
    for name, value in found.items():
        expected = true[name]
        if value.shape != expected.shape:
            return f"wrong: {name} has shape {tuple(value.shape)}, not {tuple(expected.shape)}"
        finite = expected.isfinite()
        if not torch.equal(value.isfinite(), finite) or not torch.equal(value[~finite].double(), expected[~finite]):
            return f"wrong: {name} is not finite in other places"
        if not finite.any():
            continue
        error, rounding, size = (
            x[finite] for x in (value.double() - expected, rough[name].double() - expected, expected)
        )
        own, many = torch.finfo(value.dtype), name in MANY
        unit = own.eps if many else 2 * own.eps  # the gradient of a learned tensor is summed in its dtype
        least = LEAST[own.bits == 64] * max(1.0, float(size.abs().max()))
        norms = {"": _largest} | ({" on average": _root_mean_square} if many else {})
        for kind, norm in norms.items():
            limit = (MARGIN_ON_AVERAGE if kind else MARGIN) * norm(rounding) + unit * norm(size) + least
            if not norm(error) <= limit:
                return f"wrong: {name} is off by {norm(error):.2g}{kind}, where {limit:.2g} is rounding"
    return EQUAL


def _largest(x: Tensor) -> float:
    return float(x.abs().max())


def _root_mean_square(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def alike(out: Tensor, torchs: Tensor) -> str:
    """Return "equal" if the dtype and the order in memory are torch's, or what differs first."""
    if out.dtype != torchs.dtype:
        return f"wrong: out is in {out.dtype}, torch's in {torchs.dtype}"
    return EQUAL if _order(out) == _order(torchs) else "wrong: out does not lie in memory in the order of torch's"


def _order(x: Tensor) -> list[int]:
    """Axes longer than 1, the longest stride first."""
    return sorted((axis for axis in range(x.dim()) if x.shape[axis] > 1), key=lambda axis: (-x.stride(axis), axis))


def _answer(work: Callable[[], str], errors: tuple[type[BaseException], ...] = ERRORS) -> str:
    """The verdict of some work, or its error: refused if it is one of `errors`, else failed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return work()
    except Exception as error:  # whatever a call ends with is an answer
        text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return f"{'refused' if isinstance(error, errors) else 'failed'}: {text}"


@contextmanager
def _uncompiled() -> Iterator[None]:
    """torch's own flex_attention by its formula, without a compilation of each call."""
    with patch.object(torch_own, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True):
        yield


WAYS = ("forward", "backward", "compiled", "one graph", "torch")


def verdicts(case: Case, ways: Sequence[str] = WAYS) -> dict[str, str]:
    """By name of the way: "equal", or "refused: ", "failed: " or "wrong: " and the reason.

    ways: "forward" and "backward", eagerly; "compiled", both in a function that torch.compile compiles; "one graph",
        forward, with fullgraph=True and without gradients; "torch", torch's own call against the formula. If it is
        among the ways, the output of "forward" must have the dtype and the order in memory of torch's, too.
    """
    if case.refused:
        return _refusals(case, ways)
    steps = list(case.in_turn())
    values = [drawn(step, seed) for seed, step in enumerate(steps)]
    true = [by_formula(step, each, wide=True) for step, each in zip(steps, values, strict=True)]
    rough = [
        found if step.dtype == torch.float64 else by_formula(step, each, wide=False)
        for step, each, found in zip(steps, values, true, strict=True)
    ]

    def run(attention: Attention, *, gradients: bool, masked: Callable[..., Any] = mask_of) -> list[Found]:
        found, leaves = [], None
        for step, each in zip(steps, values, strict=True):
            if case.in_place and leaves is not None:
                with torch.no_grad():
                    for name, leaf in leaves.items():
                        leaf.copy_(each[name])
            else:
                leaves = leaves_of(step, each, wide=False, gradients=gradients)
            found.append(by_calls(attention, step, leaves, masked))
        return found

    def around(attention: Attention) -> Attention:
        return attention if case.around is None else case.around(attention)

    def run_compiled(*, gradients: bool, **how: Any) -> list[Found]:
        torch.compiler.reset()
        attention = torch.compile(around(_called), dynamic=case.dynamic, **how)
        return run(attention, gradients=gradients, masked=(lambda *given: given) if case.mask_inside else mask_of)

    def judge(found: list[Found], of: str) -> str:
        for step, mine in enumerate(found):
            verdict = judged(getattr(mine, of), getattr(true[step], of), getattr(rough[step], of))
            if verdict != EQUAL:
                return f"{verdict}, call {step + 1}" if len(found) > 1 else verdict
        return EQUAL

    answers: dict[str, str] = {}
    eager: list[Found] = []

    def forward() -> str:
        eager[:] = run(around(flex_attention), gradients=False)
        return judge(eager, "results")

    def backward() -> str:
        return judge(run(around(flex_attention), gradients=True), "grads")

    def compiled() -> str:
        found = run_compiled(gradients=True, backend="aot_eager")
        verdict = judge(found, "results")
        return judge(found, "grads") if verdict == EQUAL else verdict

    def one_graph() -> str:
        with torch.no_grad():
            return judge(run_compiled(gradients=False, backend="eager", fullgraph=True), "results")

    def torchs() -> str:
        with _uncompiled():
            found = run(around(torch_own.flex_attention), gradients=False)
        if answers.get("forward") == EQUAL:
            for mine, other in zip(eager, found, strict=True):
                if (verdict := alike(mine.results["out"], other.results["out"])) != EQUAL:
                    answers["forward"] = verdict
        return judge(found, "results")

    work = {"forward": forward, "backward": backward, "compiled": compiled, "one graph": one_graph, "torch": torchs}
    for way in ways:
        answers[way] = _answer(work[way])
    torch.compiler.reset()
    return answers


def _called(q: Tensor, k: Tensor, v: Tensor, score: Any, mask: Any, **how: Any) -> Any:
    """Our flex_attention, with a block mask or with what `mask_of` makes one of."""
    return flex_attention(q, k, v, score, mask_of(*mask) if isinstance(mask, tuple) else mask, **how)


def _refusals(case: Case, ways: Sequence[str]) -> dict[str, str]:
    """Of a call that torch refuses: "refused: " and the error is right, a result is wrong."""

    def call(attention: Attention) -> str:
        by_calls(attention, case, leaves_of(case, drawn(case, 0), wide=False, gradients=False), mask_of)
        return "wrong: no error"

    found = {"forward": _answer(lambda: call(flex_attention), (*ERRORS, AttributeError))}
    if "torch" in ways:
        found["torch"] = _answer(lambda: call(torch_own.flex_attention), (Exception,))
    return found
