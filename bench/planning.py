"""Plans, block masks and tables: how long they take to build or to look up, what they compute, how large they are."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from jaxtyping import Bool, Int32
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexdilated import attend, masks
from flexdilated import plan as plan_attention
from flexdilated.engines._call import Call
from flexdilated.engines.aten._aten_op import _planned_programs
from flexdilated.masks.planning._planner import plan

from ._jobs import Job, Problem, Size, interleave, peak_bytes, race, ratio, say, tokens_text
from ._measures import Row, Timing, at_least, at_most, measure
from ._rules import GIGAPATH_5, LONGNET_4, LONGNET_5, PAPER_5, LongNet
from .peers import natural_block_mask
from .single_keys import neighbours

# H heads, R rows of blocks, C columns of blocks, W width of an index table

_BLOCK, _FIELDS = 128, ("num_blocks", "indices")


@measure("C5", specs=(LONGNET_4.shrunk(4), LONGNET_4.shrunk(4).as_causal()), size=Size(512, num_heads=2, repeats=1))
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
        what = f"{spec.label}, {size}, {size.num_heads} heads: times as fast as create_block_mask"
        yield race(what, at_least(100, "×"), jobs, repeats=size.repeats, block_lists="equal")


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


@measure("C7", specs=(LONGNET_5.shrunk(8),), size=Size(8192, num_heads=16, repeats=1))
def million_token_tables(
    specs: tuple[LongNet, ...] = (LONGNET_5,), size: Size = Size(1 << 20, num_heads=16, repeats=3)
) -> Iterator[Row]:
    """What do block tables of a million tokens cost: bytes over dense ones', time, memory?

    All branches in one residue-major BlockMask.
    """
    for spec in specs:
        name, blocks = f"{spec.label}, {size}, {size.num_heads} heads", -(-size.num_tokens // _BLOCK)
        held = _table_bytes(_build(spec, size))
        dense = 4 * 4 * size.num_heads * blocks * (blocks + 1)  # the same eight tables at full width, 4 bytes an entry
        (timing,) = interleave((Job("build", lambda _, spec=spec: _build(spec, size)),), repeats=size.repeats)
        detail = {"table_bytes": held, "dense_table_bytes": dense}
        yield Row(f"{name}: table bytes over dense tables'", at_most(1 / 200), held / dense, detail=detail)
        yield Row(f"{name}: time to build the tables", at_most(2, "s"), timing.median_s, (timing,))
        peak = peak_bytes(_prepared_build, spec, size)
        yield Row(f"{name}: peak memory of the build, tables included", at_most(512, "MB"), peak / 1e6)


def _table_bytes(mask: BlockMask) -> int:
    """Bytes of the storages behind the eight tables, each storage once."""
    names = [f"{full}{side}_{what}" for full in ("", "full_") for side in ("kv", "q") for what in _FIELDS]
    storages = [getattr(mask, name).untyped_storage() for name in names]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _build(spec: LongNet, size: Size) -> BlockMask:
    """The BlockMask of all branches over residue-major slots, from scratch."""
    pattern = spec.pattern()
    masks.cache().clear()
    layout = masks.layout(pattern, size.num_tokens)
    return masks.block_mask(pattern, size.num_tokens, num_heads=size.num_heads, block_size=_BLOCK, layout=layout)


def _prepared_build(spec: LongNet, size: Size) -> Callable[[], object]:
    _build(spec, replace(size, num_tokens=2048))
    return lambda: _build(spec, size)


def planned_call(pattern: masks.Pattern | masks.Mixture, num_heads: int, num_tokens: int) -> object:
    """The program that every call of the aten engine looks up, planned where it is not cached."""
    sizes = (num_heads, num_heads, num_tokens, num_tokens, 0, 0, 0, num_heads, 1)
    return _planned_programs(Call(pattern.text, *sizes, (128, 128)), [], 1)[0][1]


@measure("C6", spec=LONGNET_5.shrunk(32).as_causal(), size=Size(2048, num_heads=16, repeats=3), lookups=100)
def plan_lookup(
    spec: LongNet = LONGNET_5.as_causal(), size: Size = Size(65536, num_heads=16, repeats=9), lookups: int = 2000
) -> Iterator[Row]:
    """How long does a call wait for a plan that is already there?

    The look-up of every call of the aten engine, and that of the plan behind it by pattern and sizes.
    """
    pattern, heads, tokens = spec.pattern(), size.num_heads, size.num_tokens
    ways: dict[str, Callable[[], object]] = {
        "a call's cached plan": lambda: planned_call(pattern, heads, tokens),
        "binding and its cached plan": lambda: plan(pattern.bind(num_heads=heads, num_queries=tokens, num_keys=tokens)),
    }
    for name, look_up in ways.items():
        assert look_up() is look_up(), f"{name}: a second look-up must find what the first built"
        many = Job(f"{lookups} look-ups", lambda _, look_up=look_up: [look_up() for _ in range(lookups)])
        (together,) = interleave((many,), repeats=size.repeats)
        each = Timing("one look-up", tuple(seconds / lookups for seconds in together.seconds))
        what = f"{spec.label}, {size}, {heads} heads: look-up of {name}"
        yield Row(what, at_most(20, "µs"), each.median_s * 1e6, (each,), {"lookups_a_repeat": lookups})


@measure("C18", union_tokens=(1024, 2048), grid=(4, 8, 8), repeats=1)
def cold_plans(
    union_tokens: tuple[int, ...] = (65536, 1 << 20), grid: tuple[int, ...] = (16, 32, 32), repeats: int = 3
) -> Iterator[Row]:
    """How long does a first call wait for its plan, with nothing cached: plan, block lists and calls, of 4 heads?"""
    union = masks.local_window(left=256, right=256) | masks.dilated_window(left=64, right=64, rate=64)
    union = union | masks.global_tokens(16)
    cases = [("window, dilated window and global tokens", union, tokens) for tokens in union_tokens]
    cases.append(("3-D neighbourhood", masks.neighborhood(grid, min(3, (min(grid) - 1) // 2)), prod(grid)))
    for (name, pattern, tokens), target in zip(cases, (0.5, 2, 1), strict=True):
        job = Job(name, lambda _, rule=pattern, size=tokens: planned_call(rule, 4, size), masks.cache().clear)
        (cold,) = interleave((job,), repeats=repeats)
        yield Row(f"{tokens_text(tokens)}: cold plan of {name}", at_most(target, "s"), cold.median_s, (cold,))


@measure("C27", size=Size(256, num_heads=1, repeats=1), keys=4)
def single_key_plans(size: Size = Size(10000, num_heads=1, repeats=9), keys: int = 32) -> Iterator[Row]:
    """How long does a plan of a table of single keys take, over the call that it describes?

    Nothing is cached before a run. Both must count a pair for each entry of the table. In the detail: with the text.
    """
    drawn = neighbours(size.num_tokens, keys)
    pattern, problem = masks.selected_blocks(drawn, block=1, most=keys), Problem.draw(size)
    sizes = {"num_heads": size.num_heads, "head_dim": size.head_dim}
    ways: dict[str, partial[Any]] = {"fd.plan": partial(plan_attention, pattern, size.num_tokens, **sizes)}
    ways["masks.describe"] = partial(masks.describe, pattern, size.num_tokens, **sizes)
    call = Job("attend", lambda _: attend(*problem.qkv, pattern), masks.cache().clear)
    for name, way in ways.items():
        assert way().computed_pairs == drawn.numel() * size.num_heads, f"{name}: a pair for each entry of the table"
        jobs = [Job(name, lambda _, way=way: way(), masks.cache().clear), call]
        jobs.append(Job("with its text", lambda _, way=way: str(way()), masks.cache().clear))
        timings = interleave(jobs, repeats=size.repeats)
        detail = {"with_its_text": ratio(timings[2], timings[1])}
        what = f"{size}, {keys} single keys a query: {name} over attend, forward"
        yield Row(what, at_most(1, "×"), ratio(*timings[:2]), timings, detail)


@measure("C12", specs=(PAPER_5, GIGAPATH_5), num_tokens=(4096, 16384), num_heads=4)
def computed_pairs(
    specs: tuple[LongNet, ...] = (LONGNET_4, LONGNET_5, PAPER_5, GIGAPATH_5),
    num_tokens: tuple[int, ...] = (16384, 32768, 65536, 131072, 262144),
    num_heads: int = 16,
) -> Iterator[Row]:
    """How many pairs does the planner's choice compute for each useful one?

    Pairs in the plan's listed blocks of 128 over useful pairs; the worst size of each LongNet, full and causal. The
    useful pairs that `describe` counts are held against the closed form.
    """
    for spec in (each for full in specs for each in (full, full.as_causal())):
        ratios = {}
        for tokens in num_tokens:
            described = masks.describe(spec.pattern(), tokens, num_heads=num_heads)
            useful, counted = spec.pairs(num_tokens=tokens, num_heads=num_heads), described.useful_pairs
            assert counted == useful, f"{spec.label}, {tokens} tokens: {useful} useful pairs; describe counts {counted}"
            ratios[tokens_text(tokens)] = described.computed_pairs / useful
        say(f"{spec.label}: {', '.join(f'{size} {value:.3f}' for size, value in ratios.items())}")
        name = f"{spec.label}, {tokens_text(num_tokens[0])} to {tokens_text(num_tokens[-1])}"
        what = f"{name}: computed over useful pairs, worst size"
        yield Row(what, at_most(1.15), max(ratios.values()), detail=ratios)
