"""MODULE_CHECKS, the table of checks of attention modules: the test cases of each check, and its assertion.

To add a check, write a function that yields cases of a `Subject` and a function that raises AssertionError if a case is
wrong, and add a row to the table at the end of this file. If the new check only compares another kind of call or of
values with dense attention, the second function is `equal_the_definition`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..masks import documents, visible_keys
from ._closeness import error_text, expected, gradients_of, number_text, require_close
from ._inputs import KINDS
from ._over_ranks import RANKS, run_over_ranks
from ._subject import Case, DoesNotApply, Failure, Subject

# B batch, H query heads, N queries, M keys, D head dim

_MOST_KEYS = 6  # hidden keys replaced in one case
_MOST_GRAPHS = 3  # for the first length, for dynamic lengths, and for one token, which torch specializes
_COMPILED_LENGTHS = 10
_compilations = count()


@dataclass(frozen=True)
class Check:
    """One check of attention modules.

    draws: yields the test cases of a module.
    asserts: raises AssertionError if a case is wrong, else returns a number for the report, such as the number of rows.
    holds: text that follows the sum of these numbers in the report of a passed check.
    needs: name of the function of `Calls` without which the check does not apply.
    unless: reason, in the report, why the check does not apply if no case is drawn.
    long: True if the check also runs at `LONG_LENGTHS` when the caller sets neither `lengths` nor `max_tokens`.
    shrinks: True if a shorter failing length is searched.
    """

    name: str
    draws: Callable[[Subject], Iterable[Case]]
    asserts: Callable[[Subject, Case], int]
    holds: str
    needs: str = "plain"
    unless: str = "no length is long enough"
    long: bool = False
    shrinks: bool = True


# Functions that yield cases.


def _cases_of_kinds(subject: Subject) -> Iterator[Case]:
    """Yield a case of each length with ordinary values, and one with another kind of values from KINDS, in rotation.

    If there is only one length, yield a case of each kind.
    """
    first, *others = KINDS
    for index, length in enumerate(subject.lengths):
        for kind in KINDS if len(subject.lengths) == 1 else (first, others[index % len(others)]):
            yield subject.case(length, kind, f", {kind}")


def _cases_with_gradients(subject: Subject) -> Iterator[Case]:
    for index, length in enumerate(subject.lengths):
        kind = KINDS[index % 2]
        yield subject.case(length, kind, f", {kind}", requires_grad=True)


def _cases_in_half_precision(subject: Subject) -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float16):
        for length in subject.few_lengths:
            text = f" in {str(dtype).removeprefix('torch.')}"
            yield subject.case(length, text=text, batch=1, dtype=dtype, requires_grad=True)


def _cases_with_padding(subject: Subject) -> Iterator[Case]:
    for length in (length for length in subject.lengths if length > 1):
        third, place = max(1, length // 3), torch.arange(length, device=subject.device)
        for text, entry, keys in (
            (f"the last {third} keys of batch 1", 1, place >= length - third),
            (f"the first {third} keys of batch 0", 0, place < third),
            (f"key {length // 2} of batch 1", 1, place == length // 2),
        ):
            hidden = torch.stack([keys & (batch == entry) for batch in range(2)])
            given = {"call": "padded", "extra": (hidden,), "rows": ~hidden[:, None]}
            yield subject.case(
                length, text=f", {text} hidden", pattern=subject.pattern & visible_keys(~hidden), **given
            )


def _cases_of_packed_documents(subject: Subject) -> Iterator[Case]:
    for length in (length for length in subject.lengths if length > 1):
        place = torch.arange(length, device=subject.device)
        ids = torch.stack([(place >= length // 2).long(), (3 * place) // length])
        is_cut, pattern = subject.calls.documents == "cut", subject.pattern
        pattern = pattern & documents(ids) if is_cut else pattern.per_document(ids)
        text = f" in 2 and {len(ids[1].unique())} documents"
        yield subject.case(length, text=text, call="packed", extra=(ids,), pattern=pattern)


def _cases_token_by_token(subject: Subject) -> Iterator[Case]:
    for length in subject.lengths:
        yield subject.case(length, text=", one by one", call="decoded")


def _cases_of_few_lengths(subject: Subject, *, batch: int) -> Iterator[Case]:
    for length in subject.few_lengths:
        yield subject.case(length, batch=batch)


def _cases_with_hidden_keys(subject: Subject, *, after: bool) -> Iterator[Case]:
    for length in subject.lengths:
        place = torch.arange(length, device=subject.device)
        hidden = (subject.times(length) == 0) & ((place > place[:, None]) == after)
        if hidden.any():
            yield subject.case(length, pairs=hidden)


def _cases_with_empty_rows(subject: Subject) -> Iterator[Case]:
    for length in subject.lengths:
        empty = ~(subject.times(length) > 0).any(-1)
        if empty.any():
            yield subject.case(length, requires_grad=True, rows=empty.expand(2, -1, -1))
    if subject.calls.padded is not None:
        hidden = torch.tensor([[False], [True]], device=subject.device).expand(2, subject.lengths[-1])
        given = {"call": "padded", "extra": (hidden,), "rows": hidden[:, None].expand(-1, subject.num_heads, -1)}
        text = ", all of batch 1 hidden by padding"
        yield subject.case(subject.lengths[-1], text=text, requires_grad=True, **given)


def _cases_of_lengths_in_turn(subject: Subject) -> Iterator[Case]:
    """Yield cases that call one module alternately at long and short lengths, then at ascending lengths.

    The modules of a case are this module, and a copy from before its first call.
    """
    used, lengths = subject.module(), subject.lengths
    new = subject.copy_of(used)
    turns = [length for pair in zip(reversed(lengths), lengths, strict=True) for length in pair]
    order = [*turns[: len(lengths) + 1], *lengths]
    for before, length in zip([None, *order], order, strict=False):
        yield subject.case(length, text="" if before is None else f" after {before}", modules=(used, new))


def _cases_of_longest(subject: Subject, *, text: str = "", min_tokens: int = 1) -> Iterator[Case]:
    if subject.lengths[-1] >= min_tokens:
        yield subject.case(subject.lengths[-1], text=text)


def _case_to_compile(subject: Subject) -> Iterator[Case]:
    length = subject.lengths[len(subject.lengths) // 2]
    yield subject.case(length, text=", torch.compile(fullgraph=True)", requires_grad=True)


def _cases_of_compiled_lengths(subject: Subject) -> Iterator[Case]:
    lengths, made = [length for length in subject.lengths if length > 1][:_COMPILED_LENGTHS], []

    def counting(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        made.append(length)
        return graph.forward

    compiled = _compile_call(subject, subject.module(), backend=counting)
    for length in lengths if len(lengths) > 1 else ():
        yield subject.case(length, text=", torch.compile(fullgraph=True)", modules=(compiled, made))


# Functions that check a case.


def equal_the_definition(subject: Subject, case: Case, *, needs_gradients: bool = False) -> int:
    """Raise AssertionError unless a new module's results equal dense attention; return the number of compared rows.

    The results are out, lse if the module returns it, and gradients if q and out require them. Rows of out and lse
    without keys or outside `case.rows` are not compared. In half precision out must have the dtype of q.

    needs_gradients: also raise AssertionError if out requires no gradient.
    """
    out, lse = subject.run(subject.module(case.q.dtype), case)
    if out.dtype != case.q.dtype and case.q.dtype.itemsize == 2:
        raise Failure(f"the output must have the dtype of q, {case.q.dtype}; got {out.dtype}")
    dense, grads = case.definition(), {}
    through = lse if lse is not None and lse.requires_grad else None
    if needs_gradients or (case.q.requires_grad and out.requires_grad):
        grads = gradients_of(dense, out, through)
    rows = (dense.times() > 0).any(-1)
    rows = rows if case.rows is None else rows & case.rows
    require_close(dense, out, lse, grads, through_lse=through is not None, rows=rows)
    return int(rows.sum())


def _assert_right_weights(subject: Subject, case: Case) -> int:
    """Raise Failure unless the softmax weight of every pair is that of dense attention; return the number of pairs.

    The weights are outputs of calls with one-hot vectors as values. Rows without keys are not compared.
    """
    parts, module, D = [], subject.module(), subject.head_dim
    for first in range(0, case.length, D):
        v = torch.zeros_like(case.v)
        keys = torch.arange(first, min(first + D, case.length))
        v[:, :, keys, keys - first] = 1.0
        one_hot = replace(case, v=v)
        truth = expected(one_hot.definition())["out"]
        out = subject.run(module, one_hot)[0].detach().double()
        parts.append(torch.stack([x[0, ..., : len(keys)] for x in (out, truth.value, truth.budget)]))
    found, truth, budget = torch.cat(parts, -1)
    times = subject.times(case.length)
    wrong = ~((found - truth).abs() <= budget) & (times > 0).any(-1, keepdim=True)
    if wrong.any():
        extra, missing = wrong & (times == 0), wrong & (times > 0) & (found.abs() <= 1e-3 * truth)
        kind = next(kind for kind in (extra, missing, wrong) if kind.any())
        h, q, k = kind.nonzero()[0].tolist()
        weight = f"weight {number_text(found[h, q, k])}"
        what = f"is not allowed and takes part with {weight}"
        if times[h, q, k]:
            right = f"{number_text(truth[h, q, k])}, as it counts {int(times[h, q, k])}x"
            what = "is allowed and takes no part" if kind is missing else f"has {weight} and should have {right}"
        raise Failure(
            f"head {h}, query {q}, key {k} {what} ({int(kind.sum())} such pairs; the weights of this query add up to "
            f"{number_text(found[h, q].sum())})"
        )
    return times.numel()


def _assert_unchanged_by_hidden_keys(subject: Subject, case: Case) -> int:
    """Raise Failure if a query's output changes, beyond rounding, when k and v of a key hidden from it are replaced.

    case.pairs: hidden pairs. Up to _MOST_KEYS of their keys are replaced, one at a time. Returns the number of compared
    outputs, over all replaced keys.
    """
    module, hidden = subject.module(), case.pairs
    assert hidden is not None
    before, budget, compared = subject.run(module, case)[0], _out_budget(case), 0
    candidates = hidden.any(0).any(0).nonzero().flatten().tolist()
    for key in candidates[:: -(-len(candidates) // _MOST_KEYS)]:
        k, v = case.k.clone(), case.v.clone()
        k[:, :, key], v[:, :, key] = 7.0 - 3.0 * k[:, :, key], 50.0 - 3.0 * v[:, :, key]
        after, _ = subject.run(module, replace(case, k=k, v=v))
        rows = hidden[:, :, key].expand(before.shape[0], -1, -1)
        changed = _differing_rows(before, after, budget) & rows
        if changed.any():
            _, h, row = place = _first_index(changed)
            raise Failure(
                f"key {key} is hidden from query {row} of head {h}; where its k and v are replaced, the output of that "
                f"query changes by {_largest_difference(before, after, place)} ({int(changed.sum())} rows change of "
                f"{int(rows.sum())} that must not)"
            )
        compared += int(rows.sum())
    return compared


def _assert_zero_without_keys(subject: Subject, case: Case) -> int:
    """Raise Failure unless queries without keys have output 0 and lse -inf, and the gradients of q, k and v are finite.

    lse and gradients are checked if the module gives them. case.rows: mask of the rows without keys, whose number is
    returned.
    """
    out, lse = subject.run(subject.module(), case)
    empty = case.rows
    assert empty is not None
    wrong = empty & ~(out == 0).all(-1)
    if wrong.any():
        b, h, q = _first_index(wrong)
        raise Failure(
            f"head {h}, query {q} of batch {b} sees no key, so its output must be 0; got "
            f"{number_text(out[b, h, q, 0])} and so on ({int(wrong.sum())} of {int(empty.sum())} such rows are wrong)"
        )
    if lse is not None and not (lse[empty] == -torch.inf).all():
        raise Failure(f"where a query sees no key the lse must be -inf; got {number_text(lse[_first_index(empty)])}")
    if out.requires_grad:
        grads = torch.autograd.grad(out.sum(), case.qkv, allow_unused=True)
        for name, grad in zip("qkv", grads, strict=True):
            if grad is not None and not grad.isfinite().all():
                raise Failure(f"with rows that see no key, the gradient of {name} is not finite")
    return int(empty.sum())


def _assert_like_a_new_module(subject: Subject, case: Case) -> int:
    """Raise Failure unless a module gives the output, up to rounding, of a copy that was never called; return 1."""
    used, new = case.modules
    right, _ = subject.run(subject.copy_of(new), case)
    found, _ = subject.run(used, case)
    changed = _differing_rows(found, right, _out_budget(case))
    if changed.any():
        place = _first_index(changed)
        raise Failure(
            f"a used module gives {number_text(found[place].flatten()[0])} and so on where a new one differs by "
            f"{_largest_difference(found, right, place)} (head {place[1]}, query {place[2]}; {int(changed.sum())} of "
            f"{changed.numel()} rows differ)"
        )
    return 1


def _assert_entries_independent(subject: Subject, case: Case) -> int:
    module = subject.module()
    whole, _ = subject.run(module, case)
    for b in range(len(case.q)):
        q, k, v = (x[b : b + 1] for x in case.qkv)
        alone, _ = subject.run(module, replace(case, q=q, k=k, v=v))
        changed = _differing_rows(whole[b : b + 1], alone, _out_budget(case)[b : b + 1])
        if changed.any():
            _, h, row = place = _first_index(changed)
            raise Failure(
                f"entry {b} of a batch of {len(case.q)} differs from the same entry alone by "
                f"{_largest_difference(whole[b : b + 1], alone, place)}, in head {h}, query {row}"
            )
    return len(case.q)


def _assert_same_bits_twice(subject: Subject, case: Case) -> int:
    """Raise Failure unless two calls with equal inputs give equal outputs and change no input; return 2."""
    given, module = [x.clone() for x in case.qkv], subject.module()
    first, second = (subject.run(module, case)[0] for _ in range(2))
    for name, x, before in zip("qkv", case.qkv, given, strict=True):
        if not torch.equal(x, before):
            raise Failure(f"the call changes {name}")
    _require_equal(first, second, "two calls with the same inputs differ")
    return 2


def _assert_state_loads(subject: Subject, case: Case) -> int:
    """Raise Failure unless two modules give equal outputs after the second loads the state_dict of the first.

    Both modules are called before the load. A call must not change the names in the state_dict. Returns the number of
    names. Raises DoesNotApply if the module is no nn.Module.
    """
    first, second = subject.module(), subject.module()
    if not isinstance(first, nn.Module):
        raise DoesNotApply(f"{type(first).__name__} is no nn.Module")
    with torch.no_grad():  # distinct parameters, so that state outside the state_dict is noticed
        for parameter in first.parameters():
            parameter.add_(0.01 * torch.arange(parameter.numel(), device=parameter.device).view_as(parameter).cos())
    names, shortest = sorted(first.state_dict()), subject.case(subject.lengths[0])
    for module in (first, second):  # the second, so that a cache of its old parameters is noticed
        subject.run(module, shortest)
    if added := sorted(set(first.state_dict()) ^ set(names)):
        raise Failure(f"a call at {shortest.text} changes the names in state_dict: {', '.join(added)}")
    try:
        second.load_state_dict(first.state_dict())
    except RuntimeError as error:
        raise Failure(f"a used module's state_dict does not load into a new one: {error}") from None
    found, right = (subject.run(module, case)[0] for module in (second, first))
    _require_equal(found, right, "after load_state_dict the output differs")
    return len(names)


def _assert_like_eager(subject: Subject, case: Case) -> int:
    """Raise Failure unless out, dq, dk and dv, compiled and eager, are equal up to rounding; return their number.

    If out requires no gradient, only out is compared.
    """
    module = subject.module()
    compiled = _compile_call(subject, module, backend="aot_eager")
    eager, _ = subject.run(module, case)
    truth, out = expected(case.definition(), gradients=True), compiled(*case.qkv)
    pairs = {"out": (out, eager)}
    if eager.requires_grad:
        grads = (torch.autograd.grad(x, case.qkv, torch.ones_like(x)) for x in (out, eager))
        pairs |= dict(zip(("dq", "dk", "dv"), zip(*grads, strict=True), strict=True))
    for name, (x, y) in pairs.items():
        off = (x - y).double().abs()
        if not (off <= truth[name].budget + torch.finfo(x.dtype).eps * (y.abs() if name != "out" else 0)).all():
            raise Failure(f"{name} compiled and eager differ by {error_text(off.amax())}")
    return len(pairs)


def _assert_few_graphs(subject: Subject, case: Case) -> int:
    """Raise Failure if torch.compile makes more than _MOST_GRAPHS graphs up to the length of the case; return 1.

    case.modules: the module's call, compiled without `dynamic=`, and the list of lengths at which it made a graph.
    """
    compiled, made = case.modules
    compiled(*case.qkv)
    if len(made) > _MOST_GRAPHS:
        raise Failure(f"{len(made)} graphs for lengths up to this; new ones were made at {', '.join(map(str, made))}")
    return 1


def _assert_ranks_like_definition(subject: Subject, case: Case) -> int:
    """Raise AssertionError unless RANKS processes, which share the tokens, give dense attention; return RANKS.

    Their gradients are compared too if out requires one.
    """
    out, *grads = (x.to(subject.device) for x in run_over_ranks(subject.calls, *case.qkv))
    named: dict[str, Tensor] = dict(zip(("dq", "dk", "dv"), grads, strict=False))
    dense = case.definition()
    require_close(dense, out, None, named, rows=(dense.times() > 0).any(-1))
    return RANKS


def _compile_call(subject: Subject, module: Any, *, backend: Any) -> Callable[..., Tensor]:
    """Return a compiled function of q, k and v that returns the module's out, (B, H, N, D)."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return subject.output(module, q, k, v)[0]

    # A code object of its own: other compilations do not count towards its recompile limit.
    code: CodeType = call.__code__.replace(co_name=f"call_{next(_compilations)}")
    own = FunctionType(code, call.__globals__, code.co_name, call.__defaults__, call.__closure__)
    return torch.compile(own, fullgraph=True, backend=backend)


def _out_budget(case: Case) -> Tensor:
    return expected(case.definition())["out"].budget


def _differing_rows(a: Tensor, b: Tensor, budget: Tensor) -> Tensor:
    """Return (B, H, N), True for rows in which a and b differ by more than the budget, or only one of them is NaN."""
    return ~(((b - a).detach().double().abs() <= budget) | (a.isnan() & b.isnan())).all(-1)


def _first_index(rows: Tensor) -> tuple[int, ...]:
    return tuple(rows.nonzero()[0].tolist())


def _largest_difference(a: Tensor, b: Tensor, row: tuple[int, ...]) -> str:
    return error_text((b - a)[row].abs().amax())


def _require_equal(a: Tensor, b: Tensor, what: str) -> None:
    if not ((a == b) | (a.isnan() & b.isnan())).all():
        raise Failure(f"{what} by {error_text((a - b).abs().amax())}")


_CLOSE = "within rounding of the definition"
_TABLE = (
    Check("agreement", _cases_of_kinds, equal_the_definition, f"outputs {_CLOSE}", long=True),
    Check(
        "coverage",
        partial(_cases_of_few_lengths, batch=1),
        _assert_right_weights,
        "pairs with their weight, or with none",
    ),
    Check(
        *("causality", partial(_cases_with_hidden_keys, after=True), _assert_unchanged_by_hidden_keys),
        holds="outputs unchanged where a hidden later key is replaced",
        unless="the pattern hides no key after a query",
    ),
    Check(
        *("isolation", partial(_cases_with_hidden_keys, after=False), _assert_unchanged_by_hidden_keys),
        holds="outputs unchanged where a hidden earlier key is replaced",
        unless="the pattern hides no key at or before a query",
    ),
    Check(
        *("empty rows", _cases_with_empty_rows, _assert_zero_without_keys),
        holds="rows without keys: output 0, no NaN in any gradient",
        unless="every query has a key",
    ),
    Check(
        "lengths",
        _cases_of_lengths_in_turn,
        _assert_like_a_new_module,
        "calls of one module, each like one of a new module",
    ),
    Check(
        "batch",
        partial(_cases_of_few_lengths, batch=3),
        _assert_entries_independent,
        "batch entries that equal the entry alone",
    ),
    Check(
        "determinism",
        _cases_of_kinds,
        _assert_same_bits_twice,
        "calls with identical bits in pairs and unchanged inputs",
    ),
    Check(
        *("gradients", _cases_with_gradients, partial(equal_the_definition, needs_gradients=True)),
        holds=f"outputs with gradients {_CLOSE}",
    ),
    Check(
        "half precision", _cases_in_half_precision, equal_the_definition, f"outputs with gradients {_CLOSE}", long=True
    ),
    Check("padding", _cases_with_padding, equal_the_definition, f"outputs {_CLOSE}, without hidden keys", "padded"),
    Check("packing", _cases_of_packed_documents, equal_the_definition, f"outputs {_CLOSE}, by document", "packed"),
    Check("decoding", _cases_token_by_token, equal_the_definition, f"outputs {_CLOSE}, token by token", "decoded"),
    Check(
        "state dict", _cases_of_longest, _assert_state_loads, "names; loaded, they give the same bits", shrinks=False
    ),
    Check("compile", _case_to_compile, _assert_like_eager, "results in one graph, like eager", shrinks=False),
    Check(
        *("recompilation", _cases_of_compiled_lengths, _assert_few_graphs),
        holds=f"lengths with at most {_MOST_GRAPHS} graphs",
        unless="there are no two lengths above 1 to compare",
        shrinks=False,
    ),
    Check(
        *(
            "ranks",
            partial(_cases_of_longest, text=f" on {RANKS} ranks", min_tokens=RANKS),
            _assert_ranks_like_definition,
        ),
        holds="ranks that equal one",
        needs="over_ranks",
        shrinks=False,
    ),
)

MODULE_CHECKS = {check.name: check for check in _TABLE}
