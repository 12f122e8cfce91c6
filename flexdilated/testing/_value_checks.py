"""Checks of values against the float64 definition: outputs, single weights, empty rows, gradients, dtypes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ._closeness import expected, gradients_of
from ._inputs import KINDS
from ._module import DoesNotApply, Failure, Subject, failing, hold_all, hold_gradients, hold_rows
from ._problem import number, tokens


def check_agreement(subject: Subject) -> str:
    """Compare the output, and the lse if returned, of every row with keys."""
    for length, kind in subject.cases():
        q, k, v = subject.inputs(length, kind)
        out, lse = subject.run(subject.module(), q, k, v)
        hold_rows(f"{tokens(length)}, {kind}", subject.problem(q, k, v), out, lse)
    return f"{_lengths(subject)}, {len(KINDS)} kinds of values: within what rounding accounts for"


def check_coverage(subject: Subject) -> str:
    """Compare the weight of every pair, read by one-hot values."""
    pairs = 0
    for length in subject.spread:
        q, k, _ = subject.inputs(length, batch=1)
        found, truth, budget = _weights(subject, q, k)
        wrong = ~((found - truth).abs() <= budget)
        times = subject.table(length)
        wrong &= (times > 0).any(-1, keepdim=True)
        if wrong.any():
            raise Failure(f"{tokens(length)}: {_wrong_pair(times, found, truth, wrong)}")
        pairs += times.numel()
    return f"{pairs:,} pairs of {_lengths(subject, subject.spread)}: the allowed ones have their weight, others none"


def _weights(subject: Subject, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(found, true, budget), each (H, N, M)."""
    parts, D = [], subject.head_dim
    module = subject.module()
    for first in range(0, k.shape[2], D):
        v = torch.zeros_like(k)
        keys = torch.arange(first, min(first + D, k.shape[2]))
        v[:, :, keys, keys - first] = 1.0
        out, _ = subject.run(module, q, k, v)
        truth = expected(subject.problem(q, k, v))["out"]
        parts.append(torch.stack([x[0, ..., : len(keys)] for x in (out.detach().double(), truth.value, truth.budget)]))
    found, truth, budget = torch.cat(parts, -1)
    return found, truth, budget


def _wrong_pair(times: Tensor, found: Tensor, truth: Tensor, wrong: Tensor) -> str:
    """Text of a wrong pair: preferably a forbidden pair with weight, then a missing pair, then a wrong weight."""
    extra, missing = wrong & (times == 0), wrong & (times > 0) & (found.abs() <= 1e-3 * truth)
    kind = next(kind for kind in (extra, missing, wrong) if kind.any())
    h, q, k = kind.nonzero()[0].tolist()
    pair, weight = f"head {h}, query {q}, key {k}", number(found[h, q, k])
    pairs = int(kind.sum())
    number_of = f"{pairs} such pair{'s' * (pairs > 1)}; the weights of this query add up to {number(found[h, q].sum())}"
    if kind is extra:
        return f"{pair} is not allowed and takes part with weight {weight} ({number_of})"
    if kind is missing:
        return f"{pair} is allowed and takes no part ({number_of})"
    right = f"{number(truth[h, q, k])}, as it counts {int(times[h, q, k])}x"
    return f"{pair} has weight {weight} and should have {right} ({number_of})"


def check_empty_rows(subject: Subject) -> str:
    """A query without keys must have output 0, lse -inf, and finite gradients; also if padding hides all keys."""
    rows = 0
    for length in subject.lengths:
        empty = ~(subject.table(length) > 0).any(-1)
        if not empty.any():
            continue
        q, k, v = (x.requires_grad_() for x in subject.inputs(length))
        out, lse = subject.run(subject.module(), q, k, v)
        _hold_empty(f"{tokens(length)}", empty.expand(2, -1, -1), out, lse, (q, k, v))
        rows += int(empty.sum())
    if subject.calls.padded is not None:
        length = subject.lengths[-1]
        q, k, v = (x.requires_grad_() for x in subject.inputs(length))
        hidden = torch.zeros(2, length, dtype=torch.bool, device=subject.device)
        hidden[1] = True
        out, lse = subject.run(subject.module(), q, k, v, hidden, call="padded")
        empty = torch.zeros(out.shape[:3], dtype=torch.bool, device=subject.device)
        empty[1] = True
        _hold_empty(f"{tokens(length)}, all of batch 1 hidden by padding", empty, out, lse, (q, k, v))
        rows += int(empty.sum())
    if not rows:
        raise DoesNotApply(f"every query has a key, over {_lengths(subject)}")
    return f"{rows:,} rows without keys: output 0, no NaN in any gradient"


def _hold_empty(where: str, empty: Tensor, out: Tensor, lse: Tensor | None, leaves: tuple[Tensor, ...]) -> None:
    b, h, q = empty.nonzero()[0].tolist()
    wrong = (empty & ~(out == 0).all(-1)).nonzero().tolist()
    if wrong:
        b, h, q = wrong[0]
        raise Failure(
            f"{where}: head {h}, query {q} of batch {b} sees no key, so its output must be 0; "
            f"got {number(out[b, h, q, 0])} and so on ({len(wrong)} of {int(empty.sum())} such rows are wrong)"
        )
    if lse is not None and not (lse[empty] == -torch.inf).all():
        raise Failure(f"{where}: where a query sees no key the lse must be -inf; got {number(lse[b, h, q])}")
    if out.requires_grad:
        grads = torch.autograd.grad(out.sum(), leaves, allow_unused=True)
        for name, grad in zip("qkv", grads, strict=True):
            if grad is not None and not grad.isfinite().all():
                raise Failure(f"{where}: with rows that see no key, the gradient of {name} is not finite")


def check_gradients(subject: Subject) -> str:
    """Compare gradients of q, k and v, also through the lse if returned; exactly 0 for a key that no query sees."""
    for length, kind in [(length, KINDS[index % 2]) for index, length in enumerate(subject.lengths)]:
        q, k, v = (x.requires_grad_() for x in subject.inputs(length, kind))
        out, lse = subject.run(subject.module(), q, k, v)
        lse = lse if lse is not None and lse.requires_grad else None
        problem = subject.problem(q, k, v)
        where = f"{tokens(length)}, {kind}"
        with failing(where):
            grads = gradients_of(problem, out, lse)
        hold_gradients(where, problem, grads, through_lse=lse is not None)
    return f"{_lengths(subject)}: of q, k and v, within what rounding accounts for"


def check_half_precision(subject: Subject) -> str:
    """In bfloat16 and float16, output and gradients must be within rounding errors, the output in the dtype of q."""
    for dtype in (torch.bfloat16, torch.float16):
        half = replace(subject, dtype=dtype)
        for length in half.spread:
            q, k, v = (x.requires_grad_() for x in half.inputs(length, batch=1))
            out, _ = half.run(half.module(), q, k, v)
            if out.dtype != dtype:
                raise Failure(f"the output must have the dtype of q, {dtype}; got {out.dtype}")
            problem = half.problem(q, k, v)
            grads = gradients_of(problem, out, None) if out.requires_grad else ()
            hold_all(f"{tokens(length)} in {str(dtype).removeprefix('torch.')}", problem, out, grads)
    return f"bfloat16 and float16, {_lengths(subject, subject.spread)}: within what rounding to them accounts for"


def _lengths(subject: Subject, lengths: tuple[int, ...] | None = None) -> str:
    first, *others = lengths or subject.lengths
    return f"{1 + len(others)} lengths from {first} to {others[-1]}" if others else f"{tokens(first)}"
