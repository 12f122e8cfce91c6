"""The configuration that most rows share: LongNet-5 at 128 K tokens, and what stands for it in a dry run."""

from dataclasses import dataclass

from .._longnets import LONGNET_5, LongNet
from .._problem import Size


@dataclass(frozen=True)
class Config:
    """Each LongNet at one size."""

    specs: tuple[LongNet, ...]
    size: Size


BOTH = (LONGNET_5, LONGNET_5.as_causal())
LARGE = Size(128 * 1024, num_heads=16, head_dim=128)

TINY = LONGNET_5.shrunk(64)
TINY_SIZE = Size(1024, num_heads=4, head_dim=16, repeats=1)
