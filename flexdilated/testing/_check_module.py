"""check_attention_module: check any attention module against the pattern that it claims to compute."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, Literal

import torch
from tabulate import tabulate

from ..masks import Mixture, Pattern
from ..masks.core import advises, require_expression, require_int, shortened
from ..masks.patterns import names
from ._closeness import AS_IF, expected, likely_mistake
from ._inputs import LONG_LENGTHS, lengths_for, takes
from ._leak_checks import check_batch, check_causality, check_isolation, check_packing, check_padding
from ._module import Calls, DoesNotApply, Failure, Subject
from ._problem import tokens
from ._ranks_check import check_ranks
from ._use_checks import (
    check_compile,
    check_decoding,
    check_determinism,
    check_lengths,
    check_recompilation,
    check_state_dict,
)
from ._value_checks import check_agreement, check_coverage, check_empty_rows, check_gradients, check_half_precision

Verdict = Literal["passed", "failed", "does not apply", "skipped"]
_WIDTH = 88  # the table has 120 columns
_ERROR_LINES = 8
_DETAIL_LINES = (10, 3, 3, 3)  # number of lines of the first failures, below the table
_LONGEST_LINE = 240


@dataclass(frozen=True)
class CheckResult:
    """Result of one check: name, verdict, and detail: the tested cases or, after a failure, the smallest failing case.

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
    """Results of all checks of one module, in the order of execution.

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
        table = [
            (result.name, result.verdict.upper() if result.verdict == "failed" else result.verdict, _first(result))
            for result in self.results
        ]
        claim = shortened(self.pattern, _LONGEST_LINE)
        head = f"{self.module}, claimed to be {claim}, {self.sizes}: {verdict}\n{self.lengths}"
        parts = [head, tabulate(table, headers=("check", "verdict", "detail"), maxcolwidths=[None, None, _WIDTH])]
        long = [result for result in self.failures if "\n" in result.detail]
        shown = zip(long, _DETAIL_LINES, strict=False)
        parts += [f"{result.name}: {_cut(result.detail, most)}" for result, most in shown]
        return "\n\n".join(parts)


def _first(result: CheckResult) -> str:
    """First line of the detail; `ModuleReport` prints further lines below the table."""
    return textwrap.shorten(result.detail.partition("\n")[0], 2 * _WIDTH)


def _cut(text: str, most_lines: int) -> str:
    """At most `most_lines` shortened lines, then the number of omitted lines."""
    lines = text.splitlines()
    more = [f"... and {len(lines) - most_lines} more lines"] if len(lines) > most_lines else []
    return "\n".join([*(shortened(line, _LONGEST_LINE) for line in lines[:most_lines]), *more])


MODULE_CHECKS: dict[str, Callable[[Subject], str]] = {
    "agreement": check_agreement,
    "coverage": check_coverage,
    "causality": check_causality,
    "isolation": check_isolation,
    "empty rows": check_empty_rows,
    "lengths": check_lengths,
    "batch": check_batch,
    "determinism": check_determinism,
    "gradients": check_gradients,
    "half precision": check_half_precision,
    "padding": check_padding,
    "packing": check_packing,
    "decoding": check_decoding,
    "state dict": check_state_dict,
    "compile": check_compile,
    "recompilation": check_recompilation,
    "ranks": check_ranks,
}


# Slow checks, each at one or few lengths, given in its detail.
_ON_SOME_LENGTHS = ("compile", "recompilation", "ranks", "state dict")
_AT_LONG_LENGTHS = ("agreement", "half precision")  # half precision also checks gradients
_MAX_TOKENS = 40
_SHRINK_S = 5.0  # for one check; a running call of the module is not interrupted
_PAIRED = 12

_CALLED_SO = (
    "; called with q, k and v of (batch, heads, tokens, head dim): a module of (batch, tokens, width) takes "
    "calls=testing.Calls(layout='BNE'), and identity_projections for its projections"
)


@advises()
def check_attention_module(factory: Callable[[], Any], pattern: Pattern | Mixture, **options: Any) -> ModuleReport:
    """Like `examine_attention_module`, but raises AssertionError with the report if a check fails.

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
    """Check an attention module, of this library or any other, against the attention that it claims; return a report.

    factory: returns a module, called as `calls` defines: by default with q (B, H, N, D), k and v (B, G, N, D).
    pattern: the pairs of its attention. Scores are scaled by 1 / sqrt(D), and query head h reads key/value head
        h // (H / G).
    num_heads, num_kv_heads, head_dim: H, G (None: H) and D of the tensors.
    max_tokens, examples: the module is called at up to `examples` lengths of up to `max_tokens` tokens: small ones,
        lengths around multiples of the pattern's numbers, 64, 65, 128, 129 and so on. max_tokens=None: up to 40 tokens,
        and for agreement and half precision also a few lengths up to 257, listed in the report.
    lengths: use these lengths instead.
    checks: names of the checks to run, None for all `MODULE_CHECKS`. skip: names of checks to omit.

    Each check runs the lengths in ascending order and reports the shortest failing one; unless `lengths` is given, it
    searches for a shorter failing length for up to 5 seconds. A check whose call of the module raises fails. The
    definition is dense, in float64, with the error budgets of `assert_attention_close`.

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
        raise TypeError(f"dtype must be one of floating point numbers; got {dtype!r:.80}")
    groups = require_int("num_kv_heads", num_heads if num_kv_heads is None else num_kv_heads, minimum=1)
    if num_heads % groups:
        raise ValueError(f"num_kv_heads must divide num_heads; got {num_kv_heads=} and {num_heads=}")
    pattern.check_heads(num_heads)
    if needed := names(pattern):
        raise ValueError(
            "the checks draw lengths of their own, to which a run-time tensor does not fit: give the pattern without "
            f"it, and Calls.packed or Calls.padded; got one with {', '.join(map(repr, needed))}"
        )
    chosen = _chosen(checks, skip)
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
    longer = replace(subject, lengths=(*tried, *(length for length in long if takes(pattern, num_heads, length))))
    subjects = {name: longer if name in _AT_LONG_LENGTHS else subject for name in chosen}
    results = tuple(_result(name, each, shrink=lengths is None) for name, each in subjects.items())
    sizes = f"H={num_heads}, G={groups}, D={head_dim}, N up to {tried[-1]}, {str(dtype).removeprefix('torch.')}"
    return ModuleReport(_name(subject), repr(pattern), sizes, _lengths_text(subjects, tried), results)


def _lengths_text(subjects: Mapping[str, Subject], tried: tuple[int, ...]) -> str:
    """Text of the lengths for all checks, and of additional lengths for some."""
    names = [name for name, subject in subjects.items() if subject.lengths != tried]
    text = f"lengths drawn: {', '.join(map(str, tried))}"
    if names:
        text += f"; in {', '.join(names)} also {', '.join(map(str, subjects[names[0]].lengths[len(tried) :]))}"
    return textwrap.fill(text, _WIDTH + 32)


def _chosen(checks: Sequence[str] | None, skip: Sequence[str]) -> list[str]:
    for given, listed in (("checks", checks or ()), ("skip", skip)):
        if isinstance(listed, str):
            raise TypeError(
                f"{given} must be a sequence of names; got the string {listed!r}: write {given}=[{listed!r}]"
            )
        unknown = [name for name in listed if name not in MODULE_CHECKS]
        if unknown:
            raise ValueError(f"{given} must be of {', '.join(map(repr, MODULE_CHECKS))}; got {unknown[0]!r}")
    return [name for name in MODULE_CHECKS if (checks is None or name in checks) and name not in skip]


def _name(subject: Subject) -> str:
    module = subject.module()
    return getattr(module, "__name__", type(module).__name__)


def _result(name: str, subject: Subject, *, shrink: bool) -> CheckResult:
    try:
        return CheckResult(name, "passed", _run(name, subject))
    except DoesNotApply as reason:
        return CheckResult(name, "does not apply", str(reason))
    except Failure as failure:
        detail = (_smaller(name, subject) if shrink else None) or str(failure)
        return CheckResult(name, "failed", _with_mistake(detail, subject) if name == "agreement" else detail)


def _run(name: str, subject: Subject) -> str:
    try:
        return MODULE_CHECKS[name](subject)
    except (DoesNotApply, Failure):
        raise
    except Exception as error:  # any error of the module fails the check
        raise Failure(
            f"{_at(name, subject.lengths)}raises {type(error).__name__}: {_cut(str(error), _ERROR_LINES)}"
        ) from error


def _at(name: str, lengths: tuple[int, ...]) -> str:
    """Prefix with the lengths, for checks that run at all lengths."""
    if len(lengths) == 1 and name not in _ON_SOME_LENGTHS:
        return f"{tokens(lengths[0])}: "
    return f"{lengths[0]} and {tokens(lengths[1])}: " if name == "lengths" and len(lengths) == 2 else ""


def _with_mistake(detail: str, subject: Subject) -> str:
    """Detail with the likely mistake, found at the longest length, where mistakes are easiest to distinguish."""
    length = subject.lengths[-1]
    q, k, v = subject.inputs(length)
    problem = subject.problem(q, k, v)
    truth, rows = expected(problem, gradients=False, through_lse=False)["out"], (problem.times() > 0).any(-1)
    try:
        likely = likely_mistake(problem, subject.run(subject.module(), q, k, v)[0], truth, rows=rows)
    except Exception:  # the detail already reports an error of the module
        always = detail.startswith(f"{tokens(subject.lengths[0])}: raises")
        return f"{detail}{_CALLED_SO}" if always and subject.calls.layout == "BHND" else detail
    return f"{detail.partition(AS_IF)[0]}{AS_IF}{likely}, at {tokens(length)}" if likely else detail


def _smaller(name: str, subject: Subject) -> str | None:
    """Detail of the shortest failing length (or pair of lengths) found within _SHRINK_S, or None."""
    if name in _ON_SOME_LENGTHS:
        return None
    until, found = monotonic() + _SHRINK_S, {}

    def fails(*lengths: int) -> bool:
        if lengths not in found and monotonic() < until:
            found[lengths] = _detail(name, replace(subject, lengths=lengths))
        return found.get(lengths) is not None

    taken = [n for n in range(1, subject.lengths[-1] + 1) if takes(subject.pattern, subject.num_heads, n)]
    if name == "lengths":
        pairs = ((shorter, longer) for longer in taken[:_PAIRED] for shorter in taken if shorter < longer)
        return found[pair] if (pair := next((pair for pair in pairs if fails(*pair)), None)) else None
    best = next((length for length in subject.lengths if fails(length)), None)
    if best is None:
        return None
    passed = max((length for length in subject.lengths if length < best), default=0)
    while between := [length for length in taken if passed < length < best]:
        middle = between[len(between) // 2]
        passed, best = (passed, middle) if fails(middle) else (middle, best)
    return found[next((length for length in taken if length < best and fails(length)), best),]


def _detail(name: str, subject: Subject) -> str | None:
    """Detail of the failure; None if the check passes or does not apply."""
    try:
        _run(name, subject)
    except DoesNotApply:
        return None
    except Failure as failure:
        return str(failure)
    return None
