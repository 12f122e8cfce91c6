"""ImportanceTracker: moving average of the attention mass of each block, equal on all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int64
from torch import Tensor, nn

from .._torch_private import apply
from ..masks.core import advises, require_finite, require_int

# H heads, R rows and C columns of blocks


@advises()
class ImportanceTracker(nn.Module):
    """Moving average of block mass (`fd.block_mass`), one number per head, query block and key block.

    After updates m_1 to m_t, importance is sum of decay^(t-i) * m_i over sum of decay^(t-i): a weighted mean in which
    later updates count more, without a bias towards 0 at the start. For a block that was restarted, only later updates
    count; without any, its importance is 0.

    num_heads, rows, columns: the shape of the mass.
    decay: in [0, 1); 0 keeps only the latest update.
    group: a process group whose ranks average their mass; None, the default, is this rank alone. `update` starts the
        all-reduce, and the next use of the average waits for it. All ranks then have a bitwise equal average, from
        which `fd.refine` gives all of them one pattern, if they refine at equal steps. Ranks must make equal sequences
        of updates and restarts.
    device: of the buffers, which are float32.

    `state_dict` holds `average` and `weight`, from which a run continues exactly.
    Raises ValueError or TypeError for sizes below 1 and a decay outside [0, 1).

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
        if not 0 <= require_finite("decay", decay) < 1:
            raise ValueError(f"decay must be at least 0 and below 1; got {decay=}")
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                "group must be a process group, such as dist.group.WORLD once it is made, or None; "
                f"got {type(group).__name__}"
            )
        sizes = {"num_heads": num_heads, "rows": rows, "columns": columns}
        shape = [require_int(name, size, minimum=1) for name, size in sizes.items()]
        self.decay, self.group = float(decay), group
        self._arriving: tuple[dist.Work, Tensor] | None = None
        self.register_buffer("average", torch.zeros(shape, dtype=torch.float32, device=device))
        self.register_buffer("weight", torch.zeros(shape, dtype=torch.float32, device=device))
        self.register_state_dict_pre_hook(_settled)
        self.register_load_state_dict_pre_hook(_settled)

    @torch.no_grad()
    def update(self, mass: Float[Tensor, "H R C"]) -> None:
        """Add the mass of one step; the tensor may be changed afterwards. Waits only for the previous update.

        Raises ValueError for another shape or device.
        """
        if mass.shape != self.average.shape:
            raise ValueError(f"mass must have the shape {tuple(self.average.shape)}; got {tuple(mass.shape)}")
        if mass.device != self.average.device:
            raise ValueError(f"mass must be on the tracker's device, {self.average.device}; got {mass.device}")
        self._settle()
        if self.group is None:
            self._take(mass)
            return
        total = mass.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        work = dist.all_reduce(total, group=self.group, async_op=True)
        assert work is not None, "this rank is in the group"
        self._arriving = work, total

    @torch.no_grad()
    def importance(self) -> Float[Tensor, "H R C"]:
        """Weighted mean mass of each block, float32, in a new tensor. Waits for a pending update."""
        self._settle()
        return torch.where(self.weight > 0, self.average / self.weight, 0.0)

    @torch.no_grad()
    def restart(self, blocks: Int64[Tensor, "n 3"]) -> None:
        """Forget the updates of blocks, rows (head, row, column), such as `grown` in the result of `fd.refine`.

        A block that enters the pattern is then judged only by updates from now on.
        """
        self._settle()
        head, row, column = blocks.to(self.average.device).unbind(1)
        self.average[head, row, column] = 0.0
        self.weight[head, row, column] = 0.0

    def extra_repr(self) -> str:
        heads, rows, columns = self.average.shape
        return f"num_heads={heads}, rows={rows}, columns={columns}, decay={self.decay}"

    def _take(self, mass: Tensor) -> None:
        self.average.mul_(self.decay).add_(mass, alpha=1 - self.decay)
        self.weight.mul_(self.decay).add_(1 - self.decay)

    def _settle(self) -> None:
        """Wait for the pending update and add it."""
        if self._arriving is not None:
            (work, total), self._arriving = self._arriving, None
            work.wait()
            self._take(total / dist.get_world_size(self.group))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._settle()  # before the buffers move: the pending update is on their current device
        return apply(self, fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        return self.__dict__.copy()


def _settled(tracker: Any, *_: object) -> None:
    """Hook: finish the pending update before the state is read or replaced."""
    tracker._settle()
