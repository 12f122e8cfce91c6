"""ImportanceTracker: the moving average of what each block gets, the same on all ranks."""

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
    """A moving average of block mass (`fd.block_mass`), one number for each head, block of queries and block of keys.

    After updates m_1 to m_t a block's importance is sum of decay^(t-i) * m_i over sum of decay^(t-i): the mean of what
    it got, the latest counting most, without a bias towards 0 at the start. Of a block that was restarted, only updates
    since then count; without any it is 0.

    num_heads, rows, columns: the shape of the mass.
    decay: from 0, the latest alone, to below 1.
    group: a process group whose ranks average their mass; None, the default, is this rank alone. The all-reduce begins
        with `update` and is waited for where the average is next needed. All ranks then hold bitwise the same average,
        and what `fd.refine` makes of it is the same pattern on all of them: refine at the same steps. Ranks must make
        the same updates and restarts, in the same order.
    device: of the buffers, in float32.

    `state_dict` holds `average` and `weight`, so that a run goes on exactly as it would have.
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
        """Take in the mass of one step, which may be changed afterwards. Nothing is waited for but the update before.

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
        """The mean of what each block got, float32; a new tensor. Waits for the update on its way."""
        self._settle()
        return torch.where(self.weight > 0, self.average / self.weight, 0.0)

    @torch.no_grad()
    def restart(self, blocks: Int64[Tensor, "n 3"]) -> None:
        """Forget what some blocks got: (head, row, column) of each, such as `grown` of what `fd.refine` returns.

        A block that is new in the pattern is so judged by what it gets from now on, and not by its time outside.
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
        """Take in what is on its way from other ranks."""
        if self._arriving is not None:
            (work, total), self._arriving = self._arriving, None
            work.wait()
            self._take(total / dist.get_world_size(self.group))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._settle()  # what arrives is on the device where the buffers are now
        return apply(self, fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        return self.__dict__.copy()


def _settled(tracker: Any, *_: object) -> None:
    """A hook before the state is read or replaced."""
    tracker._settle()
