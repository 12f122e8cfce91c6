"""Which published figures on dilated and block-sparse attention are reached here?"""

from dataclasses import dataclass

from . import _claims_cache, _claims_kernels, _claims_length, _claims_memory
from ._claims_cache import Caching
from ._claims_kernels import Kernels
from ._claims_length import Length
from ._longnets import LongNet
from ._problem import Size
from ._result import Result


@dataclass(frozen=True)
class Config:
    """The sizes of the sources, where they name any."""

    caching: Caching
    memory: Size
    kernels: Kernels
    length: Length


_CACHED = LongNet("LongNet-3", (1024, 2048, 4096), (1, 2, 4))

FULL = Config(
    Caching(_CACHED, Size(4096, num_heads=8, repeats=5), lengths=(256, 512, 1024), steps=24),
    Size(8192, num_heads=8),
    Kernels(Size(8192, num_heads=2, repeats=5), Size(32768, num_heads=2, repeats=7), projected=(8192, 512)),
    Length((8192, 16384, 32768), (1, 2, 8), Size(131072, num_heads=4, head_dim=8, repeats=3), 4096, 32768),
)
SMALL = Config(
    Caching(_CACHED.shrunk(16), Size(256, num_heads=2, head_dim=16, repeats=1), lengths=(128, 256), steps=4),
    Size(512, num_heads=4, head_dim=16),
    Kernels(Size(2048, num_heads=1, repeats=1), Size(2048, num_heads=1, repeats=1), projected=(64, 32)),
    Length((128, 256, 512), (1, 2, 8), Size(2048, num_heads=4, head_dim=8, repeats=1), 128, 512),
)


def run(config: Config) -> Result:
    """Claimed against measured. A target is the claim's figure; that it is missed is an answer, too."""
    return Result(
        (
            *_claims_cache.measure(config.caching),
            *_claims_memory.measure(config.memory),
            *_claims_kernels.measure(config.kernels),
            *_claims_length.measure(config.length),
        )
    )
