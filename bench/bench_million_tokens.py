"""What do block tables of a million tokens cost: bytes over dense ones', time, memory?"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch.nn.attention.flex_attention import BlockMask

from flexdilated import masks

from ._longnets import LONGNET_5, LongNet
from ._memory import peak_bytes
from ._problem import Size
from ._result import Result, Row, at_most
from ._timing import Job, interleave

_BLOCK = 128
_TABLES = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    """Each LongNet at one size, all branches in one residue-major BlockMask."""

    specs: tuple[LongNet, ...]
    size: Size


FULL = Config((LONGNET_5,), Size(1 << 20, num_heads=16, repeats=3))
SMALL = Config((LONGNET_5.shrunk(8),), Size(8192, num_heads=16, repeats=1))


def run(config: Config) -> Result:
    """C7: bytes over those of dense tables, time to build, and peak memory of the build."""
    return Result(tuple(row for spec in config.specs for row in _measure(spec, config.size)))


def table_bytes(mask: BlockMask) -> int:
    """Bytes of the storages behind the eight tables, each storage once."""
    storages = [getattr(mask, name).untyped_storage() for name in _TABLES]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def dense_table_bytes(size: Size) -> int:
    """Bytes of the same eight tables at full width, 4 bytes an entry."""
    blocks = -(-size.num_tokens // _BLOCK)
    return 4 * 4 * size.num_heads * blocks * (blocks + 1)


def build(spec: LongNet, size: Size) -> BlockMask:
    """The BlockMask of all branches over residue-major slots, from scratch."""
    pattern = spec.pattern()
    masks.cache().clear()
    layout = masks.layout(pattern, size.num_tokens)
    return masks.block_mask(pattern, size.num_tokens, num_heads=size.num_heads, block_size=_BLOCK, layout=layout)


def prepared(spec: LongNet, size: Size) -> Callable[[], object]:
    """A build ready to run, after one at a tiny size."""
    build(spec, replace(size, num_tokens=2048))
    return lambda: build(spec, size)


def _measure(spec: LongNet, size: Size) -> tuple[Row, ...]:
    name = f"{spec.label}, {size}, {size.num_heads} heads"
    held, dense = table_bytes(build(spec, size)), dense_table_bytes(size)
    (timing,) = interleave((Job("build", lambda _: build(spec, size)),), repeats=size.repeats)
    peak = peak_bytes(prepared, spec, size)
    detail = {"table_bytes": held, "dense_table_bytes": dense}
    return (
        Row(f"{name}: table bytes over dense tables'", at_most(1 / 200), held / dense, detail=detail),
        Row(f"{name}: time to build the tables", at_most(2, "s"), timing.median_s, (timing,)),
        Row(f"{name}: peak memory of the build, tables included", at_most(512, "MB"), peak / 1e6),
    )
