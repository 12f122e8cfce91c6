"""Autograd inside a custom op, where dispatch leaves it out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import _C
from torch._C import DispatchKey

_KEYS = (DispatchKey.AutogradFunctionality, DispatchKey.AutogradOther, DispatchKey.AutogradNestedTensor)


@contextmanager
def autograd_on() -> Iterator[None]:
    """Operations record for autograd as they do outside of an op; `torch.enable_grad` alone does nothing in one.

    An op's kernel runs without autograd's dispatch keys, since the op as a whole has a derivative of its own. Where
    it calls an engine whose backward is autograd's, it needs them.
    """
    excluded = _C._dispatch_tls_local_exclude_set()
    for key in _KEYS:
        excluded = excluded.remove(key)
    with _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield
