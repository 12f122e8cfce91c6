"""check_attention_module: compare any attention module with dense attention over the pairs of a pattern."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, Literal

import torch
from tabulate import tabulate

from ..masks import Mixture, Pattern
from ..masks.core import advises, require_expression, require_int, shortened
from ..masks.patterns import names
from ._inputs import KINDS, LONG_LENGTHS, accepts_length, length_text, lengths_for
from ._module_checks import MODULE_CHECKS, Check
from ._subject import LONGEST_LINE, Calls, DoesNotApply, Failure, Subject, as_failure, first_lines

Verdict = Literal["passed", "failed", "does not apply"]
_WIDTH = 88  # the table has 120 columns
_DETAIL_LINES = (10, 3, 3, 3)  # number of lines of the first failures, below the table


@dataclass(frozen=True)
class CheckResult:
    """Result of one check of an attention module.

    name: a key of `MODULE_CHECKS`.
    detail: if passed, the tested lengths and a total, such as the number of compared rows; if failed, the shortest
        failing case that was found; if the check does not apply, the reason.

    >>> report = testing.examine_attention_module(
    ...     lambda: fd.BlockSparseAttention(masks.causal()), masks.causal(), checks=['causality']
    ... )
    >>> report.results[0].verdict
    'passed'
    """

    name: str
    verdict: Verdict
    detail: str


@dataclass(frozen=True)
class ModuleReport:
    """Results of the checks that were run on one attention module, in the order of execution.

    `report[name]` is the result of one check, `str(report)` a table. module, pattern, sizes and lengths are texts: the
    name of the module's class (or of a function), the repr of the pattern, sizes and dtype of the test tensors, and the
    tested lengths.

    >>> report = testing.examine_attention_module(
    ...     lambda: fd.BlockSparseAttention(masks.causal()), masks.causal(), checks=['causality']
    ... )
    >>> report.passed
    True
    """

    module: str
    pattern: str
    sizes: str
    lengths: str
    results: tuple[CheckResult, ...]

    @property
    def passed(self) -> bool:
        """True if no check failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """Results of the failed checks."""
        return tuple(result for result in self.results if result.verdict == "failed")

    def __getitem__(self, name: str) -> CheckResult:
        for result in self.results:
            if result.name == name:
                return result
        raise KeyError(f"no check is named {name!r}; there are {', '.join(result.name for result in self.results)}")

    def __str__(self) -> str:
        applied = sum(result.verdict in ("passed", "failed") for result in self.results)
        failed = len(self.failures)
        verdict = f"{failed} of {applied} checks failed" if failed else f"{applied} of {applied} checks passed"
        table = []
        for result in self.results:
            verdict_text = result.verdict.upper() if result.verdict == "failed" else result.verdict
            first_line = textwrap.shorten(result.detail.partition("\n")[0], 2 * _WIDTH)  # further ones below the table
            table.append((result.name, verdict_text, first_line))
        claim = shortened(self.pattern, LONGEST_LINE)
        head = f"{self.module}, claimed to be {claim}, {self.sizes}: {verdict}\n{self.lengths}"
        parts = [head, tabulate(table, headers=("check", "verdict", "detail"), maxcolwidths=[None, None, _WIDTH])]
        long = [result for result in self.failures if "\n" in result.detail]
        shown = zip(long, _DETAIL_LINES, strict=False)
        parts += [f"{result.name}: {first_lines(result.detail, most)}" for result, most in shown]
        return "\n\n".join(parts)


_MAX_TOKENS = 40
_SHRINK_S = 5.0  # for one check; a running call of the module is not interrupted
_PAIRED_LENGTHS = 12  # the check "lengths" searches for a shorter failing pair among this many shortest lengths

_CALL_HINT = (
    "; called with q, k and v of (batch, heads, tokens, head dim): a module of (batch, tokens, width) takes "
    "calls=testing.Calls(layout='BNE'), and identity_projections for its projections"
)


@advises()
def check_attention_module(factory: Callable[[], Any], pattern: Pattern | Mixture, **options: Any) -> ModuleReport:
    """Compare an attention module with dense attention over the pairs of a pattern; return a report.

    Raises AssertionError with the report if a check fails. The arguments are those of `examine_attention_module`, which
    returns the report also if a check fails.

    >>> report = testing.check_attention_module(
    ...     lambda: fd.BlockSparseAttention(masks.causal()), masks.causal(), checks=['coverage', 'causality']
    ... )
    """
    report = examine_attention_module(factory, pattern, **options)
    if not report.passed:
        raise AssertionError(str(report))
    return report


@advises()
def examine_attention_module(
    factory: Callable[[], Any],
    pattern: Pattern | Mixture,
    *,
    num_heads: int = 4,
    num_kv_heads: int | None = None,
    head_dim: int = 8,
    max_tokens: int | None = None,
    lengths: Sequence[int] | None = None,
    examples: int = 16,
    calls: Calls | None = None,
    checks: Sequence[str] | None = None,
    skip: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> ModuleReport:
    """Compare an attention module, of this library or any other, with dense attention over a pattern; return a report.

    factory: returns a new module, called as `calls` defines: by default with q (B, H, N, D), k and v (B, G, N, D).
    pattern: the pairs that the module should compute. Scores must be scaled by 1 / sqrt(D), and query head h must read
        key/value head h // (H / G).
    num_heads, num_kv_heads, head_dim: H, G (None: H) and D of the tensors.
    max_tokens, examples: the module is tested at up to `examples` lengths of up to `max_tokens` tokens: small ones,
        lengths near multiples of the pattern's segment lengths, strides and windows, 64, 65, 128, 129 and so on.
        max_tokens=None: up to 40 tokens, and in the checks "agreement" and "half precision" also a few lengths up to
        257, listed in the report.
    lengths: numbers of tokens to test, and no others; None: choose them by max_tokens and examples.
    calls: how to call the module; None for `Calls()`, as module(q, k, v).
    checks: names of the checks to run, None for all `MODULE_CHECKS`.
    skip: names of checks to omit.
    dtype, device: of the test tensors and, for an `nn.Module`, of its parameters; the check "half precision" has its
        own dtypes.
    seed: of the random values.

    A check stops at the first failing call; unless `lengths` is given, most checks then search for a shorter failing
    length for up to 5 seconds. If the module raises an exception, the check fails. The dense attention is in float64,
    with the error budgets of `assert_attention_close`.

    Raises TypeError or ValueError for arguments that do not fit, such as a pattern with run-time tensors.

    >>> report = testing.examine_attention_module(lambda: fd.BlockSparseAttention(masks.causal()), masks.causal())
    >>> report.passed
    True
    """
    require_expression(pattern)
    if isinstance(factory, torch.nn.Module) or not callable(factory):
        raise TypeError(
            "factory must be a function that makes the module, such as lambda: MyAttention(64); got "
            f"{shortened(repr(factory), 80)}"
        )
    most = _MAX_TOKENS if max_tokens is None else max_tokens
    for name, value in (("num_heads", num_heads), ("head_dim", head_dim), ("max_tokens", most)):
        require_int(name, value, minimum=1)
    require_int("examples", examples, minimum=2)
    require_int("seed", seed, minimum=0)
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating-point dtype; got {dtype!r:.80}")
    groups = require_int("num_kv_heads", num_heads if num_kv_heads is None else num_kv_heads, minimum=1)
    if num_heads % groups:
        raise ValueError(f"num_kv_heads must divide num_heads; got {num_kv_heads=} and {num_heads=}")
    pattern.check_heads(num_heads)
    if needed := names(pattern):
        raise ValueError(
            "the checks draw lengths, so the pattern must have no run-time tensors: pass it without "
            f"{', '.join(map(repr, needed))}, and for packed or padded batches pass calls=testing.Calls(packed=...) or "
            "testing.Calls(padded=...)"
        )
    chosen = [MODULE_CHECKS[name] for name in _checks_to_run(checks, skip)]
    if lengths is None:
        tried = lengths_for(pattern, num_heads, max_tokens=most, examples=examples)
    else:
        tried = tuple(sorted({require_int(f"lengths[{i}]", n, minimum=1) for i, n in enumerate(lengths)}))
        if not tried:
            raise ValueError("lengths must hold at least one length; got none")
    calls = Calls() if calls is None else calls
    where = torch.device(device)
    subject = Subject(factory, pattern, calls, num_heads, groups, head_dim, tried, dtype, where, seed)
    long = LONG_LENGTHS if max_tokens is None and lengths is None else ()
    longer = replace(
        subject, lengths=(*tried, *(length for length in long if accepts_length(pattern, num_heads, length)))
    )
    subjects = [longer if check.long else subject for check in chosen]
    results = tuple(
        _run_check(check, each, shrink=lengths is None) for check, each in zip(chosen, subjects, strict=True)
    )
    sizes = f"H={num_heads}, G={groups}, D={head_dim}, N up to {tried[-1]}, {str(dtype).removeprefix('torch.')}"
    drawn, more = f"lengths drawn: {', '.join(map(str, tried))}", longer.lengths[len(tried) :]
    if more and (also := [check.name for check in chosen if check.long]):
        drawn += f"; in {', '.join(also)} also {', '.join(map(str, more))}"
    module = subject.module()
    name = getattr(module, "__name__", type(module).__name__)
    return ModuleReport(name, repr(pattern), sizes, textwrap.fill(drawn, _WIDTH + 32), results)


def _checks_to_run(checks: Sequence[str] | None, skip: Sequence[str]) -> list[str]:
    for given, listed in (("checks", checks or ()), ("skip", skip)):
        if isinstance(listed, str):
            raise TypeError(
                f"{given} must be a sequence of names; got the string {listed!r}: write {given}=[{listed!r}]"
            )
        unknown = [name for name in listed if name not in MODULE_CHECKS]
        if unknown:
            raise ValueError(f"{given} must be some of {', '.join(map(repr, MODULE_CHECKS))}; got {unknown[0]!r}")
    return [name for name in MODULE_CHECKS if (checks is None or name in checks) and name not in skip]


def _run_check(check: Check, subject: Subject, *, shrink: bool) -> CheckResult:
    try:
        return CheckResult(check.name, "passed", _run_cases(check, subject))
    except DoesNotApply as reason:
        return CheckResult(check.name, "does not apply", str(reason))
    except Failure as found:
        detail = (shrink and check.shrinks and _shortest_failure(check, subject)) or str(found)
        always = detail.startswith(f"{subject.case(subject.lengths[0]).text}, {KINDS[0]}: raises")
        is_unclear = always and check.name == "agreement" and subject.calls.layout == "BHND"
        return CheckResult(check.name, "failed", detail + _CALL_HINT * is_unclear)


def _run_cases(check: Check, subject: Subject) -> str:
    """Run all cases of a check; return a text of the tested lengths and the sum of what `check.asserts` returned.

    Raises Failure with the first failing case, or DoesNotApply with the reason.
    """
    if getattr(subject.calls, check.needs) is None:
        raise DoesNotApply(f"it needs a function that calls the module: pass calls=testing.Calls({check.needs}=...)")
    compared, lengths, where = 0, set(), ""
    try:
        for case in check.draws(subject):
            where = f"{case.text}: "
            compared += check.asserts(subject, case)
            lengths.add(case.length)
            where = ""
    except DoesNotApply:
        raise
    except AssertionError as error:
        raise Failure(f"{where}{error}") from None
    except Exception as error:  # of the module, its gradients, or torch's compiler
        raise Failure(f"{where}{as_failure(error)}") from error
    if not lengths:
        raise DoesNotApply(check.unless)
    first, *others = sorted(lengths)
    drawn = f"{len(lengths)} lengths from {first} to {others[-1]}" if others else length_text(first)
    return f"{drawn}: {compared:,} {check.holds}"


def _shortest_failure(check: Check, subject: Subject) -> str | None:
    """Return the text of the failure at the shortest failing length that is found within _SHRINK_S seconds.

    None if no length fails in the search. In the check "lengths", pairs of lengths are searched.
    """
    until, found = monotonic() + _SHRINK_S, {}

    def fails(*lengths: int) -> bool:
        if lengths not in found and monotonic() < until:
            found[lengths] = None
            try:
                _run_cases(check, replace(subject, lengths=lengths))
            except DoesNotApply:
                pass
            except Failure as failed:
                found[lengths] = str(failed)
        return found.get(lengths) is not None

    taken = [n for n in range(1, subject.lengths[-1] + 1) if accepts_length(subject.pattern, subject.num_heads, n)]
    if check.name == "lengths":
        pairs = ((shorter, longer) for longer in taken[:_PAIRED_LENGTHS] for shorter in taken if shorter < longer)
        failed = next((pair for pair in pairs if fails(*pair)), None)
        return None if failed is None else found[failed]
    best = next((length for length in subject.lengths if fails(length)), None)
    if best is None:
        return None
    passed = max((length for length in subject.lengths if length < best), default=0)
    while between := [length for length in taken if passed < length < best]:
        middle = between[len(between) // 2]
        passed, best = (passed, middle) if fails(middle) else (middle, best)
    shortest = next((length for length in taken if length < best and fails(length)), best)
    return found[(shortest,)]
