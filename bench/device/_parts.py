"""The parts of a LongNet forward beside attention itself: gathers into the branches' order, and the merge."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from flexdilated.engines._call_key import CallKey
from flexdilated.engines._slots import join, take
from flexdilated.engines.flex._flex import FlexProgram, make_flex_program
from flexdilated.engines.flex._flex_op import allowed_on
from flexdilated.masks.planning._planner import plan

from .._jobs import Job, Problem, Size
from .._measures import Gap, Row, Timing, at_least, at_most
from .._rules import LONGNET_5, Contestant, LongNet
from ._device import FORWARD, LARGE, TINY, TINY_SIZE, Comparison, Where, compare, device_row, ways

_COPIED_BYTES = {True: 2 << 30, False: 1 << 24}  # on CUDA well beyond its caches


@dataclass(frozen=True)
class Parts:
    """A whole forward, its gathers, its merges and a copy, with the bytes that these read and write."""

    way: str
    found: Comparison
    gathered_bytes: int
    copied_bytes: int

    def seconds(self, name: str) -> float:
        return self.found.median_s(name)

    def timings(self, *names: str) -> tuple[Timing, ...]:
        return tuple(self.found.timings[name] for name in (self.way, *names))


def _parts(spec: LongNet, size: Size, where: Where) -> Parts | str:
    """The default way's forward and, by themselves, the same steps without attention; or why there is none."""
    way, problem = ways(where)[0], where.draw(size)
    program = _program(spec, size, where.device)
    gathered = _gather(program, problem)
    source = torch.randint(256, (_COPIED_BYTES[where.is_cuda] // 2,), dtype=torch.uint8, device=where.device)
    target = torch.empty_like(source)
    jobs = [
        Job("gathers", lambda _: _gather(program, problem)),
        _merge_job(program, problem),
        Job("copy", lambda _: target.copy_(source)),
    ]
    ours = Contestant(way.name, way.attention(spec.pattern()), problem, spec)
    found = compare([ours], where, part="forward", repeats=size.repeats, extra=jobs)
    reason = found.missing(way.name, *(job.name for job in jobs))
    return reason or Parts(way.name, found, 2 * gathered, 2 * source.nbytes)


@lru_cache(maxsize=1)
def _program(spec: LongNet, size: Size, device: str) -> FlexProgram:
    """What an accelerator runs, also in a dry run."""
    heads, tokens = size.num_heads, size.num_tokens
    key = CallKey(spec.pattern().text, heads, heads, tokens, tokens, 0, 0, 0, heads, 1, ())
    best = plan(key.bound(), device=device, layout=key.layout, allowed=allowed_on(torch.device("cuda")))
    options = {"num_kv_heads": heads, "block_size": key.flex_sides}
    return make_flex_program(best, key.layout, device=torch.device(device), **options)


def _gather(program: FlexProgram, problem: Problem) -> int:
    """Pick every step's operands; the bytes of those that are copies."""
    nbytes = 0
    with torch.no_grad():
        for step in program.steps:
            for x, pick in ((problem.q, step.queries), (problem.k, step.keys), (problem.v, step.keys)):
                taken = take(x, pick, None)
                is_view = taken.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
                nbytes += 0 if is_view else taken.nbytes
    return nbytes


def _merge_job(program: FlexProgram, problem: Problem) -> Job:
    """Join the parts, as attention would hand them over."""
    q, picks = problem.q, [step.queries for step in program.steps]
    shapes = [take(q, pick, None).shape for pick in picks]
    parts = [torch.randn(shape, dtype=q.dtype, device=q.device) for shape in shapes]
    lses = [torch.randn(shape[:-1], device=q.device) for shape in shapes]

    def merge(_: None) -> Tensor:
        with torch.no_grad():
            out, _lse = join(picks, parts, lses, (q.shape[0], q.shape[1], q.shape[2]))
        return out.to(q.dtype)

    return Job("merges", merge)


@device_row(
    "G5", at_most(8, "%"), at_least(80, "%"), full={"specs": (LONGNET_5,), "size": LARGE},
    small={"specs": (TINY,), "size": TINY_SIZE}, needs=FORWARD, limit_s=45,
)  # fmt: skip
def gpu_gathers(where: Where, specs: tuple[LongNet, ...], size: Size) -> Iterator[Row | Gap]:
    """What share of a LongNet forward are its gathers, and do they run at the rate of a copy?

    Gathers by themselves over the whole forward; their bytes a second over a copy's.
    """
    for spec in specs:
        name = f"{spec.label}, {size}, forward"
        share = f"{name}: gathers' share of the time", at_most(8, "%")
        rate = f"{name}: gathers' share of copy bandwidth", at_least(80, "%")
        parts = _parts(spec, size, where)
        if isinstance(parts, str) or not parts.gathered_bytes:
            reason = parts if isinstance(parts, str) else "nothing is gathered"
            yield Gap(*share, reason)
            yield Gap(*rate, reason)
            continue
        gathers_s, found = parts.seconds("gathers"), parts.found
        speed, copy = parts.gathered_bytes / gathers_s, parts.copied_bytes / parts.seconds("copy")
        detail = {"gathered_bytes": parts.gathered_bytes, "gather_gb_per_s": speed / 1e9, "copy_gb_per_s": copy / 1e9}
        detail |= {"way": parts.way, "first_call_s": found.first_call_s}
        timings = parts.timings("gathers", "copy")
        yield Row(*share, 100 * gathers_s / parts.seconds(parts.way), timings, detail, found.objections)
        yield Row(*rate, 100 * speed / copy, timings, detail, found.objections)


@device_row(
    "G8", at_most(5, "%"), full={"specs": (LONGNET_5,), "size": LARGE},
    small={"specs": (TINY,), "size": TINY_SIZE}, needs=FORWARD, limit_s=45,
)  # fmt: skip
def gpu_merge(where: Where, specs: tuple[LongNet, ...], size: Size) -> Iterator[Row | Gap]:
    """What share of a LongNet forward is the merge of its branches?"""
    for spec in specs:
        what, target = f"{spec.label}, {size}, forward: merge's share of the time", at_most(5, "%")
        parts = _parts(spec, size, where)
        if isinstance(parts, str):
            yield Gap(what, target, parts)
            continue
        share = 100 * parts.seconds("merges") / parts.seconds(parts.way)
        detail = {"way": parts.way, "first_call_s": parts.found.first_call_s}
        yield Row(what, target, share, parts.timings("merges"), detail, parts.found.objections)
