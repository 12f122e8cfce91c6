"""Ranks: one axis of a DeviceMesh as plain values, for custom ops and compiled graphs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup, default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from ... import _torch_private


@dataclass(frozen=True)
class Ranks:
    """Name of a process group, number of its ranks, rank of this process in it, and kind of device."""

    name: str
    size: int
    rank: int
    device_type: str

    @classmethod
    def of(cls, mesh: object) -> Ranks:
        """The ranks of a mesh with one dimension. Raises TypeError or ValueError for anything else."""
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh must be a torch.distributed DeviceMesh; got {type(mesh).__name__}")
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names
            choose = f'mesh["{names[0]}"]' if names else "one with mesh_dim_names, and then mesh[name]"
            raise ValueError(
                f"mesh must have one dimension, that of the ranks that share a sequence; got {mesh.ndim} dimensions"
                f"{f' {names}' if names else ''}: give one of them, as {choose}"
            )
        if mesh.get_coordinate() is None:
            raise ValueError("this process is not among the ranks of the mesh")
        group = mesh.get_group()
        return Ranks(group.group_name, group.size(), group.rank(), mesh.device_type)

    @classmethod
    def named(cls, name: str, device_type: str) -> Ranks:
        """The ranks of the process group `name`, which is how ops refer to a group."""
        group = group_of(name)
        return cls(name, group.size(), group.rank(), device_type)

    @property
    def others(self) -> tuple[int, ...]:
        """All ranks but this one."""
        return tuple(rank for rank in range(self.size) if rank != self.rank)


def group_of(name: str) -> ProcessGroup:
    """The process group of this name. Raises RuntimeError if this process has not made it."""
    try:
        return _torch_private.resolve_process_group(name)
    except RuntimeError as error:
        message = f"the process group {name!r} was not made in this process, or has been destroyed"
        raise RuntimeError(message) from error


def timeout_of(ranks: Ranks) -> timedelta:
    """Timeout of a transfer; torch's default if the backend for this kind of device has none."""
    try:
        backend = _torch_private.get_backend(group_of(ranks.name), torch.device(ranks.device_type))
    except RuntimeError:  # no backend for this kind: `check_device` raises a better error
        return default_pg_timeout
    return _torch_private.timeout_of(backend) or default_pg_timeout
