"""The device: where tensors lie, its clock, the ways to compute there, contestants side by side, and rows of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import flexdilated as fd
from flexdilated import masks
from flexdilated.cli._flash import is_flash_backend_importable
from flexdilated.engines._call_key import CallKey
from flexdilated.engines.flex._flex import run_flex
from flexdilated.engines.flex._flex_op import static_program

from .._jobs import Attention, Job, Problem, Size, interleave, say, train
from .._measures import Answer, Measure, Row, Target, Timing
from .._rules import LONGNET_5, Contestant, LongNet, Part
from ..peers import dense_attention

Expression = masks.Pattern | masks.Mixture

_NO_FLASH = "flash_attn.cute (FlashAttention 4) is not importable"
# How many times the second-level cache is overwritten before each run: about a millisecond of work, in which Python
# issues the first kernels of the run, so that the device does not wait for them while the clock runs.
_FLUSHED = 16


@dataclass(frozen=True)
class Where:
    """A device by its name. The dry run takes the CPU, and stand-ins for what it does not have.

    `rehearsing`: to compile what will be measured, among others that do the same; nothing is checked or timed in
    earnest.
    """

    device: str
    rehearsing: bool = False

    @property
    def is_cuda(self) -> bool:
        return torch.device(self.device).type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16 everywhere: the dry run runs the same code."""
        return torch.bfloat16

    @property
    def tolerance(self) -> float:
        """Relative error of output and gradients that bfloat16 operands explain: some 4e-3, and a margin."""
        return 2e-2

    def draw(self, size: Size, *, seed: int = 0) -> Problem:
        """Random tensors on the device."""
        return Problem.draw(size, seed=seed, device=self.device, dtype=self.dtype)

    def wait(self) -> None:
        """Until the device has done all it was given."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object]) -> float:
        """By the wall clock, from the call until the device is done."""
        self.wait()
        start = perf_counter()
        work()
        self.wait()
        return perf_counter() - start

    def tidy(self) -> None:
        """Give freed memory back, so that one job's leftovers are not another's shortage."""
        if self.is_cuda:
            torch.cuda.empty_cache()

    def time(self, jobs: Sequence[Job], *, repeats: int) -> tuple[Timing, ...]:
        """The jobs in turns, each from a cold cache; on CUDA by the device's own events."""
        timed = [_ByEvents(job) for job in jobs] if self.is_cuda else jobs
        return interleave(timed, repeats=repeats)


@dataclass(frozen=True)
class _ByEvents:
    """A job timed between two events, with nothing of an earlier run in the second-level cache."""

    job: Job

    @property
    def name(self) -> str:
        return self.job.name

    def seconds(self) -> float:
        given = self.job.prepare() if self.job.prepare else None
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush = _flush_buffer(torch.cuda.current_device())
        for _ in range(_FLUSHED):
            flush.zero_()
        start.record()
        self.job.run(given)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3


@lru_cache(maxsize=1)
def _flush_buffer(device: int) -> Tensor:
    # Twice the cache, and never so little that it is no work.
    size = max(2 * torch.cuda.get_device_properties(device).L2_cache_size, 256 << 20)
    return torch.empty(size, dtype=torch.int8, device=f"cuda:{device}")


@dataclass(frozen=True)
class Way:
    """An engine of the library and, for `flex`, the kernels behind FlexAttention; why not, if it cannot run here."""

    name: str
    engine: str | None
    backend: str | None = None
    missing: str | None = None

    def attention(self, pattern: Expression) -> Attention:
        """(q, k, v) -> out."""
        if self.backend is None:
            return lambda q, k, v: fd.attend(q, k, v, pattern, engine=self.engine)
        return lambda q, k, v: attend_on(self.backend, q, k, v, pattern)[0]


def ways(where: Where) -> tuple[Way, ...]:
    """Every way to train, the default first."""
    if not where.is_cuda:
        return (Way("tiles on CPU", "tiles"),)
    flash = Way("FLASH", "flex", "FLASH", None if is_flash_backend_importable() else _NO_FLASH)
    return (Way("Triton", "flex"), flash, *_tiles(where))


def inference(where: Where) -> Way:
    """FlexAttention, which on CPU serves set patterns, without gradients."""
    return Way("Triton" if where.is_cuda else "FlexAttention on CPU", "flex")


def attend_on(
    backend: str | None, q: Tensor, k: Tensor, v: Tensor, pattern: Expression, *, return_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(out, lse if asked for) of `attend`'s flex engine, with other kernels behind FlexAttention."""
    heads, kv_heads = q.shape[1], k.shape[1]
    key = CallKey(pattern.text, heads, kv_heads, q.shape[2], k.shape[2], 0, 0, 0, heads, 1, ())
    program = static_program(key, q.device)
    options = {"kernel_options": {"BACKEND": backend}}
    steps = tuple(replace(step, call=partial(step.call, **options)) for step in program.steps)
    scale = q.shape[-1] ** -0.5
    return run_flex(replace(program, steps=steps), q, k, v, scale=scale, return_lse=return_lse, direct=False)


def dense_flex(spec: LongNet, way: Way, where: Where, *, training: bool) -> tuple[str, Attention]:
    """Dense attention on the kernels of a way, by its name; `spec` is dense, causal or full."""
    if not where.is_cuda and training:
        # FlexAttention has no backward on CPU.
        return "dense SDPA", dense_attention(causal=spec.causal)
    if way.engine == "tiles" and where.is_cuda:
        return "dense flash SDPA", sdpa("FLASH_ATTENTION", causal=spec.causal)
    return "dense FlexAttention", natural(masks.causal() if spec.causal else None, way.backend)


def natural(pattern: Expression | None, backend: str | None = None) -> Attention:
    """Compiled FlexAttention in the order of the tokens, with the pattern's block mask or without any."""
    options = {} if backend is None else {"kernel_options": {"BACKEND": backend}}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = _compiled()(q, k, v, block_mask=_block_mask(pattern, q, k), **options)
        assert isinstance(out, Tensor)
        return out

    return attend


def sdpa(kernel: str, *, causal: bool) -> Attention:
    """PyTorch's dense attention on one of its kernels alone: a name of SDPBackend."""
    only = getattr(torch.nn.attention.SDPBackend, kernel)
    dense = dense_attention(causal=causal)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(only):
            return dense(q, k, v)

    return attend


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., object]:
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def _block_mask(pattern: Expression | None, q: Tensor, k: Tensor):
    if pattern is None:
        return None
    return masks.block_mask(pattern, q.shape[2], k.shape[2], num_heads=q.shape[1], device=q.device)


def _tiles(where: Where) -> tuple[Way, ...]:
    """ATen's own flash kernels, if the library runs them on this device."""
    tiny = torch.zeros(1, 1, 128, 64, dtype=where.dtype, device=where.device)
    try:
        fd.attend(tiny, tiny, tiny, masks.chunked(64), engine="tiles")
    except ValueError:
        return ()
    return (Way("tiles", "tiles"),)


@dataclass(frozen=True)
class Comparison:
    """Timings by name; the first calls, compilation included; what failed a check; what could not run, and why."""

    timings: dict[str, Timing]
    first_call_s: dict[str, float]
    objections: tuple[str, ...]
    failed: dict[str, str] = field(default_factory=dict)

    def median_s(self, name: str) -> float:
        return self.timings[name].median_s

    def row(self, what: str, target: Target, measured: float, detail: Mapping[str, Any]) -> Row:
        """A figure with all timings, the first calls, and what failed a check."""
        detail = {**detail, "first_call_s": self.first_call_s}
        return Row(what, target, measured, tuple(self.timings.values()), detail, self.objections)

    def missing(self, *names: str) -> str | None:
        """Why the first of these names that has no timing has none."""
        reasons = (f"{name}: {self.failed[name]}" for name in names if name not in self.timings)
        return next(reasons, None)


def compare(
    contestants: Sequence[Contestant], where: Where, *, part: Part, repeats: int, extra: Sequence[Job] = ()
) -> Comparison:
    """Time one part of every contestant's work in turns, with `extra` jobs between.

    What raises is left out and reported, what fails its check is timed and reported: figures of a function that
    computes something else are marked, not hidden.
    """
    first: dict[str, float] = {}
    failed: dict[str, str] = {}
    objections: list[str] = []

    def try_out(each: Contestant) -> None:
        say(f"first call of {each.name}")
        first[each.name] = where.seconds(lambda: _once(each, part))
        where.tidy()
        if not where.rehearsing:
            try:
                each.check(part, tolerance=where.tolerance)
            except AssertionError as error:
                objections.append(f"{each.name}: {error}")
                say(objections[-1])

    named = {job.name: job.seconds for job in extra} | {each.name: partial(try_out, each) for each in contestants}
    for name, work in named.items():
        try:
            work()
        except (RuntimeError, ValueError, TypeError) as error:
            failed[name] = f"{type(error).__name__}: {error}"
            say(f"{name} fails: {failed[name].partition(chr(10))[0]}")
        where.tidy()
    jobs = [each.job(part) for each in contestants]
    timings = where.time([job for job in (*jobs, *extra) if job.name not in failed], repeats=repeats)
    return Comparison({timing.name: timing for timing in timings}, first, tuple(objections), failed)


def _once(each: Contestant, part: Part) -> None:
    if part == "forward":
        with torch.no_grad():
            each.attention(each.problem.q, each.problem.k, each.problem.v)
    else:
        train(each.attention, each.problem)


# What most rows share: LongNet-5 at 128 K tokens, and what stands for it in a dry run.
BOTH = (LONGNET_5, LONGNET_5.as_causal())
LARGE = Size(128 * 1024, num_heads=16, head_dim=128)
TINY = LONGNET_5.shrunk(64)
TINY_SIZE = Size(1024, num_heads=4, head_dim=16, repeats=1)
FORWARD = ("longnet forward",)
TRAINING = ("longnet forward", "longnet backward")


@dataclass(frozen=True, kw_only=True)
class DeviceRow(Measure):
    """A measure whose function takes a `Where` first. `targets` are those of its rows, in the order of docs/device.md.

    `needs` names what must be right for its figures to count. `rehearsed`: it is run once beforehand, beside others,
    to compile. Those that compile what another one does are not, nor those that need the device's memory for
    themselves.
    """

    targets: tuple[Target, ...]
    needs: tuple[str, ...]
    limit_s: float
    rehearsed: bool

    def answer_on(self, where: Where, *, small: bool) -> dict[str, Any]:
        """Arguments and rows on this device, as plain data."""
        return replace(self, run=partial(self.run, where)).answer(small=small)

    def rehearsals(self, *, small: bool) -> list[dict[str, Any]]:
        """Arguments of one part each, so that the parts compile side by side; none if it is not rehearsed."""
        if not self.rehearsed:
            return []
        options = dict(self.small if small else self.full)
        options["size"] = replace(options["size"], repeats=1)
        for name in ("specs", "windows", "branches"):
            if name in options:
                return [{**options, name: (part,)} for part in options[name]]
        return [options]


REGISTERED: list[DeviceRow] = []


def device_row(
    code: str, *targets: Target, full: Mapping[str, Any], small: Mapping[str, Any], rehearsed: bool = False, **more: Any
) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """Register a function of (where, **arguments) under its own name."""

    def register(function: Callable[..., Answer]) -> Callable[..., Answer]:
        sizes = (function.__name__, function, full, small, code)
        REGISTERED.append(DeviceRow(*sizes, targets=targets, rehearsed=rehearsed, **more))
        return function

    return register
