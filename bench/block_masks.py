"""Block masks: how quickly they are built, what a million tokens need, and how small they are kept."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int32
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexdilated import masks
from flexdilated.masks.blocks._blocks import PackedBlocks
from flexdilated.masks.planning.lowering._ways import shared_terms

from ._jobs import Job, Size, interleave, peak_bytes, ratio, tokens_text
from ._measures import Row, at_least, at_most, measure
from ._rules import LONGNET_4, LONGNET_5, LongNet
from .peers import natural_block_mask

# H heads, R rows of blocks, C columns of blocks, W width of an index table

_BLOCK = 128


@measure("C5", specs=(LONGNET_4.shrunk(4), LONGNET_4.shrunk(4).as_causal()), size=Size(1024, num_heads=2, repeats=1))
def mask_build(
    specs: tuple[LongNet, ...] = (LONGNET_4, LONGNET_4.as_causal()), size: Size = Size(8192, num_heads=4, repeats=3)
) -> Iterator[Row]:
    """How much faster than `create_block_mask` is a BlockMask built, and is it the same?

    In token order with blocks of 128 and nothing cached; both sides' block lists are compared first.
    """
    for spec in specs:
        pattern = spec.pattern()

        def build(_: None = None, pattern=pattern) -> BlockMask:
            return masks.block_mask(pattern, size.num_tokens, num_heads=size.num_heads)

        def build_dense(_: None = None, spec=spec) -> BlockMask:
            return natural_block_mask(spec, num_heads=size.num_heads, num_tokens=size.num_tokens)

        ours, theirs = (block_lists(mask, size.num_heads) for mask in (build(), build_dense()))
        for name, wanted in theirs.items():
            assert torch.equal(ours[name], wanted), f"{spec.label}: block lists must be equal; {name} differs"
        jobs = Job("create_block_mask", build_dense), Job("flexdilated", build, masks.cache().clear)
        timings = interleave(jobs, repeats=size.repeats)
        what = f"{spec.label}, {size}, {size.num_heads} heads: times as fast as create_block_mask"
        yield Row(what, at_least(100, "×"), ratio(*timings), timings, {"block_lists": "equal"})


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


_TABLES = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip


@measure("C7", specs=(LONGNET_5.shrunk(8),), size=Size(8192, num_heads=16, repeats=1))
def million_token_tables(
    specs: tuple[LongNet, ...] = (LONGNET_5,), size: Size = Size(1 << 20, num_heads=16, repeats=3)
) -> Iterator[Row]:
    """What do block tables of a million tokens cost: bytes over dense ones', time, memory?

    All branches in one residue-major BlockMask.
    """
    for spec in specs:
        name = f"{spec.label}, {size}, {size.num_heads} heads"
        held, dense = table_bytes(_build(spec, size)), dense_table_bytes(size)
        (timing,) = interleave((Job("build", lambda _, spec=spec: _build(spec, size)),), repeats=size.repeats)
        detail = {"table_bytes": held, "dense_table_bytes": dense}
        yield Row(f"{name}: table bytes over dense tables'", at_most(1 / 200), held / dense, detail=detail)
        yield Row(f"{name}: time to build the tables", at_most(2, "s"), timing.median_s, (timing,))
        peak = peak_bytes(_prepared_build, spec, size)
        yield Row(f"{name}: peak memory of the build, tables included", at_most(512, "MB"), peak / 1e6)


def table_bytes(mask: BlockMask) -> int:
    """Bytes of the storages behind the eight tables, each storage once."""
    storages = [getattr(mask, name).untyped_storage() for name in _TABLES]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def dense_table_bytes(size: Size) -> int:
    """Bytes of the same eight tables at full width, 4 bytes an entry."""
    blocks = -(-size.num_tokens // _BLOCK)
    return 4 * 4 * size.num_heads * blocks * (blocks + 1)


def _build(spec: LongNet, size: Size) -> BlockMask:
    """The BlockMask of all branches over residue-major slots, from scratch."""
    pattern = spec.pattern()
    masks.cache().clear()
    layout = masks.layout(pattern, size.num_tokens)
    return masks.block_mask(pattern, size.num_tokens, num_heads=size.num_heads, block_size=_BLOCK, layout=layout)


def _prepared_build(spec: LongNet, size: Size) -> Callable[[], object]:
    """A _build ready to run, after one at a tiny size."""
    _build(spec, replace(size, num_tokens=2048))
    return lambda: _build(spec, size)


@dataclass(frozen=True)
class Case:
    """A pattern, as `masks.to_json` writes it, in the order of a dilation rate, with blocks of 128."""

    name: str
    pattern: str
    num_tokens: int
    num_heads: int = 1
    rate: int = 1

    def __str__(self) -> str:
        order = "" if self.rate == 1 else f" in residue order {self.rate}"
        heads = "1 head" if self.num_heads == 1 else f"{self.num_heads} heads"
        return f"{self.name}{order}, {tokens_text(self.num_tokens)}, {heads}"


def _window(num_tokens: int) -> Case:
    pattern = masks.causal() & masks.local_window(left=1023, right=0)
    return Case("window of 1024, causal", masks.to_json(pattern), num_tokens)


def _longnet(num_tokens: int, *, num_heads: int, shrunk: int = 1, rate: int = 1) -> Case:
    spec = LONGNET_5.shrunk(shrunk).as_causal() if shrunk > 1 else LONGNET_5.as_causal()
    return Case(spec.label, masks.to_json(spec.pattern()), num_tokens, num_heads, rate)


def _random(num_tokens: int) -> Case:
    """The parts of BigBird: a window, global tokens, random blocks. Nothing repeats in the last."""
    drawn = masks.random_blocks(num_tokens, block=128, count=3)
    pattern = masks.local_window(left=192, right=192) | masks.global_tokens(128) | drawn
    return Case("window, global tokens, random blocks", masks.to_json(pattern), num_tokens)


@measure(cases=(_window(2048), _longnet(2048, num_heads=4, shrunk=32, rate=16), _random(2048)), repeats=1)
def cache(
    cases: tuple[Case, ...] = (
        _window(1 << 20),
        _longnet(65536, num_heads=16),
        _longnet(65536, num_heads=16, rate=16),
        _longnet(1 << 20, num_heads=1),
        _random(65536),
        _random(1 << 20),
    ),
    repeats: int = 5,
) -> Iterator[Row]:
    """How small is a cached block list, and how much sooner is it there again than built anew?

    Lists are compared after a round trip. Bytes are those of the tensors, and of what the cache keeps.
    """
    for case in cases:
        sizes = {"num_heads": case.num_heads, "num_queries": case.num_tokens, "num_keys": case.num_tokens}
        bound = masks.from_json(case.pattern).bind(**sizes)
        (term,) = shared_terms(bound.union, 1, bound, case.rate)
        blocks = term.blocks(_BLOCK, _BLOCK)
        packed = PackedBlocks.pack(blocks)
        unpacked = packed.unpack()
        for name in ("table", "row", "column", "full", "pairs"):
            same = torch.equal(getattr(unpacked, name), getattr(blocks, name))
            assert same, f"lists must come back; {name} differs"
        build = Job("build", lambda _, term=term: term.blocks(_BLOCK, _BLOCK))
        timings = interleave((build, Job("unpack", lambda _, packed=packed: packed.unpack())), repeats=repeats)
        detail = {
            "listed_blocks": len(blocks.row),
            "list_bytes": blocks.nbytes,
            "kept_bytes": packed.nbytes,
            "times_as_fast_as_building": ratio(*timings),
        }
        what = f"{case}: bytes of block lists over bytes kept"
        yield Row(what, at_least(8, "×"), blocks.nbytes / packed.nbytes, timings, detail)
