"""Ranks: one axis of a DeviceMesh as plain values, for custom ops and compiled graphs; `Traffic`: counts of bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Lock
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, default_pg_timeout, get_backend_config
from torch.distributed.device_mesh import DeviceMesh

from ... import _torch_private
from ..._torch_private import graph_constant
from ...masks.core import require_choice

Role = Literal["keys", "gradients", "heads", "shards", "set-up"]


@dataclass(frozen=True)
class Ranks:
    """Name of a process group, number of its ranks, rank of this process in it, and kind of device."""

    name: str
    size: int
    rank: int
    device_type: str

    @classmethod
    def of(cls, mesh: object) -> Ranks:
        """Return the ranks of a one-dimensional DeviceMesh that contains this process.

        Raises TypeError or ValueError for anything else.
        """
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
            raise ValueError("mesh must contain the rank of this process: call this on ranks of the mesh alone")
        group = mesh.get_group()
        return Ranks(group.group_name, group.size(), group.rank(), mesh.device_type)

    @classmethod
    def named(cls, name: str, device_type: str) -> Ranks:
        """Return the ranks of the process group `name`; ops refer to a group by its name."""
        group = group_of(name)
        return cls(name, group.size(), group.rank(), device_type)

    @property
    def others(self) -> tuple[int, ...]:
        """All ranks except this one."""
        return tuple(rank for rank in range(self.size) if rank != self.rank)


def group_of(name: str) -> ProcessGroup:
    """Return the process group of this name. Raises RuntimeError if this process has not made it, or destroyed it."""
    try:
        return _torch_private.resolve_process_group(name)
    except RuntimeError as error:
        message = f"the process group {name!r} was not made in this process, or has been destroyed"
        raise RuntimeError(message) from error


def timeout_of(ranks: Ranks) -> timedelta:
    """Return the timeout of a transfer: that of the group's backend for this kind of device, else torch's default."""
    try:
        backend = _torch_private.get_backend(group_of(ranks.name), torch.device(ranks.device_type))
    except RuntimeError:  # no backend for this kind: `check_device` raises a better error
        return default_pg_timeout
    return _torch_private.timeout_of(backend) or default_pg_timeout


def check_device(ranks: Ranks, tensor: Tensor) -> None:
    """Raise ValueError unless the tensor is on the mesh's kind of device and the group has a backend for that kind."""
    config = _backends(ranks.name)
    kinds = [part.partition(":")[0] for part in config.split(",")]
    if tensor.device.type != ranks.device_type or tensor.device.type not in kinds:
        raise ValueError(
            f"tensors must be on the mesh's kind of device, and its process group must serve that kind; got a tensor "
            f"on {tensor.device.type}, a mesh of {ranks.device_type} devices and a process group of {config}"
        )


@graph_constant  # torch.compile cannot trace the look-up of a group
def _backends(group: str) -> str:
    """Return the backends of the process group of this name, by kind of device: text such as "cpu:gloo,cuda:nccl"."""
    return get_backend_config(group_of(group))


@dataclass
class Traffic:
    """Payload bytes sent and received, and number of transfers, by role, since the process began or since `reset`.

    A transfer is one collective, one message to or from another rank, or one check that all ranks agree. The roles are:

    * "keys": keys and values, sent to the ranks whose queries need them.
    * "gradients": gradients of these keys and values, sent back to the ranks that hold them.
    * "heads": exchanges of head parallelism.
    * "shards": `unshard` and its gradient, also where modules call it, such as `SelectedAttention` with a mesh.
    * "set-up": the check that all ranks agree, the choice of codec "auto", and the seed of dropout.

    Other transfers, such as those of `ImportanceTracker`, are not counted.

    >>> sent = fd.distributed.traffic().sent  # bytes, by role
    """

    sent: Counter[Role] = field(default_factory=Counter)
    received: Counter[Role] = field(default_factory=Counter)
    transfers: Counter[Role] = field(default_factory=Counter)
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def reset(self) -> None:
        """Count from 0 again."""
        with self._lock:
            for counter in (self.sent, self.received, self.transfers):
                counter.clear()

    def add(self, role: Role, sent: int, received: int) -> None:
        """Count one transfer; `sent` and `received` are in bytes. Raises ValueError for an unknown role."""
        require_choice("role", role, get_args(Role))
        with self._lock:
            self.sent[role] += sent
            self.received[role] += received
            self.transfers[role] += 1


_traffic = Traffic()


def traffic() -> Traffic:
    """Return the `Traffic` of this process: bytes and transfers since the process began, or since `Traffic.reset`.

    >>> print(sum(fd.distributed.traffic().sent.values()), 'bytes')
    0 bytes
    """
    return _traffic


def record(role: Role, *, sent: int = 0, received: int = 0) -> None:
    """Count one transfer of this process; `sent` and `received` in bytes."""
    _traffic.add(role, sent, received)
