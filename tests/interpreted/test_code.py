"""The flex engine's kernels as machine code for an H200 and an A100: they fit, and spill no more than before."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from bench._catalogue import ENTRIES, Entry
from tests.interpreted.conftest import RESULTS
from tests.interpreted.emulated_cuda import A100, H200, describe, require

require(interpreted=False)

from tests.interpreted.kernel_code import code_of  # noqa: E402

# torch's own tracer looks at `grad` of what it traces.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

NAME = "kernel_code"
QUICK = {("H200", "causal", 128), ("H200", "dilated", 64), ("H200", "documents", 64), ("A100", "causal", 128)}


def _cases() -> list:
    found = []
    for device in (H200, A100):
        for entry in ENTRIES:
            for head_dim in (64, 128) if device is H200 else (128,):
                key = (device.name.split()[-1], entry.name, head_dim)
                marks = () if key in QUICK else pytest.mark.thorough
                found.append(pytest.param(device, entry, head_dim, marks=marks, id="-".join(map(str, key))))
    return found


def recorded(key: str) -> dict:
    """What a kernel took when it was last recorded."""
    path = RESULTS / f"{NAME}.json"
    return json.loads(path.read_text(encoding="utf-8"))["cases"].get(key, {}) if path.exists() else {}


@pytest.mark.parametrize(("device", "entry", "head_dim"), _cases())
def test_kernels_compile_and_fit(device: SimpleNamespace, entry: Entry, head_dim: int, request, record_property):
    describe(device)
    key = f"sm_{device.major}{device.minor}, {entry.name}, {head_dim}"
    before = recorded(key)
    assert before or request.config.getoption("--all", default=False), "recorded by make test-kernels ARGS=--all"
    found = code_of(entry, head_dim)
    for way, code in found.items():
        assert code.shared <= device.shared_memory_per_block_optin
        assert not before or code.spill_stores <= before[way]["spill_stores"], f"{way}: more spills than recorded"
    record_property(f"{NAME}: {key}", {way: code.to_data() for way, code in found.items()})
