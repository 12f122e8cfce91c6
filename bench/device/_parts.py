"""The parts of a LongNet forward beside attention itself: gathers into the branches' order, and the merge."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from flexdilated.engines._call_key import CallKey
from flexdilated.engines._pick import join, take
from flexdilated.engines.flex._flex import FlexProgram, make_flex_program
from flexdilated.engines.flex._flex_program import allowed_on
from flexdilated.masks.planning._planner import plan

from .._longnets import LongNet
from .._problem import Problem, Size
from .._result import Timing
from .._timing import Job
from ._compare import Comparison, Contestant, compare
from ._ways import ways
from ._where import Where

_COPIED_BYTES = {True: 2 << 30, False: 1 << 24}  # on CUDA well beyond its caches


@dataclass(frozen=True)
class Parts:
    """Seconds of a whole forward, of its gathers, its merges and a copy, with the bytes that these read and write."""

    way: str
    found: Comparison
    gathers: Timing
    merges: Timing
    copy: Timing
    gathered_bytes: int
    copied_bytes: int

    @property
    def whole_s(self) -> float:
        return self.found.median_s(self.way)

    @property
    def copy_rate(self) -> float:
        """Bytes read and written a second."""
        return self.copied_bytes / self.copy.median_s


def measure_parts(spec: LongNet, size: Size, where: Where) -> Parts | str:
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
    if reason := found.missing(way.name, *(job.name for job in jobs)):
        return reason
    gathers, merges, copy = (found.timings[job.name] for job in jobs)
    return Parts(way.name, found, gathers, merges, copy, 2 * gathered, 2 * source.nbytes)


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
