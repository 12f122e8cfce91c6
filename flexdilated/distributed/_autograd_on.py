"""Autograd inside a custom op, where dispatch leaves it out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import _C


@contextmanager
def autograd_on() -> Iterator[None]:
    """Operations record for autograd, as outside of the op; `torch.enable_grad` alone does nothing there.

    An op's kernel runs with autograd's dispatch keys excluded on this thread, since the op as a whole has its own
    derivative. For an engine whose backward is autograd's, the op's kernel needs them back.
    """
    included, excluded = _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()
    keys = excluded - _C._dispatch_keyset_full_after...
