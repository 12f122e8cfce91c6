"""One training step, set up so that its memory can be measured in a process of its own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from ._memory import peak_bytes
from ._problem import Attention, Problem, Size, train
from ._timing import say
from .peer_dense import dense_attention

_WARM_UP_TOKENS = 64


class Sparse(Protocol):
    """What has an attention of the library; it must pickle."""

    def attention(self) -> Attention:
        """The library's attention with this pattern."""
        ...


def library_step_bytes(spec: Sparse, size: Size) -> int:
    """Peak bytes of a forward and backward: inputs, the output's gradient, results, plan and temporaries."""
    return _said("flexdilated", size, peak_bytes(_library_step, spec, size))


def dense_step_bytes(size: Size, *, causal: bool) -> int:
    """The same of dense SDPA."""
    return _said("dense SDPA", size, peak_bytes(_dense_step, causal, size))


def _library_step(spec: Sparse, size: Size) -> Callable[[], object]:
    return _step(spec.attention(), size)


def _dense_step(causal: bool, size: Size) -> Callable[[], object]:
    return _step(dense_attention(causal=causal), size)


def _step(attention: Attention, size: Size) -> Callable[[], object]:
    train(attention, Problem.draw(replace(size, num_tokens=_WARM_UP_TOKENS)))
    return lambda: train(attention, Problem.draw(size))


def _said(name: str, size: Size, peak: int) -> int:
    say(f"{name}, {size}: peak {peak / 2**20:.0f} MiB")
    return peak
