"""The watch under which no derivative of attention passes a tie that torch decides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.ties import NoTies

OPERATIONS: dict[str, Callable[[Tensor], object]] = {
    "clamp": lambda x: torch.clamp(x, min=1.0),
    "clamp to a tensor": lambda x: x.clamp(max=torch.ones(3)),
    "clamp_min": lambda x: x.clamp_min(1.0),
    "clip": lambda x: x.clip(-5.0, 1.0),
    "in place": lambda x: (x * 1).clamp_max_(1.0),
    "relu": lambda x: F.relu(x - 1),
    "relu6": lambda x: F.relu6(x + 5),
    "abs": lambda x: (x - 1).abs(),
    "maximum": lambda x: torch.maximum(x, torch.ones(3)),
    "min of two": lambda x: torch.min(torch.ones(3), x),
    "amax": lambda x: x.expand(2, 3).amax(0),
    "max over a dim": lambda x: x.expand(2, 3).max(0),
    "min of all": lambda x: torch.min(x.expand(2, 3)),
    "topk": lambda x: x.expand(2, 3).topk(1, 0),
    "loss": lambda x: F.hinge_embedding_loss(x, -torch.ones(3), margin=1.0),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_watch_sees(name):
    x = torch.tensor([0.0, 1.0, 2.0], requires_grad=True)
    with NoTies():
        with pytest.raises(AssertionError, match="through a tie"):
            OPERATIONS[name](x)
        OPERATIONS[name](x.detach())
        with torch.no_grad():
            OPERATIONS[name](x)
        if "expand" not in OPERATIONS[name].__code__.co_names:
            OPERATIONS[name](x + 0.25)
