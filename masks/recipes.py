"""Named recipes: patterns of published models, each composed from the constructors of this package.

A recipe returns a plain pattern, which prints as its composition. A recipe is causal only if its source is; otherwise
intersect it with `causal()`.
"""

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import NoReturn

from .core import CONSTRUCTORS, Pattern, advises, every, no_such_name, renamed, require_int, require_ints
from .patterns import (
    blockwise,
    causal,
    chunked,
    dilated_window,
    first_tokens,
    fixed,
    global_tokens,
    grid_window,
    landmark_tokens,
    local_window,
    neighborhood,
    random_blocks,
    strided,
)

__all__ = [
    "bigbird",
    "darcstar_dilated_sparse",
    "darcstar_global_local",
    "darcstar_hierarchical",
    "darcstar_local_window",
    "longformer",
    "radial",
    "sliding_tile",
    "sparse_transformer_fixed",
    "sparse_transformer_strided",
    "sparse_videogen_spatial",
    "sparse_videogen_temporal",
    "streaming_llm",
]

_ALL_BLOCKS = -1


@advises(keywords=renamed(radius="window window_size"))
def longformer(radius: int, num_global: int, *, rate: int = 1) -> Pattern:
    """Pattern in which each query sees a window around it and the global tokens, and global tokens see all keys.

    radius: keys on each side of the query, half the paper's window size.
    num_global: number of global tokens, the first of the sequence, such as a classification token; the paper lets the
        task choose them.
    rate: dilation rate of the window; the paper raises it in two heads of its upper layers, see `per_head`.

    Raises ValueError for a radius below 0, and for num_global or rate below 1.
    Source: Longformer, arXiv 2004.05150, section 3.1.
    """
    require_int("radius", radius, minimum=0)
    require_int("num_global", num_global, minimum=1)
    return dilated_window(left=radius, right=radius, rate=rate) | global_tokens(num_global)


@advises()
def bigbird(
    num_tokens: int, *, block: int = 64, radius: int = 1, num_global: int = 2, num_random: int = 3, seed: int = 0
) -> Pattern:
    """Pattern in which each query block sees itself, the blocks near it, global blocks and random blocks.

    Global blocks see all keys.

    num_tokens: sequence length, over which blocks are drawn; later tokens have no random blocks.
    block: tokens per block.
    radius: blocks on each side of the query's block.
    num_global: number of global blocks, the first of the sequence (the paper's internal transformer construction).
    num_random: blocks drawn for each query block in each head. They are drawn among all blocks and may overlap with
        window and global blocks, which the paper's code excludes.
    seed: seed of the draw.

    Raises ValueError for a radius below 0, a seed outside [0, 2**63), other numbers below 1, and num_random above the
    number of blocks.
    Source: BigBird, arXiv 2007.14062, section 2; defaults as in its base models.
    """
    require_int("radius", radius, minimum=0)
    require_int("num_global", num_global, minimum=1)
    require_int("num_random", num_random, minimum=1)
    regular = blockwise(local_window(left=radius, right=radius) | global_tokens(num_global), block)
    return regular | random_blocks(num_tokens, block=block, count=num_random, seed=seed)


@advises()
def sparse_transformer_strided(stride: int) -> Pattern:
    """Causal pattern: each query sees itself, the `stride` keys before it, and keys 2, 3, ... strides before it.

    stride: the paper's l, in tokens, near the square root of the sequence length.

    Every head has the union of both patterns ("factors") of section 4.3, as in the merged head of section 5.1.
    Raises ValueError for a stride below 1.
    Source: Sparse Transformer, arXiv 1904.10509.
    """
    return (local_window(left=require_int("stride", stride, minimum=1), right=0) | strided(stride)) & causal()


@advises()
def sparse_transformer_fixed(stride: int, *, summary: int = 1) -> Pattern:
    """Causal pattern: each query sees its block up to itself, and the last `summary` keys of every earlier block.

    stride: tokens per block, the paper's l.
    summary: number of last keys of a block, the paper's c, 8 to 32 there.

    Every head has the union of both patterns ("factors") of section 4.3, as in the merged head of section 5.1.

    Raises ValueError for a stride or summary below 1, and for a summary above the stride.
    Source: Sparse Transformer, arXiv 1904.10509.
    """
    require_int("stride", stride, minimum=1)
    return (chunked(stride) | fixed(stride, summary=summary)) & causal()


@advises(keywords=renamed(recent="window window_size", num_sinks="sinks"))
def streaming_llm(recent: int, *, num_sinks: int = 4) -> Pattern:
    """Causal pattern: each query sees the first `num_sinks` keys and the `recent` most recent keys.

    recent: number of most recent keys, the query's own included.
    num_sinks: number of first keys, which serve as attention sinks.

    Positional encodings are up to the caller: the paper counts positions within the cache.

    Raises ValueError for recent or num_sinks below 1.
    Source: StreamingLLM, arXiv 2309.17453, section 3.2.
    """
    require_int("recent", recent, minimum=1)
    require_int("num_sinks", num_sinks, minimum=1)
    return (first_tokens(num_sinks) | local_window(left=recent - 1, right=0)) & causal()


@advises(keywords=renamed(num_tiles="window window_size kernel_size", tile="tile_size"))
def sliding_tile(grid: Sequence[int], *, tile: int | Sequence[int], num_tiles: int | Sequence[int]) -> Pattern:
    """Pattern over a video's tokens in which the queries of a tile see a window of tiles around their own.

    At the borders windows are shifted inwards, so that every query sees equally many keys.

    grid: frames, rows and columns of tokens, in row-major order; the paper's own order, tile by tile, is not needed.
    tile: tokens of a tile along each axis, a divisor of the axis length; one value for all axes, or a sequence.
    num_tiles: tiles of a window along each axis, an odd number; one value for all axes, or a sequence.

    Raises ValueError for numbers below 1, other than 1 to 3 axes, sequences that are not as long as `grid`, a tile that
    does not divide its axis, an even number of tiles, and a window longer than its axis; TypeError for values of other
    types.
    Source: Sliding Tile Attention, arXiv 2502.04507, with a window that is centred on the query's tile.
    """
    lengths = require_ints("grid", grid, minimum=1)
    sizes, numbers = (_one_per_axis(name, each, lengths) for name, each in (("tile", tile), ("num_tiles", num_tiles)))
    for axis, (length, size, number) in enumerate(zip(lengths, sizes, numbers, strict=True)):
        if length % size:
            raise ValueError(f"tile must divide the grid; got {size} tokens on axis {axis} of length {length}")
        if number % 2 == 0:
            raise ValueError(f"num_tiles must be odd, as the query's own tile is the middle one; got {number}")
        if size * number > length:
            tiles = length // size
            raise ValueError(f"num_tiles must be at most {tiles}, the tiles on axis {axis}; got {number}")
    windows = [size * number for size, number in zip(sizes, numbers, strict=True)]
    return neighborhood(lengths, kernel_size=windows, stride=sizes)


@advises()
def radial(grid: Sequence[int]) -> Pattern:
    """Pattern over a video's tokens whose windows within a frame become narrower with the distance of the frame.

    Queries see all tokens of their own frame, of the frames next to it and of the first frame. In frames at a distance
    of 2^r to 2^(r+1) - 1, a query at place p of its frame sees the places p' with abs(p' - p) + 1 <= s / 2^r, where s
    is the number of places of a frame.

    grid: frames, rows and columns of tokens, in row-major order; at most as many frames as a frame has tokens.

    The pattern is that of the paper's formula, token by token; the published code rounds it to blocks of 128 tokens.
    Raises ValueError unless `grid` has three entries of at least 1, and for more frames than places of a frame.
    Source: Radial Attention, arXiv 2506.19852, section 4.
    """
    frames, places = _frames_and_places(grid)
    if frames > places:
        raise ValueError(f"radial takes at most as many frames as a frame has tokens; got {frames} of {places} tokens")
    levels = range(max(1, (frames - 1).bit_length()))
    windows = [(min(2 ** (level + 1), frames) - 1, (places >> level) - 1) for level in levels]
    return grid_window((frames, places), windows) | first_tokens(places)


@advises()
def sparse_videogen_spatial(grid: Sequence[int], *, near_frames: int) -> Pattern:
    """Pattern of a spatial head over a video's tokens: queries see the frames near their own, and the first frame.

    grid: frames, rows and columns of tokens, in row-major order.
    near_frames: frames on each side of the query's own.

    A spatial and a temporal head join as `per_head([spatial, temporal])`. In each call, the source gives each head the
    kind that is closer to full attention on sampled queries.
    Raises ValueError unless `grid` has three entries, of at least 1, and for near_frames below 0.
    Source: Sparse VideoGen, arXiv 2502.01776, section 4.
    """
    frames, places = _frames_and_places(grid)
    near = require_int("near_frames", near_frames, minimum=0)
    return grid_window((frames, places), (near, places - 1)) | first_tokens(places)


@advises()
def sparse_videogen_temporal(grid: Sequence[int], *, near_places: int) -> Pattern:
    """Pattern of a temporal head over a video's tokens: queries see places near their own in all frames.

    They see all tokens of the first frame, too.

    grid: frames, rows and columns of tokens, in row-major order.
    near_places: places on each side of the query's own, in the row-major order of a frame.

    Raises ValueError unless `grid` has three entries, of at least 1, and for near_places below 0.
    Source: Sparse VideoGen, arXiv 2502.01776, section 4; see `sparse_videogen_spatial`.
    """
    frames, places = _frames_and_places(grid)
    near = require_int("near_places", near_places, minimum=0)
    return grid_window((frames, places), (frames - 1, near)) | first_tokens(places)


@advises()
def darcstar_local_window(*, local_window_size: int = 512, block_size: int = 128) -> Pattern:
    """Pattern in which each query sees its own block and the blocks near it.

    It is `local_window` of dilated-attention-pytorch (the DarcStar fork).

    block_size: tokens per block.
    local_window_size: window in tokens; each side has half of it, rounded down to whole blocks.

    Raises ValueError for a block_size below 1 and for a local_window_size below 0.
    Source: `SparsePatternConfig` and `BlockSparseRingDilatedAttention` of that package.
    """
    radius = _radius_in_blocks(local_window_size, block_size)
    return blockwise(local_window(left=radius, right=radius), block_size)


@advises()
def darcstar_dilated_sparse(dilation_rates: Sequence[int], *, block_size: int = 128) -> Pattern:
    """Pattern in which each query sees its own block, and for each dilation rate one block before and one after it.

    It is `dilated_sparse` of dilated-attention-pytorch (the DarcStar fork).

    dilation_rates: distances of these blocks from the query's own, in blocks; as in the source, only the first three
        are used.
    block_size: tokens per block.

    Raises ValueError for an empty `dilation_rates`, and for a rate or block_size below 1.
    Source: `BlockSparseRingDilatedAttention` of that package.
    """
    steps = require_ints("dilation_rates", dilation_rates, minimum=1)
    if not steps:
        raise ValueError(f"dilation_rates must have at least one integer; got {dilation_rates=}")
    return blockwise(reduce(or_, [dilated_window(left=1, right=1, rate=step) for step in steps[:3]]), block_size)


@advises()
def darcstar_global_local(*, global_tokens: int = 64, local_window_size: int = 512, block_size: int = 128) -> Pattern:
    """Pattern in which each query sees its own block, the blocks near it, and the first blocks.

    It is `global_local` of dilated-attention-pytorch (the DarcStar fork).

    global_tokens: number of first tokens that every query sees, rounded down to whole blocks: none with the defaults,
        which are the source's. These tokens, as queries, do not see all keys.
    local_window_size, block_size: as in `darcstar_local_window`.

    Raises ValueError for a block_size below 1, and for the other arguments below 0.
    Source: `BlockSparseRingDilatedAttention` of that package.
    """
    radius = _radius_in_blocks(local_window_size, block_size)
    window, first = local_window(left=radius, right=radius), require_int("global_tokens", global_tokens, minimum=0)
    return blockwise(window | first_tokens(first // block_size) if first >= block_size else window, block_size)


@advises()
def darcstar_hierarchical(
    levels: Sequence[Sequence[int]] = ((64, 256), (256, 1024), (1024, -1)), *, block_size: int = 64
) -> Pattern:
    """Pattern that is the union of levels, each of which gives every n-th query block a window of key blocks.

    It is `hierarchical` of dilated-attention-pytorch (the DarcStar fork).

    levels: (stride, window size) of each level, in tokens. Query blocks at multiples of the stride see the blocks
        within half a window on each side, or all blocks for window size -1; a query sees the keys of all its levels.
        Strides and half windows are rounded down to whole blocks, strides to at least one.
    block_size: tokens per block on all levels; in the source, a level's `block_size` has no effect.

    Raises TypeError or ValueError unless `levels` is a sequence of at least one such pair, with strides of at least 1
    and window sizes of at least -1; ValueError for a block_size below 1.
    Source: `HierarchicalConfig` and `BlockSparseHierarchical` of that package.
    """
    require_int("block_size", block_size, minimum=1)
    if not isinstance(levels, Sequence) or isinstance(levels, str):
        raise TypeError(f"levels must be a sequence of pairs (stride, window size); got {levels=}")
    if not levels:
        raise ValueError(f"levels must have at least one pair (stride, window size); got {levels=}")
    return blockwise(
        reduce(or_, [_level_pattern(place, level, block_size) for place, level in enumerate(levels)]), block_size
    )


def _one_per_axis(name: str, values: int | Sequence[int], grid: Sequence[int]) -> tuple[int, ...]:
    each = require_ints(name, values if isinstance(values, Sequence) else (values,) * len(grid), minimum=1)
    if len(each) != len(grid):
        raise ValueError(f"{name} must be one value, or one for each axis of grid={tuple(grid)}; got {name}={each}")
    return each


def _frames_and_places(grid: Sequence[int]) -> tuple[int, int]:
    """Return (number of frames, tokens of a frame) of a video's grid (frames, rows, columns)."""
    lengths = require_ints("grid", grid, minimum=1)
    if len(lengths) != 3:
        raise ValueError(f"grid must be (frames, rows, columns); got grid={lengths}")
    frames, rows, columns = lengths
    return frames, rows * columns


def _radius_in_blocks(window_size: int, block_size: int) -> int:
    require_int("block_size", block_size, minimum=1)
    return require_int("local_window_size", window_size, minimum=0) // block_size // 2


def _level_pattern(place: int, level: Sequence[int], block: int) -> Pattern:
    """Return the pattern of one level of `darcstar_hierarchical`, over blocks in place of tokens.

    level: (stride, window size) in tokens.
    place: index of the level, for errors.
    block: tokens per block.
    """
    if not isinstance(level, Sequence) or isinstance(level, str):
        raise TypeError(f"levels[{place}] must be a pair (stride, window size); got {level!r}")
    if len(level) != 2:
        raise ValueError(f"levels[{place}] must be a pair (stride, window size); got {level!r}")
    stride, size = level
    require_int(f"levels[{place}][0]", stride, minimum=1)
    require_int(f"levels[{place}][1]", size, minimum=_ALL_BLOCKS)
    step, half = max(1, stride // block), size // block // 2
    queries = every() if step == 1 else landmark_tokens(step, columns=False)
    keys = every() if size == _ALL_BLOCKS else local_window(left=half, right=half)
    # every() is left out of an intersection, which then prints shorter.
    return keys if queries == every() else queries if keys == every() else queries & keys


CONSTRUCTORS |= {f"recipes.{name}": globals()[name] for name in __all__}


def __getattr__(name: str) -> NoReturn:
    """Raise AttributeError for an unknown name; its text suggests up to two similar recipes."""
    raise AttributeError(no_such_name(__name__, name, __all__, {}, "masks.recipes."))
