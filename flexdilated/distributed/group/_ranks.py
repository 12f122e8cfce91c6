"""Ranks: one axis of a DeviceMesh as plain values, which a custom op and a compiled graph can hold."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup, default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from ... import _torch_private


@dataclass(frozen=True)
class Ranks:
    """A process group's name, the number of its ranks, this process's place among them, and the kind of device."""

    name: str
    size: int
    rank: int
    device_type: str

    @classmethod
    def of(cls, mesh: object) -> Ranks:
        """The ranks of a mesh of one dimension. Raises TypeError or ValueError for anything else."""
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
        """The ranks of a process group, which an op is given by name."""
        group = group_of(name)
        return cls(name, group.size(), group.rank(), device_type)

    @property
    def others(self) -> tuple[int, ...]:
        """All ranks but this one."""
        return tuple(rank for rank in range(self.size) if rank != self.rank)


def group_of(name: str) -> ProcessGroup:
    """The process group of ranks that were made in this process."""
    try:
        return _torch_private.resolve_process_group(name)
    except RuntimeError as error:
        message = f"the process group {name!r} was not made in this process, or has been destroyed"
        raise RuntimeError(message) from error


def timeout_of(ranks: Ranks) -> timedelta:
    """How long a transfer may take; torch's default where the backend of this kind of device does not say."""
    try:
        backend = _torch_private.get_backend(group_of(ranks.name), torch.device(ranks.device_type))
    except RuntimeError:  # the group has no backend for it, which `check_device` answers
        return default_pg_timeout
    return _torch_private.timeout_of(backend) or default_pg_timeout
