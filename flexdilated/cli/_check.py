"""`check`: is a pattern what it says it is, and does attend compute it?"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from ..masks import Mixture, Pattern
from ..masks.patterns.run_time._run_time import names
from ..testing import check_pattern
from ..testing._attend_trials import attend_trials, run_trial
from ..testing._inputs import takes
from ..testing._problem import tokens
from ._one_thread import one_thread
from ._progress import progress
from ._usage import UsageError

_AT_ONCE = 25  # examples of the rule's check between two steps of the bar


def check(
    pattern: Pattern | Mixture, *, examples: int, num_heads: int, max_tokens: int, seed: int, as_json: bool
) -> int:
    """Exit status 0, or 1 with the counterexample printed."""
    longest = _longest(pattern, num_heads, max_tokens)
    sizes = {"num_heads": num_heads, "max_tokens": longest}
    found: str | None = None
    done = 0
    try:
        with one_thread(), progress("checking", unit="example", done=0, total=2 * examples, lines=sys.stderr) as bar:
            for step, note in _steps(pattern, examples=examples, seed=seed, **sizes):
                done += step
                bar.step(done, 2 * examples, note)
    except AssertionError as error:
        found = str(error)
    except ValueError as error:  # heads, tokens or run-time tensors that do not go with the pattern
        raise UsageError(str(error)) from None
    if as_json:
        print(json.dumps({"pattern": repr(pattern), **sizes, "seed": seed, "examples": done, "counterexample": found}))
    elif found is None:
        print(f"{pattern!r}: no counterexample in {examples} boxes a kind and {examples} calls of attend")
        heads = "1 head" if num_heads == 1 else f"{num_heads} heads"
        most = tokens(longest) if longest == max_tokens else f"{tokens(longest)}, as it takes no more"
        print(f"(up to {most}, {heads}; output, lse and gradients against float64)")
    else:
        print(f"counterexample, after {done} examples:\n{found}")
    return 0 if found is None else 1


def _longest(pattern: Pattern | Mixture, num_heads: int, max_tokens: int) -> int:
    """The most tokens, up to `max_tokens`, that the pattern takes: a grid has room for so many, a table needs so many.

    Raises UsageError where it takes none.
    """
    if names(pattern):  # which check_pattern refuses
        return max_tokens
    for number in range(max_tokens, 0, -1):
        if takes(pattern, num_heads, number):
            return number
    try:
        pattern.check_heads(num_heads)
        pattern.bind(num_heads=num_heads, num_queries=max_tokens, num_keys=max_tokens)
    except ValueError as error:
        raise UsageError(f"the pattern must take these --heads, and up to --max-tokens; {error}") from None
    return max_tokens


def _steps(
    pattern: Pattern | Mixture, *, examples: int, num_heads: int, max_tokens: int, seed: int
) -> Iterator[tuple[int, str]]:
    """(examples that were good, what they were of)."""
    sizes = {"num_heads": num_heads, "max_tokens": max_tokens}
    for first in range(0, examples, _AT_ONCE):
        number = min(_AT_ONCE, examples - first)
        check_pattern(pattern, **sizes, examples=number, seed=seed + first)
        yield number, "the rule"
    for trial in attend_trials(pattern, **sizes, examples=examples, seed=seed):
        run_trial(pattern, trial)
        yield 1, "attend"
