"""Checks that no hidden input changes an output: future or hidden keys, padding, other documents or batch entries."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..masks import documents, visible_keys
from ._closeness import Expected, expected
from ._module import DoesNotApply, Failure, Subject, hold_rows
from ._problem import num_lengths, rough, tokens

_KEYS = 6


def check_causality(subject: Subject) -> str:
    """Replacing hidden keys after a query must not change its output."""
    return _check_hidden(subject, "after")


def check_isolation(subject: Subject) -> str:
    """Replacing hidden keys at or before a query must not change its output."""
    return _check_hidden(subject, "at or before")


def _check_hidden(subject: Subject, where: str) -> str:
    looked_at = 0
    for length in subject.lengths:
        hidden = subject.table(length) == 0
        place = torch.arange(length, device=hidden.device)
        after = place > place[:, None]
        hidden = hidden & (after if where == "after" else ~after)
        if hidden.any():
            looked_at += _replace_keys(subject, length, hidden)
    if not looked_at:
        raise DoesNotApply(f"the pattern hides no key {where} a query")
    return f"{looked_at:,} outputs with a key {where} the query, hidden from it, replaced: none changes"


def _replace_keys(subject: Subject, length: int, hidden: Tensor) -> int:
    """Number of compared outputs; replaces up to _KEYS hidden keys, one at a time. hidden: (H, N, N)."""
    q, k, v = subject.inputs(length)
    module = subject.module()
    before, _ = subject.run(module, q, k, v)
    truth = expected(subject.problem(q, k, v))["out"]
    looked_at = 0
    candidates = hidden.any(0).any(0).nonzero().flatten().tolist()
    for key in candidates[:: -(-len(candidates) // _KEYS)]:
        other_k, other_v = k.clone(), v.clone()
        other_k[:, :, key], other_v[:, :, key] = 7.0 - 3.0 * k[:, :, key], 50.0 - 3.0 * v[:, :, key]
        after, _ = subject.run(module, q, other_k, other_v)
        rows = hidden[:, :, key].expand(before.shape[0], -1, -1)
        changed = _changed(before, after, truth, rows)
        if changed.any():
            b, h, row = changed.nonzero()[0].tolist()
            raise Failure(
                f"{tokens(length)}: key {key} is hidden from query {row} of head {h}; where its k and v are replaced, "
                f"the output of that query changes by {_size(before, after, (b, h, row))} ({int(changed.sum())} rows "
                f"change of {int(rows.sum())} that must not)"
            )
        looked_at += int(rows.sum())
    return looked_at


def _changed(before: Tensor, after: Tensor, truth: Expected, rows: Tensor) -> Tensor:
    """(B, H, N): rows that changed by more than rounding, or between a number and NaN."""
    same = ((after - before).detach().double().abs() <= truth.budget) | (before.isnan() & after.isnan())
    return ~same.all(-1) & rows


def _size(before: Tensor, after: Tensor, place: tuple[int, ...]) -> str:
    return rough((after - before)[place].abs().amax())


def check_padding(subject: Subject) -> str:
    """Keys hidden by a padding mask must be excluded, all other keys included, by each batch entry's mask."""
    if subject.calls.padded is None:
        raise DoesNotApply("no call with a padding mask is given (Calls.padded)")
    for length in (length for length in subject.lengths if length > 1):
        for name, hidden in _padding_masks(length, subject.device):
            q, k, v = subject.inputs(length)
            problem = subject.problem(q, k, v, subject.pattern & visible_keys(~hidden))
            out, _ = subject.run(subject.module(), q, k, v, hidden, call="padded")
            hold_rows(f"{tokens(length)}, {name}", problem, out, rows=~hidden[:, None, :])
    return "keys hidden on the right, on the left and in the middle: they take no part, and all others do"


def _padding_masks(length: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """(description, mask (2, N), True for hidden keys)."""
    third, place = max(1, length // 3), torch.arange(length, device=device)
    nothing = torch.zeros(length, dtype=torch.bool, device=device)
    yield f"the last {third} keys of batch 1 hidden", torch.stack([nothing, place >= length - third])
    yield f"the first {third} keys of batch 0 hidden", torch.stack([place < third, nothing])
    yield f"key {length // 2} of batch 1 hidden", torch.stack([nothing, place == length // 2])


def check_packing(subject: Subject) -> str:
    """Packed documents must not see each other, and each must have correct outputs."""
    if subject.calls.packed is None:
        raise DoesNotApply("no call with document ids is given (Calls.packed)")
    for length in (length for length in subject.lengths if length > 1):
        place = torch.arange(length, device=subject.device)
        ids = torch.stack([(place >= length // 2).long(), (3 * place) // length])
        cut = subject.calls.documents == "cut"
        rule = subject.pattern & documents(ids) if cut else subject.pattern.per_document(ids)
        q, k, v = subject.inputs(length)
        out, _ = subject.run(subject.module(), q, k, v, ids, call="packed")
        where = f"{tokens(length)} in 2 and {len(ids[1].unique())} documents"
        hold_rows(where, subject.problem(q, k, v, rule), out)
    return f"2 and 3 documents a sequence, {num_lengths(subject.lengths)}: each attends as it should, and sees no other"


def check_batch(subject: Subject) -> str:
    """Batch entries must be independent."""
    for length in subject.spread:
        q, k, v = subject.inputs(length, batch=3)
        module = subject.module()
        whole, _ = subject.run(module, q, k, v)
        truth = expected(subject.problem(q, k, v))["out"]
        for b in range(3):
            alone, _ = subject.run(module, *(x[b : b + 1] for x in (q, k, v)))
            one = Expected("out", truth.value[b : b + 1], truth.budget[b : b + 1], None)
            everywhere = torch.ones(alone.shape[:3], dtype=torch.bool, device=alone.device)
            changed = _changed(whole[b : b + 1], alone, one, everywhere)
            if changed.any():
                _, h, row = changed.nonzero()[0].tolist()
                raise Failure(
                    f"{tokens(length)}: entry {b} of a batch of 3 is another one than alone; head {h}, query {row} "
                    f"differs by {_size(whole[b : b + 1], alone, (0, h, row))}"
                )
    return f"entries of a batch of 3 alone, {num_lengths(subject.spread)}: the same"
