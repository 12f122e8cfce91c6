"""Measure a device's constants for the cost model, by small problems, each dominated by one kind of work."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from statistics import median
from typing import Any, NamedTuple

import torch

from ..engines import side_of
from ..masks.core import Pattern, device_kind, every
from ..masks.orders import Compact, Layout
from ..masks.patterns import causal, dilated, local_window, neighborhood, random_blocks
from ..masks.planning import (
    CPU,
    FORMAT,
    VERSION,
    BlockRates,
    Machine,
    Option,
    Plan,
    builtin_machine,
    compact_terms,
    computed_pairs,
    shared_terms,
)
from ._tune import Inputs, TimedRun, time_in_rounds, trial

KINDS = ("neighbouring", "plain", "masked")  # in the order of the rates in BlockRates
_HEAD_DIM = 64
_LAUNCHES = 50  # in one timed run: the first call after a large problem finds the caches cold


@dataclass(frozen=True)
class Sizes:
    """Sizes of the timed attention problems.

    num_tokens: number of tokens of problems with block lists, and of copies; dense and causal problems have half of it.
    listed_keys: about how many keys a query attends to in the lists of neighbouring and of random blocks.
    """

    num_tokens: int
    num_heads: int
    listed_keys: int


ON_CPU, ON_ACCELERATOR = Sizes(8192, 2, 1024), Sizes(32768, 16, 4096)


@dataclass(frozen=True)
class MeasuredMachine:
    """Measured constants of a device, for the cost model.

    kind: type of the device, such as "cpu" or "cuda".
    date: time of the measurement, ISO 8601 in UTC.
    spread: for each timed problem, by name, its longest measured time divided by its shortest.
    """

    machine: Machine
    kind: str
    date: str
    spread: Mapping[str, float]

    def to_data(self) -> dict[str, Any]:
        """Return a dict for JSON, the content of the file that `masks.set_machine` reads."""
        constants = asdict(self.machine)
        about = {"measured_on": constants.pop("source"), "date": self.date, "spread": dict(self.spread)}
        return {"format": FORMAT, "version": VERSION, "kind": self.kind, "constants": constants} | about


class _Problem(NamedTuple):
    run: TimedRun
    amount: float  # FLOP, bytes or calls


def measure_machine(device: torch.device, *, seconds: float, sizes: Sizes | None = None) -> MeasuredMachine:
    """Measure and return the constants of this device; only `calls_a_list` is not measured, but the built-in value.

    seconds: no round of timed runs begins after this time, except the first three.
    sizes: sizes of the problems; None takes small problems on a CPU, larger ones on an accelerator.
    """
    builtin = builtin_machine(device.type)
    problems = _problems(device, sizes or (ON_CPU if device_kind(device).on_host else ON_ACCELERATOR))
    for problem in problems.values():
        problem.run()  # compiles, and fills caches
    timed = dict(
        zip(
            problems,
            time_in_rounds([each.run for each in problems.values()], seconds=seconds, device=device),
            strict=True,
        )
    )

    def rate(name: str) -> float:
        return problems[name].amount / median(timed[name])

    found = Machine(
        dense_flops_per_s=rate("dense"),
        causal_flops_per_s=rate("causal"),
        blocks=tuple(BlockRates(n, *(rate(f"{kind} blocks of {n}") for kind in KINDS)) for n in builtin.sides),
        bytes_per_s=rate("copies"),
        launch_s=1 / rate("launch"),
        backward_ratio=max(median(timed["dense, forward and backward"]) / median(timed["dense"]) - 1, 0.1),
        calls_a_list=builtin.calls_a_list,
        source=device_text(device),
    )
    spread = {name: round(max(times) / min(times), 3) for name, times in timed.items()}
    return MeasuredMachine(found, device.type, datetime.now(UTC).isoformat(timespec="seconds"), spread)


def device_text(device: torch.device) -> str:
    """Return a text with torch's version, and the name of an accelerator, or its type if torch gives no name.

    For a CPU it has the architecture, capability and number of threads instead.
    """
    if not device_kind(device).on_host:
        named = getattr(getattr(torch, device.type, None), "get_device_name", None)  # torch.mps has none
        return f"{device.type if named is None else named(device)}, torch {torch.__version__}"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()} ({capability}), torch {torch.__version__}, {torch.get_num_threads()} threads"


def _problems(device: torch.device, sizes: Sizes) -> dict[str, _Problem]:
    tokens, few = sizes.num_tokens, sizes.num_tokens // 2
    window = local_window(left=sizes.listed_keys - 1, right=0)
    small = _attention_problem(every(), 16, 1, device).run

    def launch() -> tuple[torch.Tensor, ...]:
        return [small() for _ in range(_LAUNCHES)][-1]

    problems = {
        "dense": _attention_problem(every(), few, sizes.num_heads, device),
        "dense, forward and backward": _attention_problem(every(), few, sizes.num_heads, device, backward=True),
        "causal": _attention_problem(causal(), few, sizes.num_heads, device),
        "copies": _copy_problem(tokens, sizes.num_heads, device),
        "launch": _Problem(launch, _LAUNCHES),
    }
    for block in builtin_machine(device.type).sides:
        count, width = max(1, sizes.listed_keys // block), min(4 * block, tokens // 8)
        # Partial blocks in several parts of each row: windows in a grid whose rows are several blocks wide.
        scattered = neighborhood((tokens // width, width), (3, width // 16))
        listed = (window, random_blocks(tokens, block=block, count=count), scattered)
        for kind, pattern in zip(KINDS, listed, strict=True):
            problems[f"{kind} blocks of {block}"] = _attention_problem(
                pattern, tokens, sizes.num_heads, device, block=block
            )
    return problems


def _attention_problem(
    pattern: Pattern, tokens: int, heads: int, device: torch.device, *, block: int = 128, backward: bool = False
) -> _Problem:
    """Make a problem to time: attention with this pattern, of batch 1, in natural order of the tokens.

    Its amount is the forward's FLOP as the cost model counts them, also with `backward`.

    block: number of queries, and of keys, of a block.
    """
    kind, order = device_kind(device), Layout(tokens)
    bound = pattern.bind(num_heads=heads, num_queries=tokens, num_keys=tokens)
    (term,) = shared_terms(pattern, 1, bound, 1)
    term = replace(term, block_side=block)
    x = Inputs.of(bound, num_kv_heads=heads, head_dim=_HEAD_DIM, dtype=kind.dtype, device=device)
    option = Option(
        branch=pattern, multiplicity=1, layout="natural", terms=(term,), machine=CPU, given=order, operands=x.operands
    )
    alone = Plan.of(bound, order, ((option,),))
    run = trial(alone, x, engine=kind.engine, backward=backward, block_size=(block, block))
    return _Problem(run, 4.0 * _HEAD_DIM * computed_pairs(term))


def _copy_problem(tokens: int, num_heads: int, device: torch.device) -> _Problem:
    """Make a problem to time: gather q, k and v of every fourth token, and merge rows, as a dilated branch does.

    Its amount is the number of bytes that are moved.
    """
    bound = dilated(tokens, 4).bind(num_heads=num_heads, num_queries=tokens, num_keys=tokens)
    terms = compact_terms(dilated(tokens, 4), 1, bound) or []
    sides = [side_of(term.q, Layout(tokens), term.heads) for term in terms if isinstance(term.q, Compact)]
    dtype = device_kind(device).dtype
    q, k, v = torch.zeros(3, 1, num_heads, tokens, _HEAD_DIM, dtype=dtype, device=device)
    out, lse = torch.zeros(q.shape, device=device), torch.zeros(q.shape[:-1], device=device)

    def run() -> tuple[torch.Tensor, ...]:
        for each in sides:
            parts = [each.take(one) for one in (q, k, v)]
            each.merge(out, lse, parts[0], each.take(lse))
        return (out,)

    slots = sum(term.q.num_slots * term.folds * len(term.heads) for term in terms)
    return _Problem(run, (4 * 2 + 3) * slots * _HEAD_DIM * q.element_size())
