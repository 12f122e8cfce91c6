"""refine: in each head, replace the blocks with least attention mass by the unlisted blocks with highest scores."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from .._torch_private import apply
from ..masks import Pattern, block_list, cache
from ..masks.core import advises, outside_torch_modes, require_int, require_probability
from ..masks.patterns import BlockList
from ..masks.planning import bound_blocks, shared_terms

# H heads, R rows and C columns of blocks


class Refinement(NamedTuple):
    """Result of `refine`: the new pattern, or the given one if no block moved, and the dropped and added blocks.

    A block is (head, query block, key block).
    """

    pattern: Pattern
    dropped: Int64[Tensor, "n 3"]
    grown: Int64[Tensor, "n 3"]


@outside_torch_modes
@torch.no_grad()
@advises()
def refine(
    pattern: Pattern,
    importance: Float[Tensor, "H R C"],
    *,
    scores: Float[Tensor, "H R C"],
    moves: int,
    within: Pattern | None = None,
    keep: Pattern | None = None,
) -> Refinement:
    """Return a `Refinement`: in each head, up to `moves` listed blocks are dropped, and as many unlisted ones added.

    The dropped blocks are those of least importance, the added ones those of highest score. The rule is RigL's (arXiv
    1911.11134, section 3), with attention mass in place of magnitude, and scores in place of gradients. Among equal
    numbers the lower query block, then the lower key block comes first. The result depends on the arguments alone, so
    ranks with equal arguments get equal patterns.

    pattern: from `masks.block_list`, with one table per head. Pass it without other patterns; intersect the result with
        them, such as `causal()`, for attention.
    importance: mass of each block, such as `ImportanceTracker.importance()`; read for listed blocks.
    scores: estimate for each block, such as `fd.pooled_scores`; read for unlisted blocks. -inf: never added.
    moves: number of blocks to replace in each head, at least 0; fewer if fewer blocks can be dropped or added.
    within: blocks in which this pattern has no pair are never added; None allows all.
    keep: blocks in which this pattern has a pair are never dropped. The most important block of each query block is not
        dropped either, so a query block with blocks keeps at least one.

    within and keep are evaluated for R and C whole blocks of the list's size. If any block moved, cache entries of the
    old pattern, and of all patterns that contain it, are dropped: `masks.cache().forget(pattern)`.

    Raises TypeError or ValueError for a pattern of another kind or without one table per head, for importance and
    scores that are no tensors of equal shape for its blocks, not of floating point or with NaN, and for within and keep
    that do not fit this number of heads and tokens.

    >>> listed = masks.block_list([[[0], [0, 1], [0, 1, 2]]], block=64)  # one head
    >>> importance = torch.tensor([[[1.0, 0.0, 0.0], [0.4, 0.6, 0.0], [0.1, 0.2, 0.7]]])
    >>> scores = torch.tensor([[[0.0, 9.0, 9.0], [0.0, 0.0, 9.0], [0.0, 0.0, 0.0]]])
    >>> fd.refine(listed, importance, scores=scores, moves=1, within=masks.causal()).grown  # no block can be added
    tensor([], size=(0, 3), dtype=torch.int64)
    >>> fd.refine(listed, importance, scores=scores, moves=1).pattern  # (2, 0) is dropped, (0, 1) added
    block_list(rows=(((0, 1), (0, 1), (1, 2)),), block=64)
    """
    require_int("moves", moves, minimum=0)
    listed = _listed_mask(pattern, importance)
    _check_numbers("scores", scores, tuple(importance.shape))
    mass, potential = importance.detach().cpu().double(), scores.detach().cpu().double()
    block = pattern.block  # type: ignore[attr-defined]  # `_listed_mask` checks the kind
    droppable = listed & ~_most_massive_mask(mass, listed)
    if keep is not None:
        droppable &= ~_nonempty_mask("keep", keep, listed, block)
    growable = ~listed & (potential > -torch.inf)
    if within is not None:
        growable &= _nonempty_mask("within", within, listed, block)
    exchanged = torch.minimum(droppable.sum((1, 2)), growable.sum((1, 2))).clamp(max=moves)
    dropped, grown = _lowest_mask(droppable, mass, exchanged), _lowest_mask(growable, -potential, exchanged)
    if bool((exchanged == 0).all()):
        return Refinement(pattern, dropped.nonzero(), grown.nonzero())
    cache().forget(pattern)
    return Refinement(block_list(listed & ~dropped | grown, block=block), dropped.nonzero(), grown.nonzero())


def _listed_mask(pattern: object, importance: Tensor) -> Bool[Tensor, "H R C"]:
    """Return booleans in the shape of importance, True for the blocks that the pattern lists.

    Raises TypeError or ValueError for a pattern or an importance that `refine` cannot use.
    """
    if not isinstance(pattern, BlockList):
        raise TypeError(
            "pattern must be made by masks.block_list: refine it alone, and intersect the result with other patterns; "
            f"got {pattern!r:.80}"
        )
    if not pattern.by_head:
        raise ValueError(
            "refine needs one table for each head: masks.block_list([rows] * num_heads, block=...); got one table"
        )
    if not isinstance(importance, Tensor) or importance.dim() != 3:
        came = tuple(importance.shape) if isinstance(importance, Tensor) else type(importance).__name__
        raise ValueError(f"importance must be a tensor of shape (heads, rows, columns of blocks); got {came}")
    heads, rows, columns = importance.shape
    _check_numbers("importance", importance, (len(pattern.rows), rows, columns))
    longest, last = max(map(len, pattern.rows)), max(max(row, default=-1) for table in pattern.rows for row in table)
    if longest > rows or last >= columns:
        raise ValueError(
            f"importance must cover all blocks of the pattern, {longest} rows and {last + 1} columns; "
            f"got {rows} and {columns}"
        )
    listed = torch.zeros(heads, rows, columns, dtype=torch.bool)
    for head, table in enumerate(pattern.rows):
        for row, named in enumerate(table):
            listed[head, row, list(named)] = True
    return listed


def _check_numbers(name: str, x: object, shape: tuple[int, ...]) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(x).__name__}")
    if tuple(x.shape) != shape:
        raise ValueError(
            f"{name} must have the shape {shape} of (heads, rows, columns of blocks); got {tuple(x.shape)}"
        )
    if not x.is_floating_point():
        raise ValueError(f"{name} must have a floating-point dtype; got {x.dtype}")
    if bool(x.isnan().any()):
        raise ValueError(f"{name} must hold no NaN; got {int(x.isnan().sum())} in {x.numel()} values")


def _most_massive_mask(mass: Tensor, listed: Tensor) -> Bool[Tensor, "H R C"]:
    """Return a mask, True for the first of the listed blocks with most mass in each query block that lists any."""
    rows = listed.flatten(0, 1)
    return _lowest_mask(rows, -mass.flatten(0, 1), rows.any(-1).long()).view_as(listed)


def _nonempty_mask(name: str, pattern: object, listed: Tensor, block: int) -> Bool[Tensor, "H R C"]:
    """Return booleans in the shape of `listed`, True for blocks in which a pattern has a pair.

    block: tokens of a block of queries, and of keys.

    Raises TypeError unless `pattern` is a pattern, and no mixture.
    """
    if not isinstance(pattern, Pattern):
        raise TypeError(f"{name} must be None or a pattern that is not a mixture; got {pattern!r:.80}")
    heads, rows, columns = listed.shape
    bound = pattern.bind(num_heads=heads, num_queries=rows * block, num_keys=columns * block)
    (term,) = shared_terms(bound.union, 1, bound, 1)
    found = torch.zeros(heads, rows, columns, dtype=torch.bool)
    for blocks in bound_blocks(term, bound, (block, block)):
        tables = torch.zeros(blocks.num_tables, rows, columns, dtype=torch.bool)
        tables[blocks.table.long(), blocks.row.long(), blocks.column.long()] = True
        found |= tables[list(blocks.heads)]
    return found


def _lowest_mask(among: Tensor, key: Tensor, number: Tensor) -> Bool[Tensor, "H ..."]:
    """Return a mask that selects, in each among[h], the number[h] True elements with the lowest `key`.

    number[h] must not exceed the number of True elements of among[h], and `key` must hold no NaN; it may be infinite.
    Of elements with equal keys the first in row-major order is selected.
    """
    order = key.masked_fill(~among, torch.nan).flatten(1).sort(dim=1, stable=True).indices  # NaN sorts behind inf
    chosen = torch.arange(order.shape[1]) < number[:, None]
    return torch.zeros_like(chosen).scatter_(1, order, chosen).view_as(among)


@advises()
class ImportanceTracker(nn.Module):
    """Moving average of block mass (`fd.block_mass`), one number per head, query block and key block.

    After updates m_1 to m_t, importance is sum of decay^(t-i) * m_i over sum of decay^(t-i): a weighted mean in which
    later updates count more, without a bias towards 0 at the start. For a block that was restarted, only later updates
    count; its importance is 0 until the next one.

    num_heads, rows, columns: the shape of the mass, in heads, query blocks and key blocks.
    decay: in [0, 1); 0 keeps only the latest update.
    group: a process group whose ranks average their mass; None, the default: no communication. `update` starts the
        all-reduce, and the next use of the average waits for it. All ranks then have a bitwise equal average, from
        which `fd.refine` gives all of them one pattern, if they refine at equal steps. Ranks must make equal sequences
        of updates and restarts.
    device: of the buffers, which are float32.

    `state_dict` holds `average` and `weight`, from which a run continues exactly.
    Raises ValueError or TypeError for sizes below 1, a decay outside [0, 1) and a group of another type.

    >>> tracker = fd.ImportanceTracker(1, 1, 2, decay=0.5)
    >>> tracker.update(torch.tensor([[[1.0, 0.0]]]))
    >>> tracker.update(torch.tensor([[[0.25, 0.75]]]))
    >>> tracker.importance()  # (1 + 2 * 0.25) / 3 and 2 * 0.75 / 3
    tensor([[[0.5000, 0.5000]]])
    """

    average: Float[Tensor, "H R C"]  # weight * importance
    weight: Float[Tensor, "H R C"]

    def __init__(
        self,
        num_heads: int,
        rows: int,
        columns: int,
        *,
        decay: float = 0.99,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                "group must be a process group, such as dist.group.WORLD once it is made, or None; "
                f"got {type(group).__name__}"
            )
        sizes = {"num_heads": num_heads, "rows": rows, "columns": columns}
        shape = [require_int(name, size, minimum=1) for name, size in sizes.items()]
        self.decay, self.group = require_probability("decay", decay), group
        self._pending: tuple[dist.Work, Tensor] | None = None
        self.register_buffer("average", torch.zeros(shape, dtype=torch.float32, device=device))
        self.register_buffer("weight", torch.zeros(shape, dtype=torch.float32, device=device))
        self.register_state_dict_pre_hook(_settle_pending)
        self.register_load_state_dict_pre_hook(_settle_pending)

    @torch.no_grad()
    def update(self, mass: Float[Tensor, "H R C"]) -> None:
        """Add the block mass of one training step; the tensor may be changed afterwards.

        Waits only for the all-reduce of the previous update. Raises ValueError unless mass has the tracker's shape and
        device.
        """
        if mass.shape != self.average.shape:
            raise ValueError(f"mass must have the shape {tuple(self.average.shape)}; got {tuple(mass.shape)}")
        if mass.device != self.average.device:
            raise ValueError(f"mass must be on the tracker's device, {self.average.device}; got {mass.device}")
        self._settle()
        if self.group is None:
            self._add_to_average(mass)
            return
        total = mass.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        work = dist.all_reduce(total, group=self.group, async_op=True)
        assert work is not None, "this rank is in the group"
        self._pending = work, total

    @torch.no_grad()
    def importance(self) -> Float[Tensor, "H R C"]:
        """Return the weighted mean mass of each block, float32, in a new tensor; 0 for a block without updates.

        Waits for a pending update.
        """
        self._settle()
        return torch.where(self.weight > 0, self.average / self.weight, 0.0)

    @torch.no_grad()
    def restart(self, blocks: Int64[Tensor, "n 3"]) -> None:
        """Forget the past updates of blocks, (head, query block, key block), such as `grown` in a `Refinement`."""
        self._settle()
        head, row, column = blocks.to(self.average.device).unbind(1)
        self.average[head, row, column] = 0.0
        self.weight[head, row, column] = 0.0

    def extra_repr(self) -> str:
        heads, rows, columns = self.average.shape
        return f"num_heads={heads}, rows={rows}, columns={columns}, decay={self.decay}"

    def _add_to_average(self, mass: Tensor) -> None:
        self.average.mul_(self.decay).add_(mass, alpha=1 - self.decay)
        self.weight.mul_(self.decay).add_(1 - self.decay)

    def _settle(self) -> None:
        """Wait for the pending update, if any, and add it."""
        if self._pending is not None:
            (work, total), self._pending = self._pending, None
            work.wait()
            self._add_to_average(total / dist.get_world_size(self.group))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._settle()  # before the buffers move: the pending update is on their current device
        return apply(self, fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        return self.__dict__.copy()


def _settle_pending(tracker: Any, *_: object) -> None:
    """Hook: finish the pending update before the state is read or replaced."""
    tracker._settle()
