"""torch.compile without C++: what a module's tests compile is traced, and runs on eager kernels."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from bench.device import _device
from flexdilated import masks
from flexdilated.engines.flex._flex_function import compiled_flex


@pytest.fixture(autouse=True, scope="module")
def nothing_is_built() -> Iterator[None]:
    """A kernel in C++ takes seconds to build; that it is right is for tests/test_flex.py. Nothing traced is kept."""
    traced = partial(torch.compile, backend="aot_eager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", traced)
        _forget()
        yield
    _forget()


def _forget() -> None:
    for kept in (masks.cache().clear, compiled_flex.cache_clear, _device._compiled.cache_clear):
        kept()
