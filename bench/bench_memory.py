"""Does a LongNet training step fit where dense attention's does?"""

from dataclasses import dataclass

from ._longnets import LONGNET_4, LongNet
from ._problem import Size
from ._result import Result, Row, at_most
from ._step import dense_step_bytes, library_step_bytes


@dataclass(frozen=True)
class Config:
    """Each LongNet at one size."""

    specs: tuple[LongNet, ...]
    size: Size


FULL = Config((LONGNET_4, LONGNET_4.as_causal()), Size(65536, num_heads=2))
SMALL = Config((LONGNET_4.shrunk(8),), Size(4096, num_heads=1))


def run(config: Config) -> Result:
    """C13: peak memory of forward and backward, inputs and gradients included, over dense SDPA's."""
    return Result(tuple(_measure(spec, config.size) for spec in config.specs))


def _measure(spec: LongNet, size: Size) -> Row:
    ours = library_step_bytes(spec, size)
    theirs = dense_step_bytes(size, causal=spec.causal)
    return Row(
        f"{spec.label}, {size}, forward + backward: peak memory over dense SDPA's",
        at_most(1.3, "×"),
        ours / theirs,
        detail={"peak_bytes": ours, "dense_peak_bytes": theirs},
    )
