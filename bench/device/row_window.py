"""Does a local window gain over dense attention's best kernel what its smaller work promises?"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from flexdilated import masks

from .._longnets import dense
from .._problem import Size
from .._result import Gap, Result, Row, at_least
from ._compare import Contestant, compare
from ._ways import inference, sdpa
from ._where import Where

# H heads, R sampled query rows, N tokens


@dataclass(frozen=True)
class Window:
    """Each block of tokens sees `left` blocks before and `right` after its own; a block of 1 is a token."""

    name: str
    left: int
    right: int
    block: int
    bound: float

    def pattern(self) -> masks.Pattern:
        """The same as a pattern of the library."""
        window = masks.local_window(left=self.left, right=self.right)
        return window if self.block == 1 else masks.blockwise(window, self.block)

    def masks(self, rows: Int64[Tensor, " R"], *, num_tokens: int, num_heads: int) -> list[Bool[Tensor, "H R N"]]:
        """The pairs of the sampled query rows, as the one branch of a set."""
        keys = torch.arange(num_tokens, device=rows.device) // self.block
        queries = (rows // self.block)[:, None]
        allowed = (keys >= queries - self.left) & (keys <= queries + self.right)
        return [allowed.expand(num_heads, -1, -1)]

    def pairs(self, *, num_tokens: int, num_heads: int) -> int:
        """Pairs of all heads; num_tokens is a multiple of the block."""
        blocks = num_tokens // self.block
        lists = sum(min(block + self.right, blocks - 1) - max(block - self.left, 0) + 1 for block in range(blocks))
        return num_heads * lists * self.block**2


@dataclass(frozen=True)
class Config:
    """Each window at one size."""

    windows: tuple[Window, ...]
    size: Size


# 2048 keys either way: block-aligned, the lists hold whole blocks only; by token, two a row are cut.
ALIGNED = Window("window of 2048, block-aligned", 8, 7, 128, 0.85)
CUT = Window("window of 2048, masked edges", 1024, 1023, 1, 0.65)

FULL = Config((ALIGNED, CUT), Size(32 * 1024, num_heads=16, head_dim=128, repeats=9))
SMALL = Config(
    (replace(ALIGNED, left=1, right=0), replace(CUT, left=128, right=127)),
    Size(1024, num_heads=2, head_dim=16, repeats=1),
)
NEEDS = ("set forward",)

_KERNELS = {"cuDNN SDPA": "CUDNN_ATTENTION", "flash SDPA": "FLASH_ATTENTION"}


def run(config: Config, where: Where) -> Result:
    """G4: forward; speed-up over the faster of the dense kernels, divided by the ratio of the FLOP."""
    return Result(tuple(_measure(window, config.size, where) for window in config.windows))


def _measure(window: Window, size: Size, where: Where) -> Row | Gap:
    way, target = inference(where), at_least(window.bound)
    measure = f"{window.name}, {size}, forward, {way.name}: speed-up over dense SDPA over FLOP ratio"
    problem, everything = where.draw(size), dense(size.num_tokens, causal=False)
    peers = {
        name: sdpa(kernel, causal=False) for name, kernel in _KERNELS.items() if where.is_cuda or "cuDNN" not in name
    }
    contestants = [Contestant(name, peer, problem, everything) for name, peer in peers.items()]
    ours = Contestant("flexdilated", way.attention(window.pattern()), problem, window)
    found = compare([*contestants, ours], where, part="forward", repeats=size.repeats)
    timed = [name for name in peers if name in found.timings]
    if (reason := found.missing("flexdilated")) or not timed:
        return Gap(measure, target, reason or found.missing(*peers) or "no dense kernel runs here")
    fastest = min(timed, key=found.median_s)
    flop_ratio = everything.pairs(num_tokens=size.num_tokens, num_heads=size.num_heads) / window.pairs(
        num_tokens=size.num_tokens, num_heads=size.num_heads
    )
    speed_up = found.median_s(fastest) / found.median_s("flexdilated")
    detail = {
        "fastest_dense": fastest,
        "speed_up": speed_up,
        "flop_ratio": flop_ratio,
        "first_call_s": found.first_call_s,
        "failed": found.failed,
    }
    return Row(measure, target, speed_up / flop_ratio, tuple(found.timings.values()), detail, found.objections)
