"""check_attention_module: point it at any attention module, and say what it claims to compute."""

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
_DETAIL_LINES = (10, 3, 3, 3)  # of the first failures, below the table
_LONGEST_LINE = 240


@dataclass(frozen=True)
class CheckResult:
    """One check: its name, its verdict, and what was tried or, where it failed, the smallest case that fails.

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
    """All checks of one module, in the order in which they ran.

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
        """Whether no check failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """The checks that failed."""
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
    """The first line; the others stand below the table."""
    return textwrap.shorten(result.detail.partition("\n")[0], 2 * _WIDTH)


def _cut(text: str, most_lines: int) -> str:
    """At most so many lines, none of them long; the number of those left out follows."""
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


# Slow checks, each at one or few of the lengths, which its detail names.
_ON_SOME_LENGTHS = ("compile", "recompilation", "ranks", "state dict")
_AT_LONG_LENGTHS = ("agreement", "half precision")  # of which the second has gradients, too
_MAX_TOKENS = 40
_SHRINK_S = 5.0  # for one check; a call of the module that has begun ends
_PAIRED = 12

_CALLED_SO = (
    "; called with q, k and v of (batch, heads, tokens, head dim): a module of (batch, tokens, width) takes "
    "calls=testing.Calls(layout='BNE'), and identity_projections for its projections"
)


@advises()
def check_attention_module(factory: Callable[[], Any], pattern: Pattern | Mixture, **options: Any) -> ModuleReport:
    """As `examine_attention_module`, but raises AssertionError, with the report, if a check fails.

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
    """Hold an attention module, of this library or of any other, to what it claims to compute; says what was found.

    factory: makes a module, something to call as `calls` says: by default with q (B, H, N, D), k and v (B, G, N, D).
    pattern: which pairs its attention is over. Scores are scaled by 1 / sqrt(D), and query head h reads key/value head
        h // (H / G).
    num_heads, num_kv_heads, head_dim: H, G (None: H) and D of the tensors it gets.
    max_tokens, examples: it is called at no more than so many lengths up to so many tokens: small ones, those
        around multiples of the pattern's own numbers, 64, 65, 128, 129 and so on. max_tokens=None: up to 40 tokens, and
        in agreement and half precision at a few up to 257, which the report names. lengths: these lengths instead.
    checks: the names of those to run, None for all (`MODULE_CHECKS`); skip: of those to leave out.

    Each check takes the lengths in rising order, so what it reports is the shortest case that fails among them, and
    where lengths are not given, the shortest that is found in 5 seconds. A module that raises fails the check that
    called it. The definition is dense and in float64; budgets are those of `assert_attention_close`.

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
    """Lengths that were drawn for all checks, and for some of them."""
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
    except Exception as error:  # whatever the module raises is what it does wrong
        raise Failure(
            f"{_at(name, subject.lengths)}raises {type(error).__name__}: {_cut(str(error), _ERROR_LINES)}"
        ) from error


def _at(name: str, lengths: tuple[int, ...]) -> str:
    """The lengths, for the checks that take all of them."""
    if len(lengths) == 1 and name not in _ON_SOME_LENGTHS:
        return f"{tokens(lengths[0])}: "
    return f"{lengths[0]} and {tokens(lengths[1])}: " if name == "lengths" and len(lengths) == 2 else ""


def _with_mistake(detail: str, subject: Subject) -> str:
    """With the mistake named at the longest length, where there are keys enough to tell it from others."""
    length = subject.lengths[-1]
    q, k, v = subject.inputs(length)
    problem = subject.problem(q, k, v)
    truth, rows = expected(problem, gradients=False, through_lse=False)["out"], (problem.times() > 0).any(-1)
    try:
        likely = likely_mistake(problem, subject.run(subject.module(), q, k, v)[0], truth, rows=rows)
    except Exception:  # a module that raises here has said so
        always = detail.startswith(f"{tokens(subject.lengths[0])}: raises")
        return f"{detail}{_CALLED_SO}" if always and subject.calls.layout == "BHND" else detail
    return f"{detail.partition(AS_IF)[0]}{AS_IF}{likely}, at {tokens(length)}" if likely else detail


def _smaller(name: str, subject: Subject) -> str | None:
    """The detail of the shortest case that was found to fail in _SHRINK_S, if one with a length (or two) does."""
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
    """How the check fails; None where it passes, or does not apply."""
    try:
        _run(name, subject)
    except DoesNotApply:
        return None
    except Failure as failure:
        return str(failure)
    return None
