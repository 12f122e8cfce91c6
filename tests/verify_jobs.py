"""Jobs for the ranks of `doctor --verify` that go well, go wrong, raise, hang and die; its processes import them."""

import os
import time
from typing import Any

from flexdilated.cli._verify_measure import Measured


def fine(mesh: Any) -> Measured:
    """Ranks differ in all that is measured."""
    rank = mesh.get_rank()
    return Measured(error=1e-7 * (1 + rank), forward_s=1.0 + rank, backward_s=None, memory_bytes=1000 + rank)


def wrong(mesh: Any) -> Measured:
    return Measured(error=0.5 * mesh.get_rank(), forward_s=1.0, backward_s=2.0, memory_bytes=None)


def raises(mesh: Any) -> Measured:
    if mesh.get_rank() == 1:
        raise ZeroDivisionError("by this rank\nand no other")
    time.sleep(3600)
    return fine(mesh)


def hangs(mesh: Any) -> Measured:
    if mesh.get_rank() == 0:
        time.sleep(3600)
    return fine(mesh)


def dies(mesh: Any) -> Measured:
    if mesh.get_rank() == 1:
        os._exit(7)
    time.sleep(3600)
    return fine(mesh)
