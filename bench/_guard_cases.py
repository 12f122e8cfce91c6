"""What the guard watches: each case runs the library beside a plain job of about equal work.

The plain jobs use torch and Python alone, the same kernels where there are any. What they take next to the
library hardly depends on the machine, and nothing in them changes when the library does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks

from ._jobs import Attention, Job, Problem, Size, forward_job, training_job
from ._rules import LONGNET_4, LongNet, attention_by
from .peers import block_rows, branch_loop, dense_attention
from .planning import planned_call

_BLOCK = 128
_STEPS = 16


@dataclass(frozen=True)
class Pair:
    """The library's job, and a plain one."""

    library: Job
    plain: Job


def longnet_training() -> Pair:
    """A causal LongNet, forward and backward, beside a loop over its branches."""
    spec, problem = _small_longnet(), Problem.draw(Size(1024, num_heads=2, head_dim=32))
    ours, theirs = spec.attention(), branch_loop(spec)
    _check_equal(ours, theirs, problem)
    return Pair(training_job("library", ours, problem), training_job("plain", theirs, problem))


def window_training() -> Pair:
    """A local window, forward and backward, beside one masked call on gathered keys."""
    radius, problem = 2 * _BLOCK, Problem.draw(Size(1024, num_heads=1, head_dim=32))
    rows = problem.q.shape[2] // _BLOCK
    columns = (torch.arange(rows) - 2).clamp(0, rows - 5)[:, None] + torch.arange(5)
    keys = (columns[:, :, None] * _BLOCK + torch.arange(_BLOCK)).flatten(1)
    queries = torch.arange(rows * _BLOCK).view(rows, _BLOCK)
    allowed = (queries[:, :, None] - keys[:, None, :]).abs() <= radius
    theirs = block_rows(columns, block=_BLOCK, allowed=allowed)
    ours = attention_by(masks.local_window(left=radius, right=radius))
    _check_equal(ours, theirs, problem)
    return Pair(training_job("library", ours, problem), training_job("plain", theirs, problem))


def block_list_forward() -> Pair:
    """A list of drawn blocks, forward, beside a call on the gathered blocks."""
    problem = Problem.draw(Size(2048, num_heads=2, head_dim=32))
    rows = problem.q.shape[2] // _BLOCK
    columns = torch.rand(rows, rows, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :6]
    theirs = block_rows(columns, block=_BLOCK)
    ours = attention_by(masks.block_list(columns, block=_BLOCK))
    _check_equal(ours, theirs, problem)
    return Pair(forward_job("library", ours, problem), forward_job("plain", theirs, problem))


def small_call() -> Pair:
    """Calls so small that what they cost is overhead, beside dense ones."""
    problem = Problem.draw(Size(64, num_heads=2, head_dim=16))
    ours, theirs = attention_by(masks.causal()), dense_attention(causal=True)
    _check_equal(ours, theirs, problem)
    repeated = [_repeated(attention, 100) for attention in (ours, theirs)]
    return Pair(forward_job("library", repeated[0], problem), forward_job("plain", repeated[1], problem))


def plan_look_up() -> Pair:
    """What every call looks up, beside look-ups in a dictionary under a lock."""
    pattern, lock = _small_longnet().pattern(), Lock()
    text, numbers = pattern.text, (8, 8, 2048, 2048, 0, 0, 0, 8, 1)

    def look_up() -> object:
        return planned_call(pattern, 8, 2048)

    stored = {(text, *map(int, numbers), (_BLOCK, _BLOCK)): object()}

    def plain() -> object:
        with lock:
            return stored.get((text, *map(int, numbers), (_BLOCK, _BLOCK)))

    assert look_up() is look_up()
    return Pair(_loop("library", look_up, 2000), _loop("plain", plain, 2000))


def mask_build() -> Pair:
    """A block mask with nothing cached, beside a fixed series of small tensor operations."""
    pattern = _small_longnet().pattern()

    def build(_: None) -> None:
        masks.cache().clear()
        masks.block_mask(pattern, 2048, num_heads=4)

    return Pair(Job("library", build), _loop("plain", _small_operations, 2))


def planning() -> Pair:
    """Plan, block lists and calls with nothing cached, beside the same series."""
    window = masks.causal() & masks.local_window(left=255, right=0)
    pattern = window | masks.global_tokens(16)

    def build(_: None) -> None:
        masks.cache().clear()
        planned_call(pattern, 4, 2048)

    return Pair(Job("library", build), _loop("plain", _small_operations, 2))


@torch.no_grad()
def decoding() -> Pair:
    """Cached decoding steps of a LongNet, beside dense steps over a buffer of keys and values."""
    spec, past = _small_longnet(), 1000
    problem = Problem.draw(Size(past + _STEPS, num_heads=4))

    def filled() -> fd.KVCache:
        cache = fd.KVCache(spec.pattern(), num_heads=4, capacity=2048)
        cache.append(problem.k[:, :, :past], problem.v[:, :, :past])
        return cache

    def steps(cache: fd.KVCache) -> list[Tensor]:
        tokens = (x[:, :, past:].split(1, dim=2) for x in (problem.q, problem.k, problem.v))
        return [cache.attend(*token) for token in zip(*tokens, strict=True)]

    def dense_steps(_: None) -> None:
        keys, values = torch.empty_like(problem.k), torch.empty_like(problem.v)
        keys[:, :, :past], values[:, :, :past] = problem.k[:, :, :past], problem.v[:, :, :past]
        for place in range(past, past + _STEPS):
            keys[:, :, place], values[:, :, place] = problem.k[:, :, place], problem.v[:, :, place]
            seen = slice(place + 1)
            scaled_dot_product_attention(problem.q[:, :, place : place + 1], keys[:, :, seen], values[:, :, seen])

    whole = spec.attention()(problem.q, problem.k, problem.v)
    assert_close(torch.cat(steps(filled()), dim=2), whole[:, :, past:], rtol=1e-4, atol=1e-5)
    return Pair(Job("library", steps, prepare=filled), Job("plain", dense_steps))


CASES: dict[str, Callable[[], Pair]] = {
    case.__name__: case
    for case in (
        longnet_training,
        window_training,
        block_list_forward,
        small_call,
        plan_look_up,
        mask_build,
        planning,
        decoding,
    )
}


def _small_longnet() -> LongNet:
    return LongNet("small", LONGNET_4.segment_lengths[:3], LONGNET_4.dilation_rates[:3], causal=True).shrunk(4)


def _repeated(attention: Attention, number: int) -> Attention:
    def many(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for _ in range(number - 1):
            attention(q, k, v)
        return attention(q, k, v)

    return many


def _loop(name: str, function: Callable[[], object], number: int) -> Job:
    def many(given: None) -> None:
        for _ in range(number):
            function()

    return Job(name, many)


def _check_equal(ours: Attention, theirs: Attention, problem: Problem) -> None:
    """The two must compute the same before they are timed."""
    q, k, v = problem.q, problem.k, problem.v
    assert_close(ours(q, k, v), theirs(q, k, v), rtol=1e-4, atol=1e-5)


def _small_operations() -> Tensor:
    """Comparisons, searches and sorts of small tables, as building has them: about two hundred operations."""
    total = torch.zeros((), dtype=torch.int64)
    for rate in range(1, 21):
        q, k = torch.arange(0, 64 * rate, rate), torch.arange(0, 64 * rate, rate)
        allowed = (q[:, None] // 64 == k[None, :] // 64) & (k[None, :] <= q[:, None])
        row, column = allowed.nonzero().unbind(1)
        kinds, counts = (row - column).unique(return_counts=True)
        total = total + counts[kinds.argsort()].cumsum(0)[-1] + allowed.sum(1).max()
    return total
