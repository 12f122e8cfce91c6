"""Measuring the ways to compute a pattern: each one's predicted and measured time, and which is the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..engines import allowed_on
from ..masks.core import Bound
from ..masks.orders import Layout
from ..masks.planning import (
    ANYTHING,
    Allowed,
    Candidates,
    Choice,
    Option,
    Plan,
    cost_of,
    in_other_blocks,
    machine_of,
    way_of,
)
from ._tune_trial import Inputs, Run, Times, check_alike, interleave, trial

BRANCH_BY_BRANCH = "branch by branch"
WORTH_MEASURING = 4.0  # times the cheapest prediction


@dataclass(frozen=True)
class Trialled:
    """One option with what was predicted of it and what it took. `branch` counts from 0; None: all branches."""

    branch: int | None
    option: Option
    predicted_s: float
    times: Times

    @property
    def name(self) -> str:
        """The layout, with the side of its blocks where that is not 128."""
        sides = sorted(set(way_of(self.option)[1]))
        return self.option.layout + (f", blocks of {'/'.join(map(str, sides))}" if sides not in ([], [128]) else "")


@dataclass(frozen=True)
class Trials:
    """All that was measured of a pattern, and the ways that won."""

    all: tuple[Trialled, ...]
    choice: Choice

    def won(self, each: Trialled) -> bool:
        """Whether this is a way that was chosen; where branches are computed together, theirs are none."""
        if each.branch is None:
            return self.choice.together == (each.option.layout != BRANCH_BY_BRANCH)
        return not self.choice.together and way_of(each.option) == self.choice.ways[each.branch]


def measure_options(
    bound: Bound,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    num_kv_heads: int,
    backward: bool,
) -> list[tuple[str, float, float]]:
    """(option, predicted seconds, measured seconds) of each way to compute a pattern that may be the fastest.

    Forward, or with `backward` forward and backward, of one batch entry. For a mixture an option's name says
    which branch it computes.
    """
    x = Inputs.of(bound, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, device=torch.device(device))
    found = measure(bound, x, backward=backward)
    many = len(bound.pattern.branches()) > 1
    return [(_label(each, many), each.predicted_s, each.times.median_s) for each in found.all]


def measure(
    bound: Bound,
    x: Inputs,
    *,
    backward: bool,
    engine: str | None = None,
    block_size: tuple[int, ...] = (),
    seconds: float = 1.0,
) -> Trials:
    """Run the options that are predicted within 4 times of the cheapest, branch by branch, and then together.

    `seconds` is how long the rounds of each branch may take beyond the first three. With a `block_size` no other
    is tried. Raises RuntimeError where two options differ in their results.
    """
    device = x.q.device
    engine = engine or ("tiles" if device.type == "cpu" else "flex")
    stand = _Stand(bound, x, backward, engine, block_size, seconds)
    candidates = Candidates.of(bound, machine_of(device.type), allowed_by(engine, device))
    branches = [stand.time(index, stand.worth_measuring(ways)) for index, ways in enumerate(candidates.branches)]
    fastest = [min(measured, key=lambda each: each.times.median_s).option for measured in branches]
    found = tuple(each for measured in branches for each in measured)
    choice = Choice(False, tuple(way_of(option) for option in fastest))
    if candidates.together is None:
        return Trials(found, choice)
    terms = tuple(term for option in fastest for term in option.terms)
    apart, together = stand.time(
        None, [replace(candidates.together, layout=BRANCH_BY_BRANCH, terms=terms), candidates.together]
    )
    if together.times.median_s < apart.times.median_s:
        choice = Choice(True, (way_of(candidates.together),))
    return Trials((*found, apart, together), choice)


@dataclass(frozen=True)
class _Stand:
    """Where options of one pattern are run side by side."""

    bound: Bound
    x: Inputs
    backward: bool
    engine: str
    block_size: tuple[int, ...]
    seconds: float

    def time(self, branch: int | None, options: Sequence[Option]) -> list[Trialled]:
        """Each option's times, after a look at whether they agree."""
        runs = [self._run(option) for option in options]
        check_alike(runs, self.x.q.dtype)
        times = interleave(runs, seconds=self.seconds, device=self.x.q.device)
        predicted = [predicted_seconds(option, self.x, backward=self.backward) for option in options]
        return [Trialled(branch, *each) for each in zip(options, predicted, times, strict=True)]

    def worth_measuring(self, options: tuple[Option, ...]) -> list[Option]:
        """The options that may be the fastest, in blocks of all sides that may be."""
        other_sides = self.engine == "tiles" and not self.block_size
        every = [each for option in options for each in (in_other_blocks(option) if other_sides else (option,))]
        least = min(each.cost.seconds for each in every)
        return [each for each in every if each.cost.seconds <= WORTH_MEASURING * least]

    def _run(self, option: Option) -> Run:
        alone = Plan(self.bound, Layout(self.bound.num_queries), option.terms, ((option,),))
        return trial(alone, self.x, engine=self.engine, backward=self.backward, block_size=self.block_size)


def allowed_by(engine: str, device: torch.device) -> Allowed:
    """What terms an engine runs on a device."""
    return ANYTHING if engine == "tiles" else allowed_on(device)


def predicted_seconds(option: Option, x: Inputs, *, backward: bool) -> float:
    """The cost model's time for tensors like these."""
    sizes = {"head_dim": x.q.shape[-1], "element_bytes": x.q.element_size()}
    forward = cost_of(option.terms, option.machine, option.given, **sizes).seconds * len(x.q)
    return forward * (1 + option.machine.backward_ratio) if backward else forward


def _label(each: Trialled, many: bool) -> str:
    return f"branch {each.branch + 1}: {each.name}" if many and each.branch is not None else each.name
