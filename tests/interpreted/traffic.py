"""What kernels beside attention read and write, counted by Triton's interpreter: every byte once a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from torch._inductor.runtime import triton_heuristics

from tests.interpreted.emulated_cuda import is_template, triton


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes of each load and store of kernels that run meanwhile; attention's own are made and do not run."""
    moved: list[int] = []
    builder = triton("runtime.interpreter").InterpreterBuilder

    def counting(method: Callable[..., Any], mask_place: int) -> Callable[..., Any]:
        def counted_call(self: Any, pointers: Any, *rest: Any) -> Any:
            there = np.broadcast_to(rest[mask_place].data, pointers.data.shape)
            moved.append(len(np.unique(pointers.data[there])) * pointers.get_element_ty().primitive_bitwidth // 8)
            return method(self, pointers, *rest)

        return counted_call

    run = triton_heuristics.CachingAutotuner.run

    def run_others(self: Any, *arguments: Any, **options: Any) -> Any:
        return None if is_template(self) else run(self, *arguments, **options)

    # What attention did not write may be anything.
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(triton_heuristics.CachingAutotuner, "run", run_others)
        patch.setattr(builder, "create_masked_load", counting(builder.create_masked_load, 0))
        patch.setattr(builder, "create_masked_store", counting(builder.create_masked_store, 1))
        yield moved
