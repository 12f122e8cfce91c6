"""The processes of one demo, as torchrun starts them: each has a part of every text; without torchrun a team of one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._usage import UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Team:
    """This process's place among the processes, its device, and the mesh of all; None for a team of one."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the process that prints and writes files."""
        return self.rank == 0

    def by_first(self, work: Callable[[], Any]) -> Any:
        """What `work` returns, run by the first process alone and told to all; a UsageError is raised by all."""
        if self.mesh is None:
            return work()
        told: list[Any] = [None]
        if self.is_first:
            try:
                told = [(work(), None)]
            except UsageError as error:
                told = [(None, str(error))]
        torch.distributed.broadcast_object_list(told, src=0, device=self.device)
        result, error = told[0]
        if error is not None:
            raise UsageError(error)
        return result

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes, which all get bit for bit."""
        if self.mesh is None:
            return
        flat = torch.cat([x.reshape(-1) for x in tensors])
        torch.distributed.all_reduce(flat)
        for x, total in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
            x.copy_(total.view_as(x))

    def decide(self, number: int, *, stop: bool) -> tuple[int, bool]:
        """The first process's number, and whether any process is to stop: one answer for all."""
        if self.mesh is None:
            return number, stop
        votes = torch.tensor([number if self.is_first else 0, int(stop)], device=self.device)
        torch.distributed.all_reduce(votes)
        number, stops = votes.tolist()
        return number, stops > 0

    def check_alike(self, facts: Mapping[str, object]) -> None:
        """Raises UsageError, in all processes, if one has other facts than the first."""
        if self.mesh is None:
            return
        from ..distributed.group import Ranks, check_agreement

        try:
            check_agreement(Ranks.of(self.mesh), {name: str(value) for name, value in facts.items()})
        except ValueError as error:
            raise UsageError(str(error)) from None


@contextmanager
def team_of(device: str) -> Iterator[Team]:
    """The team that torchrun's environment describes, with its process group; only its first process is heard.

    What a process raises ends it, and torchrun then ends the others; its traceback is printed whichever it is.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Team(0, 1, torch.device(device))
        return
    from torch.distributed.device_mesh import init_device_mesh

    own = own_device(device)
    if own.type != "cpu":
        torch.accelerator.set_device_index(own)
    began = not torch.distributed.is_initialized()
    if began:
        torch.distributed.init_process_group(torch.distributed.get_default_backend_for_device(own))
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh = init_device_mesh(own.type, (size,), mesh_dim_names=("sequence",))
    with quiet(unless=rank == 0):
        yield Team(rank, size, own, mesh)
    # Not after an error: others may be in the middle of something, which the group's end would wait for.
    if began:
        torch.distributed.destroy_process_group()


def own_device(device: str) -> torch.device:
    """This process's device; of accelerators each process of a machine has its own, or a UsageError says why not."""
    kind = torch.device(device)
    if kind.type == "cpu":
        return kind
    processes, devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.accelerator.device_count()
    if kind.index is not None or processes > devices:
        raise UsageError(
            f"several processes take one accelerator each: --device must name a kind, such as {kind.type}, and a "
            f"machine run at most as many processes as it has of them; got {device}, {processes} processes, {devices}"
        )
    return torch.device(kind.type, int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def quiet(*, unless: bool) -> Iterator[None]:
    """What is printed goes nowhere, on standard error too; a traceback comes later, and is seen."""
    if unless:
        yield
        return
    with ExitStack() as stack:
        sys.stdout.flush()
        nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        stack.enter_context(redirect_stdout(nowhere))
        stack.enter_context(redirect_stderr(nowhere))
        yield
