"""Ranks on one machine: a function on several processes that share a gloo group."""

import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ._apart import run_together

LIMIT_S = 120.0


def on_ranks(num_ranks: int, function: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S) -> list[Any]:
    """function(mesh, *args) on every rank of a mesh of one dimension, one thread each; the results by rank.

    The function must be importable; args and results must pickle. Raises DiedApart if a rank ends without a result,
    and TookTooLong if one has none within `limit_s` seconds, which is the group's timeout too.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        calls = [(_rank, (rank, num_ranks, store, limit_s, function, args)) for rank in range(num_ranks)]
        return run_together(calls, limit_s=limit_s)


def each_on_ranks(num_ranks: int, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
    """function(mesh, *args) for each args of `calls`, in turn on the same ranks; for each call the results by rank."""
    by_rank = on_ranks(num_ranks, _in_turn, function, tuple(calls))
    return [list(found) for found in zip(*by_rank, strict=True)]


def _in_turn(mesh: DeviceMesh, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    return [function(mesh, *args) for args in calls]


def _rank(
    rank: int, num_ranks: int, store: str, limit_s: float, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    torch.set_num_threads(1)
    meeting = dist.FileStore(store, num_ranks)  # pyright: ignore[reportPrivateImportUsage]
    timeout = timedelta(seconds=limit_s)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=num_ranks, timeout=timeout)
    try:
        mesh: DeviceMesh = init_device_mesh("cpu", (num_ranks,))
        result = function(mesh, *args)
        # A rank that leaves sooner would take its connections from under those that still work.
        dist.barrier()
        return result
    finally:
        dist.destroy_process_group()
