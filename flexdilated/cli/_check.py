"""Command `check`: test a pattern's methods against its mask_mod, and `attend` with it against dense attention."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

import torch
from torch import Tensor

from .._attend import attend
from ..masks import Mixture, Pattern
from ..masks.patterns import names
from ..testing import Calls, check_attention_module, check_pattern
from ..testing._inputs import accepts_length, length_text
from ._pattern import PATTERN, as_usage_errors, fitting_heads, read_pattern
from ._terminal import CommandParser, UsageError, one_thread, progress

_DEFAULT_HEADS = 4
_MOST_PAIRS = 1 << 22  # over all heads: the tables of all pairs then fill most of a gigabyte
_LARGEST_SEED = 1 << 62  # torch's generators take 64 bits, and the number of the example is added
_BOXES_A_STEP = 25  # examples between two steps of the bar
_HEAD_DIMS = (8, 1, 3, 16)
_LEAST_CALLS = 8  # with one number of key/value heads and one head dim; the last group may have fewer
# Four calls a length: two kinds of values, gradients through output and lse, and queries that begin later.
_CHECKS = ("agreement", "gradients", "decoding")


def add_arguments(parser: CommandParser) -> None:
    parser.description = (
        "Check a pattern against its definition: bounds, period, block lists and JSON against its rule, pair by pair; "
        "and attend's output, lse and gradients on it against dense attention in float64, over drawn sizes. "
        "The exit status is 1 if a counterexample is found; the smallest is printed."
    )
    add = parser.argument
    add("pattern", metavar="PATTERN", help=PATTERN)
    add("--examples", type=int, default=500, least=1, metavar="E", help="to draw, of boxes and of calls (%(default)s)")
    add("--heads", type=int, least=1, metavar="H", help=f"query heads ({_DEFAULT_HEADS}, or per_head's)")
    add("--max-tokens", type=int, default=96, least=1, metavar="N", help="the longest sequence (%(default)s)")
    add("--seed", type=int, default=0, least=-_LARGEST_SEED, most=_LARGEST_SEED, help="of what is drawn (%(default)s)")
    add("--json", action="store_true", help="print plain data")
    parser.set_defaults(command=check)


def check(options: argparse.Namespace) -> int:
    """Run the command `check`: test a pattern, and `attend` with it, and print the result or a counterexample.

    Returns exit status 0, or 1 with a counterexample. Raises UsageError for arguments that are invalid or do not fit
    the pattern.
    """
    pattern, examples = read_pattern(options.pattern), options.examples
    heads = fitting_heads(pattern, _DEFAULT_HEADS) if options.heads is None else options.heads
    pairs = heads * options.max_tokens**2
    if pairs > _MOST_PAIRS:
        raise UsageError(
            f"every pair is evaluated: --heads times --max-tokens squared must be at most {_MOST_PAIRS}; "
            f"got {heads} heads and {options.max_tokens} tokens, which make {pairs}"
        )
    longest = _longest(pattern, heads, options.max_tokens)
    asked = {"num_heads": heads, "max_tokens": longest, "seed": options.seed}
    found: str | None = None
    done = 0
    try:
        with one_thread(), progress("checking", unit="example", total=2 * examples) as move:
            for step, note in _steps(pattern, examples=examples, **asked):
                done += step
                move(done, note)
    except AssertionError as error:
        found = str(error)
    except ValueError as error:  # heads, tokens or run-time tensors that do not go with the pattern
        raise UsageError(str(error)) from None
    if options.json:
        print(json.dumps({"pattern": repr(pattern), **asked, "examples": done, "counterexample": found}))
    elif found is None:
        print(f"{pattern!r}: no counterexample in {examples} boxes a kind and {examples} calls of attend")
        most = length_text(longest) if longest == options.max_tokens else f"{length_text(longest)}, as it takes no more"
        print(f"(up to {most}, {heads} head{'s' if heads > 1 else ''}; output, lse and gradients against float64)")
    else:
        print(f"counterexample, after {done} examples:\n{found}")
    return 0 if found is None else 1


def _longest(pattern: Pattern | Mixture, num_heads: int, max_tokens: int) -> int:
    """Return the largest number of tokens up to `max_tokens` that the pattern accepts.

    Raises UsageError if it accepts none. Returns `max_tokens` for a pattern with run-time tensors, which
    `check_pattern` refuses later.
    """
    if names(pattern):  # which check_pattern refuses
        return max_tokens
    for number in range(max_tokens, 0, -1):
        if accepts_length(pattern, num_heads, number):
            return number
    with as_usage_errors():
        pattern.check_heads(num_heads)
        pattern.bind(num_heads=num_heads, num_queries=max_tokens, num_keys=max_tokens)
    return max_tokens


def _steps(
    pattern: Pattern | Mixture, *, examples: int, num_heads: int, max_tokens: int, seed: int
) -> Iterator[tuple[int, str]]:
    """Run the checks in steps; after each step yield (number of examples in it, "the rule" or "attend").

    The numbers of each kind of step sum to `examples`. A step "the rule" is `check_pattern` with this number of boxes
    of each kind. A step "attend" compares output, lse and gradients in about this number of calls.

    Raises AssertionError with a counterexample, and ValueError for run-time tensors and for heads that do not fit.
    """
    sizes = {"num_heads": num_heads, "max_tokens": max_tokens}
    for first in range(0, examples, _BOXES_A_STEP):
        number = min(_BOXES_A_STEP, examples - first)
        check_pattern(pattern, **sizes, examples=number, seed=seed + first)
        yield number, "the rule"

    def in_one_call(module: object, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attend(q, k, v, pattern, enable_gqa=True, return_lse=True)

    def in_two_calls(module: object, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cut = q.shape[2] // 3
        places = [(0, cut), (cut, q.shape[2])] if cut else [(0, q.shape[2])]
        parts = [attend(q[:, :, a:b], k, v, pattern, enable_gqa=True, q_offset=a) for a, b in places]
        return torch.cat(parts, dim=2)

    groups = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
    shapes = [{"num_kv_heads": group, "head_dim": dim} for dim in _HEAD_DIMS for group in groups]
    each = max(_LEAST_CALLS, -(-examples // len(shapes)))
    for turn, first in enumerate(range(0, examples, each)):
        number = min(each, examples - first)
        calls = Calls(plain=in_one_call, decoded=in_two_calls)
        tried = {"examples": max(2, number // 4), "calls": calls, "checks": _CHECKS}
        shape = shapes[turn % len(shapes)]
        check_attention_module(lambda: attend, pattern, **sizes, **shape, **tried, seed=seed + first)
        yield number, "attend"
