"""Does a training step of sparse attention fit where dense attention's does?"""

from dataclasses import dataclass
from functools import cache

import flexdilated as fd
from flexdilated import masks

from ._longnets import LONGNET_4, LongNet
from ._problem import Attention, Size
from ._result import Result, Row, at_most
from ._step import dense_step_bytes, library_step_bytes


@dataclass(frozen=True)
class Window:
    """The keys up to the query, as many as `length`."""

    length: int
    causal = True

    @property
    def label(self) -> str:
        return f"window of {self.length}, causal"

    def attention(self) -> Attention:
        pattern = masks.local_window(left=self.length - 1, right=0)
        return lambda q, k, v: fd.attend(q, k, v, pattern)


@dataclass(frozen=True)
class Config:
    """Each pattern at one size."""

    specs: tuple[LongNet | Window, ...]
    size: Size


FULL = Config((LONGNET_4, LONGNET_4.as_causal(), Window(1024)), Size(65536, num_heads=2))
SMALL = Config((LONGNET_4.shrunk(8),), Size(4096, num_heads=1))


def run(config: Config) -> Result:
    """C13: peak memory of forward and backward, inputs and gradients included, over dense SDPA's."""
    dense_bytes = cache(lambda causal: dense_step_bytes(config.size, causal=causal))
    return Result(tuple(_measure(spec, config.size, dense_bytes(spec.causal)) for spec in config.specs))


def _measure(spec: LongNet | Window, size: Size, theirs: int) -> Row:
    ours = library_step_bytes(spec, size)
    return Row(
        f"{spec.label}, {size}, forward + backward: peak memory over dense SDPA's",
        at_most(1.3, "×"),
        ours / theirs,
        detail={"peak_bytes": ours, "dense_peak_bytes": theirs},
    )
