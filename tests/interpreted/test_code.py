"""The flex engine's kernels as machine code for devices that are not here: they fit, and spill no more than before."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bench._catalogue import ENTRIES, Entry
from tests.interpreted.conftest import recorded
from tests.interpreted.emulated_cuda import A100, B200, H200, RTX_5090, describe, require

require(interpreted=False)

from tests.interpreted.kernel_code import code_of  # noqa: E402

NAME = "kernel_code"
QUICK = {("H200", "causal", 128), ("H200", "dilated", 64), ("H200", "documents", 64), ("A100", "causal", 128)}


def _cases() -> list:
    found = []
    for device, head_dims in ((H200, (64, 128)), (A100, (128,)), (B200, (64, 128)), (RTX_5090, (128,))):
        for entry in ENTRIES:
            for head_dim in head_dims:
                key = (device.name.split()[-1], entry.name, head_dim)
                marks = () if key in QUICK else pytest.mark.thorough
                found.append(pytest.param(device, entry, head_dim, marks=marks, id="-".join(map(str, key))))
    return found


@pytest.mark.parametrize(("device", "entry", "head_dim"), _cases())
def test_kernels_compile_and_fit(device: SimpleNamespace, entry: Entry, head_dim: int, request, record_property):
    describe(device)
    key = f"sm_{device.major}{device.minor}, {entry.name}, {head_dim}"
    before = recorded(NAME).get(key, {})
    assert before or request.config.getoption("--all", default=False), "recorded by make test-kernels ARGS=--all"
    found = code_of(entry, head_dim)
    for way, code in found.items():
        assert code.shared <= device.shared_memory_per_block_optin
        assert not before or code.spill_stores <= before[way]["spill_stores"], f"{way}: more spills than recorded"
    record_property(f"{NAME}: {key}", {way: code.to_data() for way, code in found.items()})
