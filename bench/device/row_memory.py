"""Does a LongNet training step on the device fit where dense flash attention's does?"""

import torch

from .._longnets import LongNet
from .._problem import Attention, Size, train
from .._result import Gap, Result, Row, at_most
from .._step import dense_step_bytes, library_step_bytes
from .._timing import say
from ._sizes import BOTH, LARGE, TINY, Config
from ._ways import Way, sdpa, ways
from ._where import Where

FULL = Config(BOTH, LARGE)
# Large enough to show in the resident memory of a process.
SMALL = Config((TINY,), Size(8192, num_heads=2, head_dim=32, repeats=1))
NEEDS = ("longnet forward", "longnet backward")


def run(config: Config, where: Where) -> Result:
    """G9: peak memory of forward and backward, inputs and gradients included, over dense flash SDPA's."""
    return Result(tuple(_measure(spec, config.size, way, where) for spec in config.specs for way in ways(where)))


def _measure(spec: LongNet, size: Size, way: Way, where: Where) -> Row | Gap:
    target = at_most(1.3, "×")
    measure = f"{spec.label}, {size}, forward + backward, {way.name}: peak memory over dense flash SDPA's"
    if way.missing:
        return Gap(measure, target, way.missing)
    try:
        if where.is_cuda:
            ours = _peak_bytes(way.attention(spec.pattern()), size, where)
            theirs = _peak_bytes(sdpa("FLASH_ATTENTION", causal=spec.causal), size, where)
        else:
            # The resident memory of processes of their own, in float32.
            ours, theirs = library_step_bytes(spec, size), dense_step_bytes(size, causal=spec.causal)
    except (RuntimeError, ValueError) as error:
        return Gap(measure, target, f"{type(error).__name__}: {error}")
    if ours <= 0 or theirs <= 0:
        return Gap(measure, target, "too small: the step shows no memory of its own")
    return Row(measure, target, ours / theirs, detail={"peak_bytes": ours, "dense_peak_bytes": theirs})


def _peak_bytes(attention: Attention, size: Size, where: Where) -> int:
    """Most bytes allocated at once in a step, after one that compiled what it needs."""
    problem = where.draw(size)
    for name in ("first call", "peak"):
        where.tidy()
        torch.cuda.reset_peak_memory_stats()
        train(attention, problem)
        where.wait()
        say(f"{name}: {torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB")
    return torch.cuda.max_memory_allocated()
