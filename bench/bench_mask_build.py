"""How much faster than `create_block_mask` is a BlockMask built, and is it the same?"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int32
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexdilated import masks

from ._longnets import LONGNET_4, LongNet
from ._problem import Size
from ._result import Result, Row, at_least
from ._timing import Job, interleave, ratio
from .peer_flex import natural_block_mask

# H heads, R rows of blocks, C columns of blocks, W width of an index table


@dataclass(frozen=True)
class Config:
    """Each LongNet at one size, in token order with blocks of 128."""

    specs: tuple[LongNet, ...]
    size: Size


FULL = Config((LONGNET_4, LONGNET_4.as_causal()), Size(8192, num_heads=4, repeats=3))
SMALL = Config((LONGNET_4.shrunk(4), LONGNET_4.shrunk(4).as_causal()), Size(1024, num_heads=2, repeats=1))


def run(config: Config) -> Result:
    """C5: time to build, with nothing cached; both sides' block lists are compared first."""
    return Result(tuple(_measure(spec, config.size) for spec in config.specs))


def block_lists(mask: BlockMask, num_heads: int) -> dict[str, Bool[Tensor, "H R C"]]:
    """The four tables as dense booleans: partial and full blocks, by query row and by key row."""
    rows, columns = (-(-length // side) for length, side in zip(mask.seq_lengths, mask.BLOCK_SIZE, strict=True))
    tables = {
        "partial, key side": (mask.kv_num_blocks, mask.kv_indices, columns),
        "full, key side": (mask.full_kv_num_blocks, mask.full_kv_indices, columns),
        "partial, query side": (mask.q_num_blocks, mask.q_indices, rows),
        "full, query side": (mask.full_q_num_blocks, mask.full_q_indices, rows),
    }
    return {name: _listed(*table).expand(num_heads, -1, -1) for name, table in tables.items()}


def _listed(
    counts: Int32[Tensor, "1 H R"] | None, indices: Int32[Tensor, "1 H R W"] | None, num_columns: int
) -> Bool[Tensor, "H R C"]:
    assert counts is not None
    assert indices is not None
    used = torch.arange(indices.shape[-1]) < counts[0, ..., None]
    # One more column takes the unused entries.
    listed = torch.zeros(*counts.shape[1:], num_columns + 1, dtype=torch.bool)
    return listed.scatter(-1, indices[0].long().where(used, num_columns), True)[..., :num_columns]


def _measure(spec: LongNet, size: Size) -> Row:
    pattern = spec.pattern()

    def build(_: None = None) -> BlockMask:
        return masks.block_mask(pattern, size.num_tokens, num_heads=size.num_heads)

    def build_dense(_: None = None) -> BlockMask:
        return natural_block_mask(spec, num_heads=size.num_heads, num_tokens=size.num_tokens)

    ours, theirs = (block_lists(mask, size.num_heads) for mask in (build(), build_dense()))
    for name, wanted in theirs.items():
        assert torch.equal(ours[name], wanted), f"{spec.label}: block lists must be equal; {name} differs"
    jobs = (
        Job("create_block_mask", build_dense),
        Job("flexdilated", build, prepare=lambda: masks.cache().clear()),
    )
    timings = interleave(jobs, repeats=size.repeats)
    return Row(
        f"{spec.label}, {size}, {size.num_heads} heads: times as fast as create_block_mask",
        at_least(100, "×"),
        ratio(*timings),
        timings,
        {"block_lists": "equal"},
    )
