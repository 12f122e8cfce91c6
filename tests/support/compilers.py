"""Compilers that generate no code, for what tracing alone decides: graphs, guards, and what a call refuses."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import peers
from flexdilated import masks
from flexdilated.engines.flex import _flex


def as_it_is(graph: torch.fx.GraphModule, inputs: list[Tensor], **options: Any) -> torch.fx.GraphModule:
    """A backend that compiles nothing: tracing is what counts."""
    return graph


@contextmanager
def without_inductor() -> Iterator[None]:
    """Functions that flex or a benchmark compiles are traced, and their graphs run as they are; none is kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend=as_it_is))
        try:
            _forget_functions()
            yield
        finally:
            _forget_functions()


@pytest.fixture(autouse=True, scope="module")
def nothing_is_built() -> Iterator[None]:
    """A kernel in C++ takes seconds to build; that it is right is for tests/engines/test_flex.py."""
    with without_inductor():
        yield


def _forget_functions() -> None:
    torch.compiler.reset()
    for kept in (masks.cache().clear, _flex.compiled_flex.cache_clear, peers._compiled_flex.cache_clear):
        kept()
