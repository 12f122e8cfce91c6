"""Command `plan`: the plan and memory of a pattern at a size, or the longest sequence within a memory budget."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, get_args

from tabulate import tabulate

from .. import plan as plan_attention
from .._plan_size import DTYPES, PlanSize
from ..distributed.counts import MOST_RANKS, SCHEDULES
from ..distributed.group import ORDERS
from ..distributed.wire import CodecName
from ..masks.core import LARGEST, Expression, bytes_text, tokens_text
from ..memory import LARGEST_RUN, AttentionMemory
from ..nn import ModelMemory, attention_size, model_memory
from ._pattern import MOST_HEADS, add_pattern_arguments, as_usage_errors, asked_from, most_tokens
from ._terminal import CommandParser, UsageError

Peak = Callable[[int], int]

# Memories of accelerators and of small machines.
BUDGETS = tuple(size << 30 for size in (8, 16, 24, 40, 48, 80, 96, 141))
_TABLE = "table"
_LAYERS = 12
# Between two of these, and beyond the last, memory is taken to be linear in the number of tokens.
_RUNGS = tuple(1 << power for power in (10, 12, 14, 16, 18, 20, 22, 24))
_FIRST_TRIED = 1 << 16  # of _RUNGS
_MOST_TOKENS = 1 << 30
# Two numbers of tokens; the memory of more tokens is extrapolated along the line through these.
_LINE_TOKENS = LARGEST_RUN // 2, LARGEST_RUN
# Bytes per token are the increase from the first to the second number of tokens.
_SLOPE_TOKENS = (1 << 16, 1 << 20)


def add_arguments(parser: CommandParser) -> None:
    parser.description = (
        "How a pattern is computed at a size: the terms chosen, the ways weighed, pairs, FLOPs and memory. With "
        "--budget the longest sequence that fits, in inference and in training, with checkpointing and without. With "
        "--ranks the bytes that each of many ranks receives and the pairs that it computes; nothing is started for it."
    )
    add_pattern_arguments(parser, no_size=("budget",))
    add = parser.argument
    add("--kv-heads", type=int, least=1, most=MOST_HEADS, metavar="G", help="key/value heads, a divisor of H (H)")
    head_dim = "(64, or E / H where --embed-dim is given)"
    add("--head-dim", type=int, least=1, most=1 << 16, metavar="D", help=head_dim)
    value_dim = "of values, where it differs (that of keys)"
    add("--value-dim", type=int, least=1, most=1 << 16, metavar="V", help=value_dim)
    add("--dtype", choices=tuple(DTYPES), default="fp32", help="of tensors and weights (%(default)s)")
    device = "cuda is predicted, and needs none (%(default)s)"
    add("--device", choices=("cpu", "cuda"), default="cpu", excludes=("ranks",), help=device)
    add("--batch", type=int, default=1, least=1, most=1 << 16, metavar="B", help="sequences at once (%(default)s)")
    layers, embed_dim = "of the LongNet whose memory is predicted (12)", "of that LongNet (H * D)"
    add("--layers", type=int, least=1, most=LARGEST, metavar="L", excludes=("ranks",), help=layers)
    add("--embed-dim", type=int, least=1, most=LARGEST, metavar="E", excludes=("head_dim",), help=embed_dim)
    dropout = "of attention weights in training (%(default)s)"
    add("--dropout-p", type=float, default=0.0, least=0, metavar="P", excludes=("ranks", "measure"), help=dropout)
    budget = "the longest N that fits into this memory, in GiB; without a number a table of budgets"
    alone = ("measure", "ranks")
    add("--budget", nargs="?", const=_TABLE, metavar="GIB", excludes=alone, help=budget)
    measure = "time the ways to compute it on this machine's CPU, besides"
    add("--measure", action="store_true", excludes=("ranks", "device=cuda"), help=measure)
    add("--json", action="store_true", help="print plain data instead of tables")
    add = partial(add, group=parser.add_argument_group("many ranks"))
    ranks = f"ranks that share the sequence, {MOST_RANKS} at most"
    add("--ranks", type=int, least=1, most=MOST_RANKS, metavar="W", help=ranks)
    order = "which tokens a rank holds (%(default)s)"
    add("--order", choices=ORDERS, default="contiguous", needs=("ranks",), help=order)
    schedule = "how keys and values come to the ranks that need them (%(default)s)"
    add("--schedule", choices=SCHEDULES, default="auto", needs=("ranks",), help=schedule)
    codec = "of keys and values on the wire (none: in their own dtype)"
    add("--codec", choices=get_args(CodecName), needs=("ranks",), help=codec)
    parser.set_defaults(command=plan)


def plan(options: argparse.Namespace) -> int:
    """Run the command `plan`: print the plan, or the longest sequence within a memory budget; return exit status 0.

    Raises UsageError for arguments that are invalid, or that do not fit the pattern or each other.
    """
    asked = asked_from(options)
    heads, head_dim = asked.num_heads, options.head_dim or 64
    if options.embed_dim is not None:
        head_dim = options.embed_dim // heads
        if options.embed_dim % heads:
            raise UsageError(f"--embed-dim must be a multiple of --heads; got {options.embed_dim} and {heads}")
    if options.budget is not None and asked.pattern.varies:
        raise UsageError("--budget needs a pattern of any number of tokens; got one with run-time tensors")
    if asked.num_entries > 1:
        raise UsageError(
            f"plan takes run-time tensors of one batch entry: give --bind a tensor of one; got {asked.num_entries}"
        )
    sizes = {
        "num_heads": heads,
        "num_kv_heads": options.kv_heads or heads,
        "head_dim": head_dim,
        "value_dim": options.value_dim or head_dim,
        "dtype": DTYPES[options.dtype],
        "device": options.device,
        "batch": options.batch,
        "layers": None if options.ranks else options.layers or _LAYERS,
    }
    training = {"dropout_p": options.dropout_p}
    with as_usage_errors():
        if options.budget is not None:
            size = PlanSize(pattern=asked.pattern, num_tokens=asked.num_tokens, **sizes, **training)
            data = budget_data(size, BUDGETS if options.budget == _TABLE else (_budget_bytes(options.budget),))
            text = budget_text(size, data)
        else:
            over_ranks = {name: getattr(options, name) for name in ("ranks", "order", "schedule", "codec")}
            how = {"measure": options.measure, **training, **over_ranks}
            found = plan_attention(asked.pattern, asked.num_tokens, **sizes, **how)
            data, text = found.to_data(), str(found)
    print(json.dumps(data, indent=1, ensure_ascii=False) if options.json else text)
    return 0


def _budget_bytes(text: str) -> int:
    try:
        found = int(float(text) * (1 << 30))
    except (ValueError, OverflowError):  # of nan and inf
        found = 0
    if found < 1:
        raise UsageError(f"--budget takes a number of GiB above 0, such as 24 or 0.5; got {text!r}")
    return found


def budget_data(size: PlanSize, budgets: Sequence[int]) -> dict[str, Any]:
    """Return a dict for JSON: the pattern, the sizes, "bytes_a_token" and "longest".

    "bytes_a_token" has, for each use, such as "attention, inference", the mean growth of the peak per token. "longest"
    has a dict for each budget: "budget_bytes" and, for each use, the result of `longest_sequence`.

    size: its num_tokens is ignored, and its layers must not be None.
    budgets: in bytes.

    Raises ValueError for sizes that the pattern does not accept.
    """
    size.pattern.check_heads(size.num_heads)
    peaks, most = _peaks(size), token_limit(size.pattern)
    between = min(_SLOPE_TOKENS[0], most // 2), min(_SLOPE_TOKENS[1], most)
    return {
        "pattern": repr(size.pattern),
        **{name: getattr(size, name) for name in ("num_heads", "num_kv_heads", "head_dim", "value_dim", "batch")},
        "dtype": size.dtype_name,
        **{name: getattr(size, name) for name in ("device", "dropout_p", "layers", "embed_dim")},
        "bytes_a_token": {name: slope(peak, between) if most > 1 else peak(1) for name, peak in peaks.items()},
        "longest": [
            {
                "budget_bytes": budget,
                **{name: longest_sequence(peak, budget, most=most) for name, peak in peaks.items()},
            }
            for budget in budgets
        ],
    }


def _peaks(size: PlanSize) -> dict[str, Peak]:
    """Return {use: function from tokens to peak bytes} for each use, such as "attention, inference"."""
    has_line = token_limit(size.pattern) >= _LINE_TOKENS[1]

    @cache
    def predicted(num_tokens: int, in_model: bool) -> AttentionMemory:
        call = attention_size(size.model, num_tokens) if in_model else size.attention(num_tokens)
        return size.memory_of(call)

    def attention(num_tokens: int, in_model: bool = False) -> AttentionMemory:
        """Predict the memory of a call of `attend`.

        If the pattern accepts _LINE_TOKENS[1] tokens, the memory for more than _LINE_TOKENS[0] tokens is that of the
        line through the calls of these two numbers of tokens.

        in_model: True for the call in a layer of the model.
        """
        if num_tokens < _LINE_TOKENS[0] or not has_line:
            return predicted(num_tokens, in_model)
        smaller, larger = (predicted(number, in_model) for number in _LINE_TOKENS)
        return smaller.extrapolate(num_tokens, larger, _LINE_TOKENS)

    @cache
    def model(num_tokens: int, checkpoint: bool = False) -> ModelMemory:
        return model_memory(size.model, num_tokens, attention(num_tokens, in_model=True), checkpoint=checkpoint)

    return {
        "attention, inference": lambda tokens: attention(tokens).inference_peak,
        "attention, training": lambda tokens: attention(tokens).training_peak,
        "model, inference": lambda tokens: model(tokens).inference_peak,
        "model, training": lambda tokens: model(tokens).training_peak,
        "model, training, checkpointed": lambda tokens: model(tokens, True).training_peak,
    }


def budget_text(size: PlanSize, data: dict[str, Any]) -> str:
    """Return the data of `budget_data` as text: the pattern and its settings, a table, and a note on its columns.

    The table's first row has bytes per token, each further row the longest sequence for one budget.
    """
    dropout = f", dropout {size.dropout_p:g}" if size.dropout_p else ""
    kind = f"{size.head_dim_text}, {size.dtype_name}, batch {size.batch}, on {size.device}{dropout}"
    headers = ("", "attend:\ninference", "attend:\ntraining", "model:\ninference", "model:\ntraining",
               "model: training,\ncheckpointed")  # fmt: skip
    lines = [("bytes a token", *(bytes_text(each) for each in data["bytes_a_token"].values()))]
    for each in data["longest"]:
        budget, *tokens = each.values()
        lines.append((bytes_text(budget), *(tokens_text(number) if number else "none" for number in tokens)))
    note = (
        f"The longest sequence, in tokens, for each budget. attend: one call, with q, k, v and, in training, all\n"
        f"gradients. model: a LongNet of {data['layers']} layers, embed dim {data['embed_dim']}, without vocabulary, "
        f"with its weights,\nand in training their gradients and AdamW's two moments. K is 1,024, M is 1,048,576."
    )
    table = tabulate(lines, headers, disable_numparse=True, colalign=("left", *["right"] * 5))
    return f"{data['pattern']}\n{size.heads_text}, {kind}\n\n{table}\n\n{note}"


def longest_sequence(peak: Peak, budget: int, *, most: int = _MOST_TOKENS) -> int:
    """Estimate the largest number of tokens, up to `most`, whose peak bytes are within the budget in bytes.

    peak: bytes as a function of tokens. It is evaluated at powers of 4 from 2**10 to 2**24, and at `most` if that is
        below 2**30; between and beyond these numbers it is taken to be linear.

    A result below `most` is rounded by `round_down`; it is 0 if 1,024 tokens (or `most`, if less) exceed the budget.
    """
    rungs = [*(rung for rung in _RUNGS if rung < most), *([most] if most < _MOST_TOKENS else [])]
    place = next((index for index, rung in enumerate(rungs) if rung >= _FIRST_TRIED), len(rungs) - 1)
    while place >= 0 and peak(rungs[place]) > budget:
        place -= 1
    while place + 1 < len(rungs) and peak(rungs[place + 1]) <= budget:
        place += 1
    if place < 0:
        return 0
    if rungs[place] == most:
        return most
    below, above = rungs[place : place + 2] if place + 1 < len(rungs) else rungs[place - 1 : place + 1]
    each = slope(peak, (below, above))
    return round_down(min(rungs[place] + int((budget - peak(rungs[place])) / each), _MOST_TOKENS))


def slope(peak: Peak, tokens: Sequence[int]) -> float:
    """Return the mean increase of the peak bytes per token between two numbers of tokens, (below, above)."""
    below, above = tokens
    return (peak(above) - peak(below)) / (above - below)


def round_down(num_tokens: int) -> int:
    """Return the number rounded down to five significant binary digits."""
    unit = 1 << max(0, num_tokens.bit_length() - 5)
    return num_tokens // unit * unit


def token_limit(pattern: Expression) -> int:
    """Return the largest number of tokens up to 2**30 that the pattern accepts; 2**30 if `most_tokens` is None."""
    return min(most_tokens(pattern) or _MOST_TOKENS, _MOST_TOKENS)
